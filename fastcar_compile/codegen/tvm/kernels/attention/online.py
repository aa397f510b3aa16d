"""Attention in one pass over cached rows by online softmax (FlashAttention), as macros.

Decode attention and window attention share these macros and choose the rows. Every slot of the state is a partial
result: running maximum m, normaliser l and accumulator acc, the latter two relative to exp(m).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tvm.script import tirx as T

from fastcar_compile.codegen.tvm.isa import InstructionSet
from fastcar_compile.codegen.tvm.kernels.attention import float32 as attend_float
from fastcar_compile.codegen.tvm.kernels.attention import heads as attend_heads
from fastcar_compile.codegen.tvm.kernels.attention import int8 as attend_int8
from fastcar_compile.codegen.tvm.kernels.attention.softmax import LOWEST, LogitRule
from fastcar_compile.codegen.tvm.kernels.script import inlined
from fastcar_compile.codegen.tvm.kernels.vectors import exp_not_positive

PARALLEL_CACHE_ELEMENTS = 1 << 18
"""Cache elements from which a second thread pays for launching and awaiting a parallel region."""

SPLIT_CACHE_ELEMENTS = 1 << 16
"""Cache elements from which it pays where the pieces are whole query heads: no partial results are added."""

PARTS = 16
"""The least pieces of work of a parallel region. Few or an odd number of heads are cut along the context."""


def context_parts(heads: int, elements: int) -> int:
    """Return into how many parts the context of every head is cut, or 0 where a parallel region does not pay."""
    if elements < PARALLEL_CACHE_ELEMENTS:
        return 0
    parts = 1
    # Parts double until heads * parts is at least 12 pieces of work.
    while heads * parts < PARTS * 3 // 4:
        parts *= 2
    return parts


def head_splits(group: int, together: int, elements: int) -> int:
    """Return into how many pieces the query heads of a group are cut, for a context that is not cut.

    Heads that share a pass over the rows stay together. The results do not depend on it, and on one thread it costs
    nothing: a small cache stays in the second-level cache.
    """
    return group // together if SPLIT_CACHE_ELEMENTS <= elements < PARALLEL_CACHE_ELEMENTS else 1


@dataclass(frozen=True)
class OnlineSoftmax:
    """The macros.

    Attributes:
        ahead: the prefetch distance in rows, for `Rows.ahead`.
        clear: (State, slot): empties the slots of a group.
        attend: (Operands, Group, Rows): the group's query heads meet the rows. Its temporaries belong to one iteration
            of a parallel loop.
        finish: (y, State, Group, parts): writes the results of a group. The partial results of its query heads are in
            `parts` runs of slots, a group apart, and are rescaled to one maximum and added.
    """

    ahead: int
    clear: Callable[..., None]
    attend: Callable[..., None]
    finish: Callable[..., None]


def online_softmax(d: int, group: int, rule: LogitRule, dtype: str, isa: InstructionSet) -> OnlineSoftmax:
    """Return the macros for heads of d elements, `group` query heads per key/value head, caches of `dtype`."""
    # attend_heads takes no int8 cache, so at most one of the two special kinds fits.
    kind = attend_int8 if attend_int8.suits(d, dtype, isa) else attend_float
    if attend_heads.heads_together(d, group, dtype, isa) > 1:
        kind = attend_heads
    rows = kind.attend_rows(d, group, rule, dtype, isa)
    place, run = rows.place, rows.run

    @inlined
    def clear(state, slot):
        for g in range(group):
            state.m[slot + g] = T.float32(LOWEST)
            state.l[slot + g] = T.float32(0)
            for c in T.vectorized(d):
                state.acc[slot + g, c] = T.float32(0)

    @inlined
    def finish(y, state, heads, parts):
        acc = T.alloc_buffer((d,), "float32")
        stat = T.alloc_buffer((3,), "float32")  # m, l, and the factor that rescales one part
        for g in range(group):
            stat[0] = T.float32(LOWEST)
            # First the maximum over all parts, then one pass that rescales every part to it, in the order of the parts.
            for p in range(parts):
                stat[0] = T.max(stat[0], state.m[heads.slot + p * group + g])
            stat[1] = T.float32(0)
            for c in T.vectorized(d):
                acc[c] = T.float32(0)
            for p in range(parts):
                # An empty part has l and acc of 0: its factor does not matter. A single part has the factor exp(0) = 1.
                stat[2] = exp_not_positive(state.m[heads.slot + p * group + g] - stat[0])
                stat[1] += stat[2] * state.l[heads.slot + p * group + g]
                for c in T.vectorized(d):
                    acc[c] += stat[2] * state.acc[heads.slot + p * group + g, c]
            # `place` undoes the permutation of columns by attend_int8.
            # Runs of `run` columns are adjacent in both orders.
            for c in T.unroll(d // run):
                for v in T.vectorized(run):
                    y[heads.b, heads.first + g, heads.i, c * run + v] = acc[place(c * run) + v] / stat[1]

    return OnlineSoftmax(rows.ahead, clear, rows.attend, finish)
