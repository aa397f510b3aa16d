"""Decode attention: one query row per head over the filled part of the cache."""

from __future__ import annotations

from typing import Any

from tvm.script import tirx as T
from tvm.tirx import PrimFunc

from fastcar_compile.lowering.isa import PORTABLE, InstructionSet
from fastcar_compile.lowering.kernels import OPAQUE
from fastcar_compile.lowering.kernels.cached import element, element_bytes, row_bytes
from fastcar_compile.lowering.kernels.exponential import exp_not_positive
from fastcar_compile.lowering.kernels.vectors import LINE, PREFETCH_BYTES, prefetch, vector_lanes
from fastcar_compile.ops.cached import row_size

Shape = tuple[int, int, int, int]
KEYS = 4
"""Keys whose dot products run together: independent sums that hide the multiply-add latency."""

BLOCK = 32
"""Rows between two corrections of the running maximum; keys and values of one block stay in the first-level cache."""

PARALLEL_ELEMENTS = 1 << 18
"""Cache elements from which a second thread pays for the 5-10 us of a parallel region."""

PARTS = 16
"""Least pieces of work of a parallel region; few or an odd number of heads are cut along the context."""

LOWEST = -3.0e38


def filled_rows(position: Any, row: Any, size: int) -> Any:
    """How many cache rows query row `row` of a call at `position` sees: the rows 0 .. this - 1 of `size`."""
    return T.min(T.Cast("int32", position) + row + 1, size)


def following(row: Any, last: Any, size: int) -> Any:
    """A row to ask for ahead of its use: one past the rows 0 .. last - 1 of a head is of the next head's."""
    return T.if_then_else(row < last, row, row - last + size)


def context_parts(heads: int, elements: int) -> int:
    """Pieces that the context of every head is cut into; 0: not worth a parallel region."""
    if elements < PARALLEL_ELEMENTS:
        return 0
    parts = 1
    while heads * parts < PARTS * 3 // 4:
        parts *= 2
    return parts


