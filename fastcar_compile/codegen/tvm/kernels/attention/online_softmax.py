"""Attention in one pass over cached rows: a running maximum, and sums that are corrected with it (online softmax).

What decode attention and window attention share, as macros of TIR: which rows a query sees is theirs. A result has a
slot: the maximum so far, the sum of the weights, and the weighted sum of the values, both relative to the maximum.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tvm.script import tirx as T

from fastcar_compile.codegen.tvm.isa import InstructionSet
from fastcar_compile.codegen.tvm.kernels.attention import attend_float, attend_int8
from fastcar_compile.codegen.tvm.kernels.attention.exponential import exp_not_positive
from fastcar_compile.codegen.tvm.kernels.attention.softmax_block import LOWEST
from fastcar_compile.codegen.tvm.kernels.script import inlined

PARALLEL_CACHE_ELEMENTS = 1 << 18
"""Cache elements from which a second thread pays for launching and awaiting a parallel region."""

PARTS = 16
"""Least pieces of work of a parallel region; few or an odd number of heads are cut along the context."""


def context_parts(heads: int, elements: int) -> int:
    """Pieces that the context of every head is cut into; 0: not worth a parallel region."""
    if elements < PARALLEL_CACHE_ELEMENTS:
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
        clear: (slot, tops, totals, sums): the slots of a group, of no row yet.
        attend: (q, i, keys, values, batch row, kv head, slot, first, last, row, ask, tops, totals, sums): query rows i
            of the head's group meet the rows row(first) .. row(last - 1); `ask(j)` is the row to prefetch while j is
            read; None: none is. Where a parallel loop owns them, its temporaries are each iteration's.
        finish: (y, batch row, kv head, i, start, parts, acc, stat, tops, totals, sums): the results in `parts` slots,
            a group apart from `start` on, added with their weights. The temporaries have d and 3 elements.
    """

    ahead: int
    clear: Callable[..., None]
    attend: Callable[..., None]
    finish: Callable[..., None]


def online_softmax(d: int, group: int, scale: float, dtype: str, isa: InstructionSet) -> Steps:
    """For heads of d elements, `group` query heads per key/value head, caches of `dtype`."""
    kind = attend_int8 if attend_int8.suits(d, dtype, isa) else attend_float
    rows = kind.attend_rows(d, group, scale, dtype, isa)
    place, run = rows.place, rows.run

    @inlined
    def clear(slot, tops, totals, sums):
        for g in range(group):
            tops[slot + g] = T.float32(LOWEST)
            totals[slot + g] = T.float32(0)
            for c in T.vectorized(d):
                sums[slot + g, c] = T.float32(0)

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
            for c in T.unroll(d // run):
                for v in T.vectorized(run):
                    y[bi, h * group + g, i, c * run + v] = acc[place(c * run) + v] / stat[1]

    return Steps(rows.ahead, clear, rows.attend, finish)
