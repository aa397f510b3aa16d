"""Sparse attention over a ring cache, and its addresses; ops/window.py defines the rows."""

from __future__ import annotations

from typing import Any

from tvm.script import tirx as T
from tvm.tirx import PrimFunc

from fastcar_compile.lowering.isa import PORTABLE, InstructionSet
from fastcar_compile.lowering.kernels import OPAQUE
from fastcar_compile.lowering.kernels.attention import KEYS, LOWEST, PARALLEL_ELEMENTS
from fastcar_compile.lowering.kernels.cached import element, element_bytes, row_bytes
from fastcar_compile.lowering.kernels.exponential import exp_not_positive
from fastcar_compile.lowering.kernels.vectors import LINE, PREFETCH_BYTES, prefetch, vector_lanes
from fastcar_compile.ops.cached import row_size

Shape = tuple[int, int, int, int]
BLOCK = 16
"""Weights whose exponentials run together."""


def ring_row(back: int, sinks: int, ring: int) -> PrimFunc:
    """The row of position - back, clamped to 0: int64 [1]."""

    @T.prim_func(private=True, s_tir=True)
    def row_of_earlier_key(position: T.Buffer((1,), "int64"), row: T.Buffer((1,), "int64")):
        T.func_attr({"tir.noalias": True, "op_pattern": OPAQUE})
        with T.sblock("row"):
            T.reads(position[0:1])
            T.writes(row[0:1])
            p: T.let = T.max(position[0] - T.int64(back), T.int64(0))
            row[0] = T.if_then_else(p < T.int64(sinks), p, T.int64(sinks) + (p - T.int64(sinks)) % T.int64(ring))

    return row_of_earlier_key


def window_attention(
    query: Shape,
    cache: Shape,
    scale: float,
    sinks: int,
    window: int,
    dtype: str = "float32",
    isa: InstructionSet = PORTABLE,
) -> PrimFunc:
    """Grouped-query attention to sinks and window; `sink_query` meets the sinks. Time grows with sinks + window only.

    Key j of a query at p is sink j, or position first + j - sinks where `first` is the first of the window; two passes
    over them.
    """
    b, hq, t, d = query
    hkv, s = cache[1], cache[2]
    group, ring = hq // hkv, s - sinks
    lanes, width = vector_lanes(d), row_size(d, dtype)
    padded = (sinks + window + BLOCK - 1) // BLOCK * BLOCK

    def met_by(row: Any) -> Any:
        """Where in `both` the query of a row begins; without sinks there is one query, whatever the second one is."""
        return T.if_then_else(row < sinks, d, 0) if sinks else 0

    loop = T.parallel if b * hq * t * padded * d >= PARALLEL_ELEMENTS else T.serial
    size = row_bytes(d, dtype)
    ahead, lines, step = PREFETCH_BYTES // size, -(-size // LINE), LINE // element_bytes(dtype)

    @T.prim_func(private=True, s_tir=True)
    def attend_to_window(
        q: T.Buffer((b, hq, t, d), "float32"),
        keys: T.Buffer((b, hkv, s, width), dtype),
        values: T.Buffer((b, hkv, s, width), dtype),
        position: T.Buffer((1,), "int64"),
        sink_q: T.Buffer((b, hq, t, d), "float32"),
        y: T.Buffer((b, hq, t, d), "float32"),
    ):
        T.func_attr({"tir.noalias": True, "op_pattern": OPAQUE})
        for fused in loop(b * hq * t):
            with T.sblock("head"):
                T.reads(
                    q[0:b, 0:hq, 0:t, 0:d],
                    sink_q[0:b, 0:hq, 0:t, 0:d],
                    keys[0:b, 0:hkv, 0:s, 0:width],
                    values[0:b, 0:hkv, 0:s, 0:width],
                    position[0:1],
                )
                T.writes(y[0:b, 0:hq, 0:t, 0:d])
                weights = T.alloc_buffer((padded,), "float32")
                both = T.alloc_buffer((2 * d,), "float32")
                row = T.alloc_buffer((KEYS,), "int32")
                dot = T.alloc_buffer((KEYS * lanes,), "float32")
                acc = T.alloc_buffer((d,), "float32")
                stat = T.alloc_buffer((2,), "float32")
                bi: T.let = fused // (hq * t)
                h: T.let = fused // t % hq
                i: T.let = fused % t
                p: T.let = T.Cast("int32", position[0]) + i
                first: T.let = T.max(p - (window - 1), sinks)
                base: T.let = (first - sinks) % ring
                seen: T.let = T.min(p + 1, sinks) + T.max(p + 1 - first, 0)
                for c in T.unroll(d // lanes):
                    for v in T.vectorized(lanes):
                        both[c * lanes + v] = q[bi, h, i, c * lanes + v]
                        both[d + c * lanes + v] = sink_q[bi, h, i, c * lanes + v]
                stat[0] = T.float32(LOWEST)
                for block in range((seen + KEYS - 1) // KEYS):
                    for r in T.unroll(KEYS):
                        j: T.let = T.min(block * KEYS + r, seen - 1)
                        row[r] = T.if_then_else(j < sinks, j, sinks + (base + j - sinks) % ring)
                        if t == 1:  # the rows of a chunk read what its first one has fetched
                            later: T.let = T.if_then_else(j + ahead < seen, j + ahead, (j + ahead) % seen)
                            asked: T.let = T.if_then_else(later < sinks, later, sinks + (base + later - sinks) % ring)
                            turn: T.let = T.if_then_else(j + ahead < seen, 0, s)  # the next head's rows
                            for u in T.unroll(lines):
                                T.evaluate(prefetch(keys[bi, h // group, asked + turn, u * step]))
                                T.evaluate(prefetch(values[bi, h // group, row[r], u * step]))
                        for v in T.vectorized(lanes):
                            dot[r * lanes + v] = T.float32(0)
                    for c in T.unroll(d // lanes):
                        for r in T.unroll(KEYS):
                            for v in T.vectorized(lanes):
                                dot[r * lanes + v] += both[met_by(row[r]) + c * lanes + v] * element(
                                    keys, (bi, h // group, row[r]), c * lanes, v, d, dtype, isa
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
                        weights[block * KEYS + r] = T.if_then_else(
                            block * KEYS + r < seen, dot[r * lanes] * T.float32(scale), T.float32(LOWEST)
                        )
                        stat[0] = T.max(weights[block * KEYS + r], stat[0])
                for block in range((seen + BLOCK - 1) // BLOCK):
                    for r in T.vectorized(BLOCK):
                        weights[block * BLOCK + r] = exp_not_positive(weights[block * BLOCK + r] - stat[0])
                stat[1] = T.float32(0)
                for r in range(seen):
                    stat[1] += weights[r]
                for c in T.unroll(d // lanes):
                    for v in T.vectorized(lanes):
                        acc[c * lanes + v] = T.float32(0)
                for r in range(seen):
                    at: T.let = T.if_then_else(r < sinks, r, sinks + (base + r - sinks) % ring)
                    for c in T.unroll(d // lanes):
                        for v in T.vectorized(lanes):
                            acc[c * lanes + v] += weights[r] * element(
                                values, (bi, h // group, at), c * lanes, v, d, dtype, isa
                            )
                for c in T.unroll(d // lanes):
                    for v in T.vectorized(lanes):
                        y[bi, h, i, c * lanes + v] = acc[c * lanes + v] / stat[1]

    return attend_to_window
