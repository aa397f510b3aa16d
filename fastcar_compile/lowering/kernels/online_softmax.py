"""Attention in one pass over cached rows: a running maximum, and sums that are corrected with it (online softmax).

What decode attention and window attention share, as macros of TIR: which rows a query sees is theirs. A result has a
slot: the maximum so far, the sum of the weights, and the weighted sum of the values, both relative to the maximum.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from tvm.script import tirx as T

from fastcar_compile.lowering.isa import InstructionSet
from fastcar_compile.lowering.kernels.cached import chunks_of_block, element_bytes, product, row_bytes, weighted
from fastcar_compile.lowering.kernels.exponential import exp_not_positive
from fastcar_compile.lowering.kernels.script import inlined
from fastcar_compile.lowering.kernels.vectors import LINE, PREFETCH_BYTES, prefetch, vector_lanes

KEYS = 4
"""Keys whose dot products run together: independent sums that hide the multiply-add latency."""

BLOCK = 32
"""Rows between two corrections of the running maximum; keys and values of one block stay in the first-level cache."""

PARALLEL_ELEMENTS = 1 << 18
"""Cache elements from which a second thread pays for launching and awaiting a parallel region."""

PARTS = 16
"""Least pieces of work of a parallel region; few or an odd number of heads are cut along the context."""

LOWEST = -3.0e38


def context_parts(heads: int, elements: int) -> int:
    """Pieces that the context of every head is cut into; 0: not worth a parallel region."""
    if elements < PARALLEL_ELEMENTS:
        return 0
    parts = 1
    while heads * parts < PARTS * 3 // 4:
        parts *= 2
    return parts


@dataclass(frozen=True)
class Steps:
    """The macros.

    Attributes:
        ahead: rows by which a caller's `ask` is ahead.
        lanes: of a vector.
        clear: (slot, tops, totals, sums): the slots of a group, of no row yet.
        attend: (q, i, keys, values, batch row, kv head, slot, first, last, row, ask, weights, dot, acc, stat, tops,
            totals, sums): query rows i of the head's group meet the rows row(first) .. row(last - 1); `ask(j)` is the
            row to prefetch while j is read; None: none is. The temporaries have BLOCK, KEYS * lanes, d and 3 elements.
        finish: (y, batch row, kv head, i, start, parts, acc, stat, tops, totals, sums): the results in `parts` slots,
            a group apart from `start` on, added with their weights.
    """

    ahead: int
    lanes: int
    clear: Callable[..., None]
    attend: Callable[..., None]
    finish: Callable[..., None]


def _query(q: Any, batch: Any, head: Any, i: Any, at: Any) -> Any:
    return q[batch, head, i, at]


def online_softmax(d: int, group: int, scale: float, dtype: str, isa: InstructionSet) -> Steps:
    """For heads of d elements, `group` query heads per key/value head, caches of `dtype`."""
    lanes, size = vector_lanes(d), row_bytes(d, dtype)
    lines, step = -(-size // LINE), LINE // element_bytes(dtype)
    stride = lanes * chunks_of_block(d, dtype, lanes)

    @inlined
    def clear(slot, tops, totals, sums):
        for g in range(group):
            tops[slot + g] = T.float32(LOWEST)
            totals[slot + g] = T.float32(0)
            for c in T.vectorized(d):
                sums[slot + g, c] = T.float32(0)

    @inlined
    def attend(q, i, keys, values, bi, h, slot, first, last, row, ask, weights, dot, acc, stat, tops, totals, sums):
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
                stat[1] = exp_not_positive(tops[slot + g] - stat[0])
                tops[slot + g] = stat[0]
                for r in T.vectorized(BLOCK):
                    weights[r] = exp_not_positive(weights[r] - stat[0])
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

    @inlined
    def finish(y, bi, h, i, start, parts, acc, stat, tops, totals, sums):
        for g in range(group):
            stat[0] = T.float32(LOWEST)
            for p in range(parts):
                stat[0] = T.max(stat[0], tops[start + p * group + g])
            stat[1] = T.float32(0)
            for c in T.vectorized(d):
                acc[c] = T.float32(0)
            for p in range(parts):
                stat[2] = exp_not_positive(tops[start + p * group + g] - stat[0])
                stat[1] += stat[2] * totals[start + p * group + g]
                for c in T.vectorized(d):
                    acc[c] += stat[2] * sums[start + p * group + g, c]
            for c in T.vectorized(d):
                y[bi, h * group + g, i, c] = acc[c] / stat[1]

    return Steps(PREFETCH_BYTES // size, lanes, clear, attend, finish)
