"""Shape of the decoder, position in the sequence, number of samples, and the job of one engine."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

HEAD_DIM = 128
GROUP = 5
"""Tokens per sample: 5 steps of 16 layers make replay ratios of 0.5, 0.8 and 0.875 exact."""

WARM_UP = 5
"""Untimed tokens at the start of every block: a stopped process finds its caches cold."""

DENSE, PLAY = "dense", "play"
"""Variants besides replay ratios: no replay; real tokens and calibrated thresholds."""

DECODE, BATCH, PREFILL = "decode", "batch", "prefill"
WORKLOADS = (DECODE, BATCH, PREFILL)
"""One video's steps; steps of several independent sequences; reading a prompt."""


@dataclass(frozen=True)
class Sizes:
    """A Llama or Qwen3, and a measurement: `samples` of `group` tokens in each of `rounds` blocks.

    Lengths are in tokens.

    Attributes:
        head_dim: width of a head. kv_heads: key and value heads; 0: as many as query heads.
        qk_norm: whether queries and keys are normalised, as in Qwen3.
        warm_up: untimed steps at the start of a block.
        longest: tokens that the engines' files are written for; 0: the context.
    """

    hidden: int = 2048
    intermediate: int = 5504
    layers: int = 16
    vocab: int = 1024
    context: int = 512
    tokens_per_frame: int = 256
    threads: int = 2
    rounds: int = 6
    samples: int = 2
    group: int = GROUP
    warm_up: int = WARM_UP
    head_dim: int = HEAD_DIM
    kv_heads: int = 0
    qk_norm: bool = False
    longest: int = 0

    @property
    def heads(self) -> int:
        """Number of query heads."""
        return self.hidden // self.head_dim

    @property
    def groups(self) -> int:
        """Number of key and value heads."""
        return self.kv_heads or self.heads

    @property
    def kv_size(self) -> int:
        """Width of all keys of a token, and of all values."""
        return self.groups * self.head_dim

    @property
    def block(self) -> int:
        """Timed tokens of a block."""
        return self.samples * self.group

    @property
    def cache_length(self) -> int:
        """Positions of a static cache that just holds the context: peers that attend to all of it waste no time."""
        return _whole_lines(self.context)

    @property
    def table_length(self) -> int:
        """Positions of the RoPE tables in the engines' files."""
        return _whole_lines(max(self.context, self.longest))


def _whole_lines(tokens: int) -> int:
    return -(-(tokens + 1) // 64) * 64


@dataclass(frozen=True)
class Job:
    """One engine with one set of weights.

    Args:
        engine: name in `engines.ENGINES`. precision: as the engine calls it.
        sizes: of the decoder. checkpoint: folder of its weights. folder: this job's own files.
        variants: replay ratios as text, "dense" or "play".
        workload: of `WORKLOADS`. batch: rows decoded together.
        coupled: rows b and b + batch / 2 are a pair of classifier-free guidance, which replays only together.
        prompt: tokens of a forward; more than one in prefill only. chunk: tokens of our prefill graph; 0: a peer's.
        max_seq_len: positions of our cache; peers have `sizes.cache_length`.
        window: positions of our sparse attention besides the sinks; 0: all.
        kv: KV type; a peer's is its default, and only reported.
        contexts: file of real tokens, int64 [N, frames, tokens per frame], that "play" decodes.
        gate: of our replay. thresholds: of each layer, for "play".
        host_cpu: instruction set that our library is for, and what reads for the bandwidth.
    """

    engine: str
    precision: str
    sizes: Sizes
    checkpoint: str
    folder: str
    variants: tuple[str, ...] = (DENSE,)
    workload: str = DECODE
    batch: int = 1
    coupled: bool = False
    prompt: int = 1
    chunk: int = 0
    max_seq_len: int = 0
    window: int = 0
    kv: str = ""
    contexts: str = ""
    gate: str = "tas"
    thresholds: tuple[float, ...] = ()
    host_cpu: str = "native"

    def to_json(self) -> dict[str, Any]:
        """Return JSON-safe values."""
        return asdict(self)

    def built_from(self) -> dict[str, Any]:
        """Return what the engine's files depend on: not how much is measured with them, nor on what.

        Files with `sizes.longest` serve all contexts, and those of a peer all batches and prompts.
        """
        sizes = replace(self.sizes, rounds=0, samples=0, group=0, warm_up=0)
        if sizes.longest:
            sizes = replace(sizes, context=0)
        found = replace(self, sizes=sizes, variants=(), contexts="", thresholds=())
        if sizes.longest:
            found = replace(found, workload="", prompt=0, batch=found.batch if found.chunk else 0)
        return found.to_json()

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Job:
        """Return the job of `to_json`."""
        return cls(
            **{
                **data,
                "sizes": Sizes(**data["sizes"]),
                "variants": tuple(data["variants"]),
                "thresholds": tuple(data["thresholds"]),
            }
        )


STRIDE = 37
"""Between the tokens of neighbouring rows."""


def tokens_of(job: Job, first: int) -> np.ndarray:
    """Return tokens int64 [B, T] of a forward. Every row has others; rows of a pair have the same."""
    rows = np.arange(job.batch) % (job.batch // 2 if job.coupled else job.batch)
    return (first + STRIDE * rows[:, None] + np.arange(job.prompt)) % job.sizes.vocab


@dataclass(frozen=True)
class Traffic:
    """Bytes that a step reads.

    Attributes:
        weights: read at every step. mlp: read only when some row computes the MLP.
        per_position: keys and values of one cached token, all layers and rows.
        state: replay caches and TAS keys of one step, all rows.
        window: most cached tokens that attention reads; 0: all.
    """

    weights: float
    mlp: float
    per_position: float
    state: float = 0.0
    window: int = 0

    def bytes(self, context: int, skipped: float) -> float:
        """Return the bytes of a step that sees `context` tokens and reads no weights of this share of the MLPs."""
        seen = min(context, self.window) if self.window else context
        return self.weights + self.mlp * (1 - skipped) + self.per_position * seen + self.state