def attention(
    query: Shape, cache: Shape, scale: float, dtype: str = "float32", isa: InstructionSet = PORTABLE
) -> PrimFunc:
    """Grouped-query attention of query [B, Hq, 1, D] over cache [B, Hkv, S, D] of `dtype`, rows 0 .. position.

    One pass with a running maximum (online softmax). A key/value row is read from memory once for all query heads of
    its group; time grows with the position and not with S. Parallel over key/value heads and, where those are few,
    pieces of the context, whose results are then added with their weights.
    """
    b, hq, _, d = query
    hkv, s = cache[1], cache[2]
    group, width = hq // hkv, row_size(d, dtype)
    lanes = vector_lanes(d)
    pieces = context_parts(b * hkv, b * hkv * s * d * 2)
    parts = max(pieces, 1)
    loop = T.parallel if pieces else T.serial
    size = row_bytes(d, dtype)
    ahead, lines, step = PREFETCH_BYTES // size, -(-size // LINE), LINE // element_bytes(dtype)

    @T.prim_func(private=True, s_tir=True)
    def attend(
        q: T.Buffer((b, hq, 1, d), "float32"),
        keys: T.Buffer((b, hkv, s, width), dtype),
        values: T.Buffer((b, hkv, s, width), dtype),
        position: T.Buffer((1,), "int64"),
        y: T.Buffer((b, hq, 1, d), "float32"),
    ):
        T.func_attr({"tir.noalias": True, "op_pattern": OPAQUE})
        with T.sblock("heads"):
            T.reads(
                q[0:b, 0:hq, 0:1, 0:d],
                keys[0:b, 0:hkv, 0:s, 0:width],
                values[0:b, 0:hkv, 0:s, 0:width],
                position[0:1],
            )
            T.writes(y[0:b, 0:hq, 0:1, 0:d])
            sums = T.alloc_buffer((b * hkv * parts * group, d), "float32")
            tops = T.alloc_buffer((b * hkv * parts * group,), "float32")
            totals = T.alloc_buffer((b * hkv * parts * group,), "float32")
            for item in loop(b * hkv * parts):
                weights = T.alloc_buffer((BLOCK,), "float32")
                dot = T.alloc_buffer((KEYS * lanes,), "float32")
                acc = T.alloc_buffer((d,), "float32")
                stat = T.alloc_buffer((3,), "float32")
                bi: T.let = item // (hkv * parts)
                h: T.let = item // parts % hkv
                filled: T.let = filled_rows(position[0], 0, s)
                span: T.let = (filled + parts * BLOCK - 1) // (parts * BLOCK) * BLOCK
                first: T.let = item % parts * span
                last: T.let = T.min(first + span, filled)
                for g in range(group):
                    tops[item * group + g] = T.float32(LOWEST)
                    totals[item * group + g] = T.float32(0)
                    for c in T.vectorized(d):
                        sums[item * group + g, c] = T.float32(0)
                for block in range((last - first + BLOCK - 1) // BLOCK):
                    for g in range(group):
                        count: T.let = T.min(last - first - block * BLOCK, BLOCK)
                        at: T.let = first + block * BLOCK
                        stat[0] = tops[item * group + g]
                        for part in range((count + KEYS - 1) // KEYS):
                            for r in T.unroll(KEYS):
                                for v in T.vectorized(lanes):
                                    dot[r * lanes + v] = T.float32(0)
                            if g == 0:
                                for r in T.unroll(KEYS * lines):
                                    T.evaluate(
                                        prefetch(
                                            keys[
                                                bi,
                                                h,
                                                following(at + part * KEYS + r // lines + ahead, last, s),
                                                r % lines * step,
                                            ]
                                        )
                                    )
                            for r in T.unroll(KEYS):
                                for c in T.unroll(d // lanes):
                                    for v in T.vectorized(lanes):
                                        dot[r * lanes + v] += q[bi, h * group + g, 0, c * lanes + v] * element(
                                            keys,
                                            (bi, h, T.min(at + part * KEYS + r, last - 1)),
                                            c * lanes,
                                            v,
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
                        stat[1] = exp_not_positive(tops[item * group + g] - stat[0])
                        tops[item * group + g] = stat[0]
                        for r in T.vectorized(BLOCK):
                            weights[r] = exp_not_positive(weights[r] - stat[0])
                        stat[2] = totals[item * group + g] * stat[1]
                        for c in T.unroll(d // lanes):
                            for v in T.vectorized(lanes):
                                acc[c * lanes + v] = sums[item * group + g, c * lanes + v] * stat[1]
                        for r in range(count):
                            if g == 0:
                                for u in T.unroll(lines):
                                    T.evaluate(prefetch(values[bi, h, following(at + r + ahead, last, s), u * step]))
                            stat[2] += weights[r]
                            for c in T.unroll(d // lanes):
                                for v in T.vectorized(lanes):
                                    acc[c * lanes + v] += weights[r] * element(
                                        values, (bi, h, at + r), c * lanes, v, d, dtype, isa
                                    )
                        totals[item * group + g] = stat[2]
                        for c in T.unroll(d // lanes):
                            for v in T.vectorized(lanes):
                                sums[item * group + g, c * lanes + v] = acc[c * lanes + v]
            for head in range(b * hkv * group):
                merged = T.alloc_buffer((d,), "float32")
                share = T.alloc_buffer((3,), "float32")
                start: T.let = head // group * parts * group + head % group
                share[0] = T.float32(LOWEST)
                for p in range(parts):
                    share[0] = T.max(share[0], tops[start + p * group])
                share[1] = T.float32(0)
                for c in T.vectorized(d):
                    merged[c] = T.float32(0)
                for p in range(parts):
                    share[2] = exp_not_positive(tops[start + p * group] - share[0])
                    share[1] += share[2] * totals[start + p * group]
                    for c in T.vectorized(d):
                        merged[c] += share[2] * sums[start + p * group, c]
                for c in T.vectorized(d):
                    y[head // hq, head % hq, 0, c] = merged[c] / share[1]

    return attend
