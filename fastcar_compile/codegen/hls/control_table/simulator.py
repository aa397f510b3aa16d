"""Dynamic Resource Scheduling in Python: what the HLS controller must answer, and where the array computes each row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastcar_compile.codegen.hls.control_table.gate import Array, unpack_network
from fastcar_compile.codegen.hls.control_table.reader import check, read_table
from fastcar_compile.codegen.hls.control_table.table import (
    FLOATS_PER_WORD,
    MAX_ROWS,
    AttentionShape,
    DrsTable,
    Limits,
    Status,
)
from fastcar_compile.errors import InternalError
from fastcar_compile.gates.base import GateKind
from fastcar_compile.gates.scores import (
    TAS_FRACTION_BITS,
    TAS_LIMIT,
    Distance,
    input_delta,
    learned_score,
    output_bound,
)

# What the DRS controller writes for one layer, as 32-bit words (docs/reference/drs_table.md, "Calls").


SCORES, CHAIN = 4, 4 + MAX_ROWS
"""First words of the scores and of the chain counts; before them: status, Index Register, two spare words."""

RESULT_WORDS = CHAIN + MAX_ROWS


def read_result(words: NDArray[Any], rows: int) -> LayerTrace:
    """Return what the controller decided for `rows` rows of the batch; words uint32."""
    status, register = (int(word) for word in words[:2])
    # With another status nothing was decided: the words of scores and chain counts mean nothing then.
    decided = rows if Status(status) is Status.OK else 0
    return LayerTrace(
        status=Status(status),
        index_register=register,
        scores=tuple(words[SCORES : SCORES + decided].view(np.float32).tolist()),
        chain=tuple(words[CHAIN : CHAIN + decided].view(np.int32).tolist()),
    )


@dataclass(frozen=True)
class LayerCall:
    """The arguments of one call of the controller.

    Args:
        layer: index of the decoder layer. step: decode forward number t.
        query: memory words of q (`gate.pack_heads`) and of x (`scores.pack_row`), what the gate reads of them.
        key: those of the cached key and of the cached x.
        chain: int32 [at least B], replays in a row at slot t mod F.
        network: memory words of the layer's network (`scores.pack_network`), for gate `learned`.
    """

    layer: int
    step: int
    query: Array
    key: Array
    chain: Array
    network: Array | None = None

    def inputs(self, table: DrsTable) -> tuple[Array, Array]:
        """Return x and the cached x, float32 [B, H with spare lanes of zero]."""
        rows = table.rows
        x, cached = self.query[rows * table.row_query_words :], self.key[rows * table.row_key_words :]
        return x.reshape(rows, -1), cached.reshape(rows, -1)

    def heads(self, table: DrsTable) -> tuple[Array, Array]:
        """Return q [B, Hq, D] and the cached key [B, Hkv, D] with spare lanes of zero, float32."""
        shape, rows = table.attention, table.rows
        width = shape.head_words * FLOATS_PER_WORD
        query, key = self.query[: rows * shape.query_words], self.key[: rows * shape.key_words]
        return query.reshape(rows, shape.heads, width), key.reshape(rows, shape.kv_heads, width)


@dataclass(frozen=True)
class LayerTrace:
    """What one call of the controller answers: scores (float32 values) and new chain counts of every row of the table.

    With a status other than OK nothing was decided: the register is 0, scores and chain are empty.
    """

    status: Status
    index_register: int = 0
    scores: tuple[float, ...] = ()
    chain: tuple[int, ...] = ()


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


def scores_of(table: DrsTable, call: LayerCall) -> Array:
    """Return what is compared with the threshold, float32 [B]: the score; minus the score where small ones replay."""
    match table.gate:
        case GateKind.TAS:
            return _tas(table, call)
        case GateKind.INPUT_DELTA:
            return -input_delta(*call.inputs(table))
        case GateKind.BOUND:
            scale = Distance(table.distance_weight, table.factors[call.layer])
            return -output_bound(*call.inputs(table), *call.heads(table), scale)
        case GateKind.LEARNED:
            if call.network is None:
                raise InternalError("a call of gate `learned` has no network")
            x, cached = call.inputs(table)  # spare lanes of a row are zero
            return -learned_score(x, cached, *unpack_network(call.network, x.shape[1]))


def _tas(table: DrsTable, call: LayerCall) -> Array:
    query, key = call.heads(table)
    with np.errstate(over="ignore", invalid="ignore"):  # a damaged factor or weight may be anything
        # The product with a head weight rounds to float32 once, before the exact integer sum.
        if table.head_weights is not None:
            query = query * np.array(table.head_weights[call.layer], np.float32)[None, :, None]
        # The int64 sum rounds to float32 first, then the factor multiplies in float32: two roundings, in this order.
        factor = np.float32(table.factors[call.layer])
        return tas_sums(query, key, table.rows, table.attention).astype(np.float32) * factor


def _recomputes(table: DrsTable, step: int) -> bool:
    """Return whether every row computes in this forward: in the first frame, and in frames of the refresh."""
    first, refresh = step < table.tokens_per_frame, table.refresh_period
    # A refresh lasts a whole frame: every one of the F slots computes once in it.
    return first or (refresh != 0 and step % refresh < table.tokens_per_frame)


def _decide(table: DrsTable, call: LayerCall) -> LayerTrace:
    """Decide for every row of one layer with a gate."""
    rows, threshold, chain = table.rows, np.float32(table.thresholds[call.layer]), call.chain[: table.rows]
    scores = scores_of(table, call)
    # A NaN score compares false, so its row computes. +inf is the value of "never", even for a score of +inf.
    replay = (scores >= threshold) & (not _recomputes(table, call.step)) & (threshold != np.float32(np.inf))
    if table.max_chain is not None:
        # `chain` is the count before this forward: a row that reached the limit has to compute.
        replay &= chain < table.max_chain
    if table.couple_cfg:
        # Rows b and b + B / 2 are conditional and unconditional: one row of a pair that computes makes both compute.
        replay = np.tile(replay[: rows // 2] & replay[rows // 2 :], 2)
    register = sum(1 << row for row in range(rows) if not replay[row])
    counts = np.where(replay, chain + 1, 0).astype(np.int32)
    return LayerTrace(Status.OK, register, tuple(scores.tolist()), tuple(counts.tolist()))


def run_layer(table: DrsTable | bytes, call: LayerCall, *, limits: Limits | None = None) -> LayerTrace:
    """Return what the HLS controller answers to one call with this table: scores, Index Register, chain counts.

    Of a table that it does not load, it is the answer to the load.

    Args:
        table: a table, or its bytes (then they are checked, and a fault is a status, not an exception).
        limits: of the hardware; a table that needs more has status BAD_HEADER. None: those of the format.
    """
    data = table if isinstance(table, bytes) else table.to_bytes()
    status = check(data, limits)
    if status is not Status.OK:
        return LayerTrace(status)
    own = read_table(data)
    if not 0 <= call.layer < own.layers:
        return LayerTrace(Status.BAD_LAYER)
    if own.factors[call.layer] == 0:
        # A layer without a gate reads no operands. Every row computes: all bits are set, and every chain starts again.
        return LayerTrace(Status.OK, (1 << own.rows) - 1, (0.0,) * own.rows, (0,) * own.rows)
    # Lengths count 128-bit words, as the kernel's arguments do.
    if (own.query_words, own.key_words) != (len(call.query), len(call.key)):
        return LayerTrace(Status.BAD_OPERANDS)
    return _decide(own, call)
