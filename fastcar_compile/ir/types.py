"""What a decoder is to every part of the compiler and the runtime: its sizes and the roles of its state. No torch."""

from enum import StrEnum
from typing import Literal

from pydantic import ConfigDict
from pydantic.dataclasses import dataclass

from fastcar_compile.config.models import Threshold
from fastcar_compile.gates.base import Rotary
from fastcar_compile.gates.draft import DraftSize


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


PROMPT = -1
"""The forward number of a row of a decode step that only reads its token: it computes, and keeps nothing of replay."""

INACTIVE = -2
"""The forward number of a row that is not there; its position is -1."""


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
        batch_size: videos; rows B of a call where each video has one.
        max_seq_len: positions S, in tokens.
        tokens_per_frame: stride F between a token and the same place in the previous frame, in tokens.
        hidden_size: H.
        vocab_size: V; None: the decoder has no head.
        takes_embeddings: the input is float32 [B, T, W], not token ids.
        prefill_chunk: tokens of one prefill call; 0: there is no prefill graph.
        ring: sparse attention; None: attention to all positions, over caches of S rows.
        embedding_rows: token ids that the embedding has, where their number is known: more than V where a prefix of
            classes or text has ids of its own.
        context: what cross-attention reads; None: there is no cross-attention.
        rows: rows of each video in a decode step, each with a position and a forward number of its own; None: one
            row of each, and all share both numbers.
        input_size: W; None: it is H.
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
    rows: int | None = None
    input_size: int | None = None

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of the input of one token: (W,) for embeddings, () for a token id."""
        return (self.input_size or self.hidden_size,) if self.takes_embeddings else ()

    @property
    def decode_rows(self) -> int:
        """Rows of a decode step."""
        return self.batch_size * (self.rows or 1)

    @property
    def token_ids(self) -> int | None:
        """Token ids that the input may hold: 0 .. this - 1. None: it takes embeddings."""
        return None if self.takes_embeddings else self.embedding_rows or self.vocab_size

    @property
    def input_name(self) -> str:
        """Name of the token or embedding input."""
        return "inputs_embeds" if self.takes_embeddings else "tokens"


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class ReplayFacts:
    """What insert-replay decided for one layer.

    Attributes:
        threshold: of the score.
        gate: name of the gate.
        heads: (query head, weight) pairs of a gate that averages over heads; None: all of them alike.
        gate_units: hidden units of a gate that is a network, else None.
        draft: what a replay computes; None: it takes the cached output.
        rotary: what is rotated where the gate compares the query with a key: "both", or the "key" alone.
    """

    threshold: Threshold
    gate: str
    heads: tuple[tuple[int, float], ...] | None = None
    gate_units: int | None = None
    draft: DraftSize | None = None
    rotary: Rotary = "both"


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class AttentionSite:
    """The attention of a layer: its node, what it reads (node names) and its dimensions.

    A query sees the first `sinks` positions and the last `window` ones, itself included; `window` None: all of them.
    A logit is limited softly to `softcap`.
    """

    node: str
    query: str
    key_cache: str
    value_cache: str
    scale: float
    num_heads: int
    num_kv_heads: int
    head_dim: int
    cache_rows: int
    window: int | None = None
    sinks: int = 0
    softcap: float | None = None


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class MlpSite:
    """The MLP of a layer: `input` -> linears -> `output` (node names) and its dimensions.

    `linears`, `weights` and `biases` (None where there is no bias) are in the order gate, up, down or up, down;
    `weights` are the names that the parameters had before quantisation.
    """

    input: str
    output: str
    linears: tuple[str, ...]
    weights: tuple[str, ...]
    biases: tuple[str | None, ...]
    activation: str
    gated: bool
    hidden: int
    intermediate: int


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class LayerSite:
    """One decoder layer: entry -> attention -> residual -> MLP -> exit, where exit adds `residual` and `region_output`.

    `residual` adds entry and attention, and cross-attention where the layer has it. Where `parallel` holds, the MLP
    reads the entry as attention does, and not `residual`; the three are added all the same.

    Before replay is inserted, `region_output` is the MLP's result. Afterwards it is the result of the `cond`, and the
    nodes of `mlp` are those of the compute branch, but for an input that the gate reads too. `replay` is None where the
    layer always computes.
    """

    layer: int
    module_path: str
    source: str
    entry: str
    residual: str
    region_output: str
    exit: str
    attention: AttentionSite
    mlp: MlpSite
    parallel: bool = False
    replay: ReplayFacts | None = None

    @property
    def threshold(self) -> float | None:
        """The replay threshold; None where the layer always computes."""
        return None if self.replay is None else self.replay.threshold

    @property
    def draft_share(self) -> float:
        """The weights that a replay reads, as a share of the MLP's: those of the draft, if there is one."""
        size = None if self.replay is None else self.replay.draft
        return 0.0 if size is None else size.share(self.mlp.intermediate, self.mlp.gated)
