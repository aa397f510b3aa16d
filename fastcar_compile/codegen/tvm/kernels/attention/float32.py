"""A query meets cached rows as float32: every element is widened where it is read."""

from __future__ import annotations

from collections.abc import Callable

from tvm.script import tirx as T

from fastcar_compile.codegen.tvm.isa import InstructionSet
from fastcar_compile.codegen.tvm.kernels.attention.softmax import (
    DECAY,
    KEY_BLOCK,
    PARALLEL_KEYS,
    AttendRows,
    Block,
    L,
    LogitRule,
    M,
    Operands,
    Step,
    weigh_block,
)
from fastcar_compile.codegen.tvm.kernels.cache import Row, RowFormat, row_at
from fastcar_compile.codegen.tvm.kernels.script import inlined
from fastcar_compile.codegen.tvm.kernels.vectors import LINE, PREFETCH_BYTES, add_lanes, vector_lanes


def attend_rows(d: int, group: int, rule: LogitRule, dtype: str, isa: InstructionSet) -> AttendRows:
    """Return the macros for heads of d elements, `group` query heads per key/value head, caches of `dtype`."""
    rows_of = RowFormat(d, dtype, isa)
    logits, add_values = _logits(rows_of, rule), _add_values(rows_of)
    lanes = vector_lanes(d)

    @inlined
    def attend(o, heads, rows):
        weights = T.alloc_buffer((KEY_BLOCK,), "float32")
        # dot: partial sums of four keys. acc: the accumulator of one query head. Both stay in registers in their loops.
        dot = T.alloc_buffer((PARALLEL_KEYS * lanes,), "float32")
        acc = T.alloc_buffer((d,), "float32")
        stat = T.alloc_buffer((3,), "float32")
        # block: rows in order. g: query heads, which find the block in the first-level cache.
        for block in range((rows.last - rows.first + KEY_BLOCK - 1) // KEY_BLOCK):
            for g in range(group):
                count: T.let = T.min(rows.last - rows.first - block * KEY_BLOCK, KEY_BLOCK)
                start: T.let = rows.first + block * KEY_BLOCK
                stat[M] = o.state.m[heads.slot + g]
                logits(o, Step(heads, rows, g, start, count), Block(weights, stat), dot)
                weigh_block(o.state, heads.slot + g, count, Block(weights, stat))
                add_values(o, Step(heads, rows, g, start, count), Block(weights, stat), acc)

    return AttendRows(PREFETCH_BYTES // rows_of.bytes, attend, lambda column: column, d)


def _logits(rows_of: RowFormat, rule: LogitRule) -> Callable[..., None]:
    """Return the macro (o, step, block, dot): the block's weights become logits, its m their maximum with m."""
    lanes, lines = vector_lanes(rows_of.dim), -(-rows_of.bytes // LINE)
    # The vectors that share a block's exponent are one step: they are multiplied by its power of two together.
    stride = lanes * rows_of.vectors_of_block(lanes)

    def query(o: Operands, step: Step) -> Row:
        return row_at(o.q, step.group.b, step.group.first + step.g, step.group.i)

    @inlined
    def multiply(o, step, part, dot):
        # r: four keys at a time. c: unrolled along the head; dot is in registers. v: one vector.
        for r in T.unroll(PARALLEL_KEYS):
            for c in T.unroll(rows_of.dim // stride):
                for v in T.vectorized(lanes):
                    dot[r * lanes + v] += rows_of.product(
                        query(o, step), row_at(o.keys, *step.clamped(part * PARALLEL_KEYS + r)), c * stride, v, lanes
                    )

    @inlined
    def logits(o, step, block, dot):
        # part: four keys, of which those past the last row are the last row again. `weigh_block` makes their weights 0.
        for part in range((step.count + PARALLEL_KEYS - 1) // PARALLEL_KEYS):
            for r in T.unroll(PARALLEL_KEYS):
                for v in T.vectorized(lanes):
                    dot[r * lanes + v] = T.float32(0)
            # Only the first query head prefetches: the others find the rows in the first-level cache.
            if step.rows.ahead is not None and step.g == 0:
                # r: unrolled, the lines of four rows, line r % lines of row r // lines.
                for r in T.unroll(PARALLEL_KEYS * lines):
                    T.evaluate(
                        step.prefetch(
                            o.keys,
                            step.start + part * PARALLEL_KEYS + r // lines,
                            r % lines * rows_of.elements_of(LINE),
                        )
                    )
            multiply(o, step, part, dot)
            # The sum across lanes has one order on every instruction set. `attend_heads` repeats it.
            for r in T.unroll(PARALLEL_KEYS):
                add_lanes(dot, r * lanes, lanes)
                block.weights[part * PARALLEL_KEYS + r] = rule.logit(dot[r * lanes])
                # T.max gives its second operand where one is NaN: a NaN is no maximum.
                block.stat[M] = T.max(block.weights[part * PARALLEL_KEYS + r], block.stat[M])

    return logits


def _add_values(rows_of: RowFormat) -> Callable[..., None]:
    """Return the macro (o, step, block, acc): l and acc of the slot are rescaled and get the block's rows."""
    d, lanes, lines = rows_of.dim, vector_lanes(rows_of.dim), -(-rows_of.bytes // LINE)

    @inlined
    def prefetch_value(o, step, r):
        for u in T.unroll(lines):
            T.evaluate(step.prefetch(o.values, step.start + r, u * rows_of.elements_of(LINE)))

    @inlined
    def add_values(o, step, block, acc):
        # The sums so far are relative to the old maximum: the decay rescales l and acc to the new one.
        block.stat[L] = o.state.l[step.slot] * block.stat[DECAY]
        for c in T.unroll(d // lanes):
            for v in T.vectorized(lanes):
                acc[c * lanes + v] = o.state.acc[step.slot, c * lanes + v] * block.stat[DECAY]
        # r: rows of the block. c: unrolled along the head; acc is in registers. v: one vector.
        for r in range(step.count):
            if step.rows.ahead is not None and step.g == 0:
                prefetch_value(o, step, r)
            # l is summed row by row, in the order of acc.
            block.stat[L] += block.weights[r]
            for c in T.unroll(d // lanes):
                for v in T.vectorized(lanes):
                    acc[c * lanes + v] += rows_of.weighted(
                        block.weights[r], row_at(o.values, *step.index(r)), c * lanes, v
                    )
        o.state.l[step.slot] = block.stat[L]
        for c in T.unroll(d // lanes):
            for v in T.vectorized(lanes):
                o.state.acc[step.slot, c * lanes + v] = acc[c * lanes + v]

    return add_values
