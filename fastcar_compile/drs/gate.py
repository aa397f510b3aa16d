"""The TAS unit in Python: scores, gate, Index Register and chain counts of one layer (docs/reference/drs_table.md)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastcar_compile.drs.score import TAS_FRACTION_BITS, TAS_LIMIT
from fastcar_compile.drs.table import FLOATS_PER_WORD, AttentionShape

Array = NDArray[Any]


@dataclass(frozen=True)
class Gate:
    """What the unit reads of a table for one layer; the fields are those of DrsTable."""

    rows: int
    tokens_per_frame: int
    attention: AttentionShape
    max_chain: int | None
    couple_cfg: bool
    threshold: float
    factor: float


@dataclass(frozen=True)
class Decision:
    """What the unit decides for one layer.

    Args:
        scores: float32 [B]; zero for a layer without a gate.
        index_register: bit b = 1: row b computes.
        chain: int32 [B], replays in a row at this slot, this one included.
    """

    scores: Array
    index_register: int
    chain: Array


def pack_heads(rows: Array) -> Array:
    """Return float32 [B, heads, D] as memory words [B * heads * ceil(D / 4), 4].

    Each head begins a word; spare lanes are zero.
    """
    dim = rows.shape[-1]
    spare = -dim % FLOATS_PER_WORD
    padded = np.pad(rows, [(0, 0), (0, 0), (0, spare)]) if spare else rows
    return np.ascontiguousarray(padded, np.float32).reshape(-1, FLOATS_PER_WORD)


def tas_sums(query: Array, key: Array, rows: int, shape: AttentionShape) -> Array:
    """Return the exact integer sums of products of 2^-24 (fastcar_compile.ops.attention.tas), int64 [B].

    Args:
        query, key: memory words as of `pack_heads`.
    """
    width = shape.head_words * FLOATS_PER_WORD
    grouped = query.reshape(rows, shape.kv_heads, shape.heads // shape.kv_heads, width).astype(np.float64)
    keys = key.reshape(rows, shape.kv_heads, 1, width).astype(np.float64)
    with np.errstate(invalid="ignore"):  # infinity times zero is one of the products that are not finite
        products = grouped * keys * (1 << TAS_FRACTION_BITS)
    limited = np.clip(np.rint(products), -TAS_LIMIT, TAS_LIMIT)
    return np.where(np.isfinite(products), limited, -TAS_LIMIT).astype(np.int64).sum((1, 2, 3))


def decide(gate: Gate, step: int, query: Array, key: Array, chain: Array, *, mask: int = 0xFFFFFFFF) -> Decision:
    """Decide for every row of one layer.

    Args:
        step: decode forward number t.
        query: words of the rows' queries. key: words of the cached keys of position - F. Not read without a gate.
        chain: int32 [B], replays in a row at slot t mod F so far.
        mask: bit b = 1: row b computes; without a gate.
    """
    rows, factor, threshold = gate.rows, np.float32(gate.factor), np.float32(gate.threshold)
    if factor == 0:
        return Decision(np.zeros(rows, np.float32), (1 << rows) - 1 & mask, np.zeros(rows, np.int32))
    with np.errstate(over="ignore", invalid="ignore"):  # a damaged factor may be anything
        scores = tas_sums(query, key, rows, gate.attention).astype(np.float32) * factor
    replay = (scores >= threshold) & (step >= gate.tokens_per_frame) & (threshold != np.float32(np.inf))
    if gate.max_chain is not None:
        replay &= chain < gate.max_chain
    if gate.couple_cfg:
        replay = np.tile(replay[: rows // 2] & replay[rows // 2 :], 2)
    register = sum(1 << row for row in range(rows) if not replay[row])
    return Decision(scores, register, np.where(replay, chain + 1, 0).astype(np.int32))
