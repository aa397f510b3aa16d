"""A query meets cached rows as float32: every element is widened where it is read."""

from __future__ import annotations

from functools import partial
from typing import Any

from tvm.script import tirx as T

from fastcar_compile.codegen.tvm.isa import InstructionSet
from fastcar_compile.codegen.tvm.kernels.attention.softmax_block import BLOCK, KEYS, AttendRows, weigh
from fastcar_compile.codegen.tvm.kernels.cache.elements import (
    chunks_of_block,
    element_bytes,
    product,
    row_bytes,
    weighted,
)
from fastcar_compile.codegen.tvm.kernels.script import inlined
from fastcar_compile.codegen.tvm.kernels.simd.vectors import LINE, PREFETCH_BYTES, prefetch, vector_lanes


def _query(q: Any, batch: Any, head: Any, i: Any, at: Any) -> Any:
    return q[batch, head, i, at]


def attend_rows(d: int, group: int, scale: float, dtype: str, isa: InstructionSet) -> AttendRows:
    """For heads of d elements, `group` query heads per key/value head, caches of `dtype`."""
    lanes, size = vector_lanes(d), row_bytes(d, dtype)
    lines, step = -(-size // LINE), LINE // element_bytes(dtype)
    stride = lanes * chunks_of_block(d, dtype, lanes)

    @inlined
    def attend(q, i, keys, values, bi, h, slot, first, last, row, ask, tops, totals, sums):
        weights = T.alloc_buffer((BLOCK,), "float32")
        dot = T.alloc_buffer((KEYS * lanes,), "float32")
        acc = T.alloc_buffer((d,), "float32")
        stat = T.alloc_buffer((3,), "float32")
        for block in range((last - first + BLOCK - 1) // BLOCK):
            for g in range(group):
                count: T.let = T.min(last - first - block * BLOCK, BLOCK)
                at: T.let = first + block * BLOCK
                stat[0] = tops[slot + g]
                for part in range((count + KEYS - 1) // KEYS):
                    for r in T.unroll(KEYS):
                        for v in T.vectorized(lanes):
                            dot[r * lanes + v] = T.float32(0)
                    if ask is not None and g == 0:
                        for r in T.unroll(KEYS * lines):
                            T.evaluate(prefetch(keys[bi, h, ask(at + part * KEYS + r // lines), r % lines * step]))
                    for r in T.unroll(KEYS):
                        for c in T.unroll(d // stride):
                            for v in T.vectorized(lanes):
                                dot[r * lanes + v] += product(
                                    partial(_query, q, bi, h * group + g, i),
                                    keys,
                                    (bi, h, row(T.min(at + part * KEYS + r, last - 1))),
                                    c * stride,
                                    v,
                                    lanes,
                                    d,
                                    dtype,
                                    isa,
                                )
                    for r in T.unroll(KEYS):
                        if lanes >= 16:
                            for v in T.vectorized(8):
                                dot[r * lanes + v] += dot[r * lanes + v + 8]
                        if lanes >= 8:
                            for v in T.vectorized(4):
                                dot[r * lanes + v] += dot[r * lanes + v + 4]
                        for v in T.unroll(min(lanes, 4) - 1):
                            dot[r * lanes] += dot[r * lanes + v + 1]
                        weights[part * KEYS + r] = dot[r * lanes] * T.float32(scale)
                        stat[0] = T.max(weights[part * KEYS + r], stat[0])
                weigh(slot + g, count, tops, weights, stat)
                stat[2] = totals[slot + g] * stat[1]
                for c in T.unroll(d // lanes):
                    for v in T.vectorized(lanes):
                        acc[c * lanes + v] = sums[slot + g, c * lanes + v] * stat[1]
                for r in range(count):
                    if ask is not None and g == 0:
                        for u in T.unroll(lines):
                            T.evaluate(prefetch(values[bi, h, ask(at + r), u * step]))
                    stat[2] += weights[r]
                    for c in T.unroll(d // lanes):
                        for v in T.vectorized(lanes):
                            acc[c * lanes + v] += weighted(
                                weights[r], values, (bi, h, row(at + r)), c * lanes, v, d, dtype, isa
                            )
                totals[slot + g] = stat[2]
                for c in T.unroll(d // lanes):
                    for v in T.vectorized(lanes):
                        sums[slot + g, c * lanes + v] = acc[c * lanes + v]

    return AttendRows(PREFETCH_BYTES // size, attend, lambda column: column, d)
