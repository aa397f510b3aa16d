"""The score unit in Python: score, gate, Index Register, chain counts of a layer (docs/reference/drs_table.md)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastcar_compile.codegen.hls.control_table.table import FLOATS_PER_WORD, AttentionShape
from fastcar_compile.errors import InternalError
from fastcar_compile.gates.base import GateInputs, GateKind
from fastcar_compile.gates.scores import (
    TAS_FRACTION_BITS,
    TAS_LIMIT,
    Distance,
    input_delta,
    learned_score,
    output_bound,
    unit_exponents,
)

# What a gate is decided on, and its memory words as a controller reads them (docs/reference/drs_table.md).


Array = NDArray[Any]


def pack_inputs(inputs: GateInputs[Array]) -> tuple[Array, Array]:
    """Return the memory words of the operands `query` and `key`: q or the key of all rows, then x or the cached x."""
    return _words(inputs.query, inputs.x), _words(inputs.key, inputs.cached)


def _words(heads: Array | None, row: Array | None) -> Array:
    parts = [] if heads is None else [pack_heads(heads)]
    parts += [] if row is None else [pack_row(row)]
    return np.concatenate(parts) if parts else np.zeros((0, FLOATS_PER_WORD), np.float32)


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
    """Return the exact integer sums of products of 2^-24 (fastcar_compile.ir.ops.attention.tas), int64 [B].

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


BFLOATS_PER_WORD = 8
"""bfloat16 values in a memory word of 128 bits."""


def pack_network(w1: Array, b1: Array, w2: Array, b2: Array) -> Array:
    """Return a layer's network as memory words float32 [1 + units * (1 + 2 * ceil(H / 8)), 4] (fastcar_gate_core.hpp).

    The first word has the number of units. A unit is one word of b1, w2, the exponent of its lowest bit and b2, then
    its weights as bfloat16, eight to a word: those of x, then those of the change, each padded with zeros.

    Args:
        w1: float32 [units, 2 H] with the values of bfloat16. b1, w2: float32 [units]. b2: float32 [1].
    """
    units, width = w1.shape[0], w1.shape[1] // 2
    halves = np.pad(w1.reshape(units, 2, width), [(0, 0), (0, 0), (0, -width % BFLOATS_PER_WORD)])
    # A bfloat16 is the upper half of a float32: weights with values of bfloat16 lose nothing here.
    upper = (np.ascontiguousarray(halves, np.float32).view(np.uint32) >> 16).astype(np.uint16).reshape(units, -1)
    places = unit_exponents(w1).astype(np.int32)
    # b2 belongs to the layer, but every unit repeats it: a unit's head is then one whole memory word.
    head = np.stack([b1.view(np.int32), w2.view(np.int32), places, b2.view(np.int32).repeat(units)], 1)
    words = np.concatenate([head.view(np.uint32), upper.view(np.uint32)], 1)
    first = np.array([units, 0, 0, 0], np.uint32)
    return np.concatenate([first, words.reshape(-1)]).view(np.float32).reshape(-1, FLOATS_PER_WORD)


def unpack_network(words: Array, width: int) -> tuple[Array, Array, Array, Array]:
    """Return w1, b1, w2 and b2 of the words of `pack_network`; `width` is H."""
    bits = np.ascontiguousarray(words).view(np.uint32).reshape(-1)
    units, padded = int(bits[0]), width + -width % BFLOATS_PER_WORD
    each = bits[FLOATS_PER_WORD:].reshape(units, -1)
    upper = np.ascontiguousarray(each[:, FLOATS_PER_WORD:]).view(np.uint16).astype(np.uint32) << 16
    w1 = upper.view(np.float32).reshape(units, 2, padded)[:, :, :width].reshape(units, 2 * width)
    b1, w2, b2 = (np.ascontiguousarray(each[:, lane]).view(np.float32) for lane in (0, 1, 3))
    return w1, b1, w2, b2[:1]


def network_words(units: int, width: int) -> int:
    """Return the memory words of a network."""
    return 1 + units * (1 + 2 * -(-width // BFLOATS_PER_WORD))


def score_of_network(x: Array, cached: Array, words: Array) -> Array:
    """Return `learned_score` of rows and a network as memory words; spare lanes of a row are zero."""
    return learned_score(x, cached, *unpack_network(words, x.shape[1]))


def pack_row(values: Array) -> Array:
    """Return float32 [B, H] as memory words [B * ceil(H / 4), 4]; each row begins a word, spare lanes are zero."""
    padded = np.pad(values, [(0, 0), (0, -values.shape[1] % FLOATS_PER_WORD)])
    return np.ascontiguousarray(padded, np.float32).reshape(-1, FLOATS_PER_WORD)
