"""What a decoder is to every part of the compiler and the runtime: its sizes and the roles of its state. No torch."""

from __future__ import annotations

from enum import StrEnum
from typing import Literal

from pydantic import ConfigDict
from pydantic.dataclasses import dataclass


class StateRole(StrEnum):
    """What a state tensor is for."""

    KEY_CACHE = "key_cache"
    VALUE_CACHE = "value_cache"
    MLP_CACHE = "mlp_cache"
    GATE_CACHE = "gate_cache"
    CHAIN_COUNT = "chain_count"
    CONTEXT_KEY = "context_key"
    CONTEXT_VALUE = "context_value"
    CONTEXT_MASK = "context_mask"


ATTENTION_ROLES = (StateRole.KEY_CACHE, StateRole.VALUE_CACHE)
"""The state that prefill writes."""


CONTEXT_ROLES = (StateRole.CONTEXT_KEY, StateRole.CONTEXT_VALUE, StateRole.CONTEXT_MASK)
"""The state that forwards only read: what cross-attention sees of the context. The context graph writes it."""


REPLAY_ROLES = (StateRole.MLP_CACHE, StateRole.GATE_CACHE, StateRole.CHAIN_COUNT)
"""The state that belongs to replay."""


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Ring:
    """Sparse attention over ring caches [B, Hkv, sinks + rows, D] (docs/explanation/sparse_attention.md), in tokens.

    A query at position p sees keys 0 .. sinks - 1 and p - window + 1 .. p. Position p >= sinks is at row
    sinks + (p - sinks) mod rows. `positions`: "absolute", or "cache": rotary positions inside the cache, as if the
    tokens between sinks and window did not exist.
    """

    sinks: int
    window: int
    rows: int
    positions: Literal["absolute", "cache"] = "absolute"

    @property
    def capacity(self) -> int:
        """Rows of a key or value cache."""
        return self.sinks + self.rows

    @property
    def attended(self) -> int:
        """Most keys that one query sees."""
        return self.sinks + self.window


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class ContextInput:
    """The context that cross-attention reads: float32 [B, length, size], the same for a whole video.

    masked: the decoder takes a mask bool [B, length] too, True where a token of the context is seen.
    """

    length: int
    size: int
    masked: bool


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class DecoderConfig:
    """Sizes and options that fix the graph.

    Args:
        batch_size: rows B.
        max_seq_len: positions S, in tokens.
        tokens_per_frame: stride F between a token and the same place in the previous frame, in tokens.
        hidden_size: H.
        vocab_size: V; None: the decoder has no head.
        takes_embeddings: the input is float32 [B, T, H], not token ids.
        prefill_chunk: tokens of one prefill call; 0: there is no prefill graph.
        ring: sparse attention; None: attention to all positions, over caches of S rows.
        embedding_rows: token ids that the embedding has, where their number is known: more than V where a prefix of
            classes or text has ids of its own.
        context: what cross-attention reads; None: there is no cross-attention.
    """

    batch_size: int
    max_seq_len: int
    tokens_per_frame: int
    num_layers: int
    hidden_size: int
    vocab_size: int | None
    takes_embeddings: bool
    prefill_chunk: int
    ring: Ring | None = None
    embedding_rows: int | None = None
    context: ContextInput | None = None

    @property
    def token_ids(self) -> int | None:
        """Token ids that the input may hold: 0 .. this - 1. None: it takes embeddings."""
        return None if self.takes_embeddings else self.embedding_rows or self.vocab_size

    @property
    def input_name(self) -> str:
        """Name of the token or embedding input."""
        return "inputs_embeds" if self.takes_embeddings else "tokens"
