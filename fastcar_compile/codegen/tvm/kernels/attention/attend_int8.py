"""A query meets an int8 cache in integers: AVX-512 VNNI multiplies 64 mantissas at once, none of them is widened."""

from __future__ import annotations

from tvm.script import tirx as T

from fastcar_compile.codegen.tvm.isa import InstructionSet
from fastcar_compile.codegen.tvm.kernels.attention.limbs import BYTES, DIGITS, LANES
from fastcar_compile.codegen.tvm.kernels.attention.query_limbs import Query, Sums, logits_macro, split_macro
from fastcar_compile.codegen.tvm.kernels.attention.softmax_block import BLOCK, KEYS, AttendRows, weigh
from fastcar_compile.codegen.tvm.kernels.attention.value_limbs import (
    Shares,
    Totals,
    add_macro,
    lanes_for,
    place,
    width_of,
)
from fastcar_compile.codegen.tvm.kernels.script import inlined
from fastcar_compile.codegen.tvm.kernels.simd import vectors
from fastcar_compile.codegen.tvm.kernels.simd.vectors import folded
from fastcar_compile.ops.cached import BLOCK as SHARING

AHEAD = 2 * BLOCK
"""Rows by which keys and values are asked for. Measured: 48 to 96 are alike; asking for the first cache is slower."""


def suits(d: int, dtype: str, isa: InstructionSet) -> bool:
    """Whether rows of heads of d elements are whole vectors, and the CPU has what it takes."""
    return dtype == "int8" and d % BYTES == 0 and isa.int8 == "vnni512"


def attend_rows(d: int, group: int, scale: float, dtype: str, isa: InstructionSet) -> AttendRows:
    """For heads of d elements, `group` query heads per key/value head, caches of int8."""
    split, logits, add = split_macro(d, group, scale), logits_macro(d), add_macro(d)
    chunks, width, lanes = d // BYTES, width_of(d), lanes_for(d)

    @inlined
    def attend(q, i, keys, values, bi, h, slot, first, last, row, ask, tops, totals, sums):
        weights = T.alloc_buffer((BLOCK,), "float32")
        stat = T.alloc_buffer((3,), "float32")
        digits = T.alloc_buffer((group * DIGITS * d,), "int8")
        scales = T.alloc_buffer((group * chunks * LANES,), "float32")
        excess = T.alloc_buffer((group * chunks * LANES,), "int32")
        rows = T.alloc_buffer((KEYS * LANES,), "int32")
        pairs = T.alloc_buffer((2 * LANES,), "int32")
        logit = T.alloc_buffer((LANES,), "float32")
        top = T.alloc_buffer((4,), "float32")
        whole = T.alloc_buffer((SHARING,), "int32")
        exact = T.alloc_buffer((BLOCK // KEYS * lanes,), "float32")
        shares = T.alloc_buffer((BLOCK // KEYS * lanes,), "int32")
        largest = T.alloc_buffer((lanes,), "int32")
        bound = T.alloc_buffer((lanes,), "float32")
        turned = T.alloc_buffer((4 * BYTES,), "int8")
        columns = T.alloc_buffer((4 * BYTES,), "int8")
        low = T.alloc_buffer((width,), "int32")
        middle = T.alloc_buffer((width,), "int32")
        high = T.alloc_buffer((width,), "int32")
        split(q, bi, h, i, Query(digits, scales, excess), Sums(rows, pairs, logit, top), whole)
        for block in range((last - first + BLOCK - 1) // BLOCK):
            for g in range(group):
                count: T.let = T.min(last - first - block * BLOCK, BLOCK)
                at: T.let = first + block * BLOCK
                logits(
                    keys, bi, h, g, at, last, count, row, ask,
                    Query(digits, scales, excess), Sums(rows, pairs, logit, top), weights,
                )  # fmt: skip
                stat[0] = tops[slot + g]
                for v in T.unroll(4):
                    stat[0] = T.max(top[v], stat[0])
                weigh(slot + g, count, tops, weights, stat)
                top[T.Ramp(0, 1, 4)] = folded(vectors.row(weights, [], 0), BLOCK)
                totals[slot + g] = totals[slot + g] * stat[1] + ((top[0] + top[1]) + (top[2] + top[3]))
                add(
                    values, bi, h, g, slot + g, at, last, count, row, ask, weights, stat[1], sums,
                    Shares(exact, shares, largest, bound), Totals(turned, columns, low, middle, high),
                )  # fmt: skip

    return AttendRows(AHEAD, attend, place, 4)
