"""The score unit in Python: score, gate, Index Register, chain counts of a layer (docs/reference/drs_table.md)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastcar_compile.drs.score import TAS_FRACTION_BITS, TAS_LIMIT
from fastcar_compile.drs.scores import Distance, input_delta, output_bound, score_of_network
from fastcar_compile.drs.table import FLOATS_PER_WORD, AttentionShape, GateKind
from fastcar_compile.errors import InternalError

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
    kind: GateKind = GateKind.TAS
    refresh_period: int = 0
    distance_weight: float = 0.0
    head_weights: tuple[float, ...] | None = None

    def recomputes(self, step: int) -> bool:
        """Return whether every row computes in this forward: in the first frame, and in frames of the refresh."""
        first, refresh = step < self.tokens_per_frame, self.refresh_period
        # A refresh lasts a whole frame: every one of the F slots computes once in it.
        return first or (refresh != 0 and step % refresh < self.tokens_per_frame)


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


@dataclass(frozen=True)
class Operands:
    """What a layer is decided on; which of them a gate reads is up to its kind.

    Args:
        query: words of the rows' queries, then of x of the rows.
        key: words of the cached keys of position - F, then of the cached x.
        network: words of the layer's network, for gate `learned`.
    """

    query: Array
    key: Array
    network: Array | None = None

    def inputs(self, gate: Gate) -> tuple[Array, Array]:
        """Return x and the cached x, float32 [B, H with spare lanes of zero]."""
        shape, reads = gate.attention, gate.kind.reads_query
        first = (gate.rows * shape.query_words, gate.rows * shape.key_words) if reads else (0, 0)
        x, cached = self.query[first[0] :], self.key[first[1] :]
        return x.reshape(gate.rows, -1), cached.reshape(gate.rows, -1)

    def heads(self, gate: Gate) -> tuple[Array, Array]:
        """Return q [B, Hq, D] and the cached key [B, Hkv, D] with spare lanes of zero, float32."""
        shape, rows = gate.attention, gate.rows
        width = shape.head_words * FLOATS_PER_WORD
        query, key = self.query[: rows * shape.query_words], self.key[: rows * shape.key_words]
        return query.reshape(rows, shape.heads, width), key.reshape(rows, shape.kv_heads, width)


def scores_of(gate: Gate, operands: Operands) -> Array:
    """Return what is compared with the threshold, float32 [B]: the score; minus the score where small ones replay."""
    if gate.kind is GateKind.TAS:
        return _tas(gate, operands)
    return -_SCORES[gate.kind](gate, operands)


def _tas(gate: Gate, operands: Operands) -> Array:
    query, key = operands.heads(gate)
    with np.errstate(over="ignore", invalid="ignore"):  # a damaged factor or weight may be anything
        # The product with a head weight rounds to float32 once, before the exact integer sum.
        if gate.head_weights is not None:
            query = query * np.array(gate.head_weights, np.float32)[None, :, None]
        # The int64 sum rounds to float32 first, then the factor multiplies in float32: two roundings, in this order.
        return tas_sums(query, key, gate.rows, gate.attention).astype(np.float32) * np.float32(gate.factor)


def _input_delta(gate: Gate, operands: Operands) -> Array:
    return input_delta(*operands.inputs(gate))


def _bound(gate: Gate, operands: Operands) -> Array:
    scale = Distance(gate.distance_weight, gate.factor)
    return output_bound(*operands.inputs(gate), *operands.heads(gate), scale)


def _learned(gate: Gate, operands: Operands) -> Array:
    if operands.network is None:
        raise InternalError("a call of gate `learned` has no network")
    return score_of_network(*operands.inputs(gate), operands.network)


_SCORES = {
    GateKind.INPUT_DELTA: _input_delta,
    GateKind.BOUND: _bound,
    GateKind.LEARNED: _learned,
}


def decide(gate: Gate, step: int, operands: Operands, chain: Array) -> Decision:
    """Decide for every row of one layer.

    Args:
        step: decode forward number t.
        operands: not read without a gate.
        chain: int32 [B], replays in a row at slot t mod F so far.
    """
    rows, threshold = gate.rows, np.float32(gate.threshold)
    if gate.factor == 0:
        # Without a gate every row computes: all bits are set, and every chain starts again.
        return Decision(np.zeros(rows, np.float32), (1 << rows) - 1, np.zeros(rows, np.int32))
    scores = scores_of(gate, operands)
    # A NaN score compares false, so its row computes. +inf is the value of "never", even for a score of +inf.
    replay = (scores >= threshold) & (not gate.recomputes(step)) & (threshold != np.float32(np.inf))
    if gate.max_chain is not None:
        # `chain` is the count before this forward: a row that reached the limit has to compute.
        replay &= chain < gate.max_chain
    if gate.couple_cfg:
        # Rows b and b + B / 2 are conditional and unconditional: one row of a pair that computes makes both compute.
        replay = np.tile(replay[: rows // 2] & replay[rows // 2 :], 2)
    register = sum(1 << row for row in range(rows) if not replay[row])
    return Decision(scores, register, np.where(replay, chain + 1, 0).astype(np.int32))
