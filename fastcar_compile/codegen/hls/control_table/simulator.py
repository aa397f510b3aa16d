"""Dynamic Resource Scheduling in Python: what the HLS controller must answer, and where the array computes each row."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fastcar_compile.codegen.hls.control_table.reader import check, read_table
from fastcar_compile.codegen.hls.control_table.table import (
    FLOATS_PER_WORD,
    MAX_ROWS,
    DrsTable,
    Limits,
    TableStatus,
    unpack_network,
)
from fastcar_compile.gates.base import Array, GateInputs, ScoreConstants

# What the DRS controller writes for one layer, as 32-bit words (docs/reference/drs_table.md, "Calls").


SCORES, CHAIN = 4, 4 + MAX_ROWS
"""First words of the scores and of the chain counts; before them: status, Index Register, two spare words."""

RESULT_WORDS = CHAIN + MAX_ROWS


def read_result(words: Array, rows: int) -> LayerTrace:
    """Return what the controller decided for `rows` rows of the batch; words uint32."""
    status, register = (int(word) for word in words[:2])
    # With another status nothing was decided: the words of scores and chain counts mean nothing then.
    decided = rows if TableStatus(status) is TableStatus.OK else 0
    scores = tuple(words[SCORES : SCORES + decided].view(np.float32).tolist())
    chain = tuple(words[CHAIN : CHAIN + decided].view(np.int32).tolist())
    return LayerTrace(status=TableStatus(status), index_register=register, scores=scores, chain=chain)


@dataclass(frozen=True)
class LayerCall:
    """The arguments of one call of the controller.

    Args:
        layer: index of the decoder layer.
        step: decode forward number t; or int64 [B], one of each row. A row of a negative number computes.
        query: memory words of q or of x (`table.pack_rows`), which the gate reads.
        key: those of the cached key or of the cached x.
        chain: int32 [at least B], replays in a row at slot t mod F.
        network: memory words of the layer's network (`table.pack_network`), for gate `learned`.
        active: bool [B], the rows that are there; None: all of them.
    """

    layer: int
    step: int | Array
    query: Array
    key: Array
    chain: Array
    network: Array | None = None
    active: Array | None = None

    def rows(self, table: DrsTable) -> Array:
        """Return which rows are there, bool [B]."""
        return np.ones(table.rows, np.bool_) if self.active is None else self.active

    def inputs(self, table: DrsTable) -> GateInputs[Array]:
        """Return the operands that the table's gate reads, as rows; spare lanes are zero."""
        shape, rows, gate = table.attention, table.rows, table.gate
        query, key, x, cached = None, None, None, None
        if gate.reads_query:
            width = shape.head_words * FLOATS_PER_WORD
            query, key = self.query.reshape(rows, shape.heads, width), self.key.reshape(rows, shape.kv_heads, width)
        if gate.reads_input:
            x, cached = self.query.reshape(rows, -1), self.key.reshape(rows, -1)
        return GateInputs(query, key, x, cached)


@dataclass(frozen=True)
class LayerTrace:
    """What one call of the controller answers: scores (float32 values) and new chain counts of every row of the table.

    With a status other than OK nothing was decided: the register is 0, scores and chain are empty.
    """

    status: TableStatus
    index_register: int = 0
    scores: tuple[float, ...] = ()
    chain: tuple[int, ...] = ()


def scores_of(table: DrsTable, call: LayerCall) -> Array:
    """Return what is compared with the threshold, float32 [B]: the score; minus the score where small ones replay."""
    inputs, weights = call.inputs(table), table.head_weights
    network = None
    if call.network is not None and inputs.x is not None:
        network = unpack_network(call.network, inputs.x.shape[1])
    heads = None if weights is None else weights[call.layer]
    constants = ScoreConstants(table.factors[call.layer], heads, network)
    scores = table.gate.gate.exact_score(inputs, constants)
    return -scores if table.gate.at_most else scores


def recomputes(table: DrsTable, step: Array) -> Array:
    """Return which rows compute in this forward whatever their score is: in the first frame, in frames of the refresh."""
    first, refresh = step < table.tokens_per_frame, table.refresh_period
    # A refresh lasts a whole frame: every one of the F slots computes once in it.
    return first | (step % refresh < table.tokens_per_frame) if refresh else first


def _decide(table: DrsTable, call: LayerCall) -> LayerTrace:
    """Decide for every row of one layer with a gate."""
    rows, threshold, chain = table.rows, np.float32(table.thresholds[call.layer]), call.chain[: table.rows]
    active = call.rows(table)
    scores = np.where(active, scores_of(table, call), np.float32(0))
    # A NaN score compares false, so its row computes. +inf is the value of "never", even for a score of +inf.
    replay = active & (scores >= threshold) & (threshold != np.float32(np.inf))
    replay &= ~recomputes(table, np.broadcast_to(np.asarray(call.step, np.int64), rows))
    if table.max_chain is not None:
        # `chain` is the count before this forward: a row that reached the limit has to compute.
        replay &= chain < table.max_chain
    if table.couple_cfg:
        # Rows b and b + B / 2 are conditional and unconditional: one row of a pair that computes makes both compute.
        replay = np.tile(replay[: rows // 2] & replay[rows // 2 :], 2)
    register = sum(1 << row for row in range(rows) if active[row] and not replay[row])
    counts = np.where(replay, chain + 1, 0).astype(np.int32)
    return LayerTrace(TableStatus.OK, register, tuple(scores.tolist()), tuple(counts.tolist()))


def run_layer(table: DrsTable | bytes, call: LayerCall, *, limits: Limits | None = None) -> LayerTrace:
    """Return what the HLS controller answers to one call with this table: scores, Index Register, chain counts.

    Of a table that it does not load, it is the answer to the load.

    Args:
        table: a table, or its bytes (then they are checked, and a fault is a status, not an exception).
        limits: of the hardware; a table that needs more has status BAD_HEADER. None: those of the format.
    """
    data = table if isinstance(table, bytes) else table.to_bytes()
    status = check(data, limits)
    if status is not TableStatus.OK:
        return LayerTrace(status)
    own = read_table(data)
    if not 0 <= call.layer < own.layers:
        return LayerTrace(TableStatus.BAD_LAYER)
    if own.factors[call.layer] == 0:
        # A layer without a gate reads no operands. Every row that is there computes, and every chain starts again.
        register = sum(1 << row for row in range(own.rows) if call.rows(own)[row])
        return LayerTrace(TableStatus.OK, register, (0.0,) * own.rows, (0,) * own.rows)
    # Lengths count 128-bit words, as the kernel's arguments do.
    if (own.query_words, own.key_words) != (len(call.query), len(call.key)):
        return LayerTrace(TableStatus.BAD_OPERANDS)
    return _decide(own, call)
