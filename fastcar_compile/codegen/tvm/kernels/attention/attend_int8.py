"""A query meets an int8 cache in integers: AVX-512 VNNI multiplies 64 mantissas at once, and none is widened."""

from __future__ import annotations

from tvm.script import tirx as T

from fastcar_compile.codegen.tvm.isa import InstructionSet
from fastcar_compile.codegen.tvm.kernels.attention.limbs import LIMBS, SUMS, VECTOR_BYTES
from fastcar_compile.codegen.tvm.kernels.attention.logit_rule import LogitRule
from fastcar_compile.codegen.tvm.kernels.attention.query_limbs import LogitSums, SplitQuery, multiply_keys, split_query
from fastcar_compile.codegen.tvm.kernels.attention.softmax_block import (
    DECAY,
    KEY_BLOCK,
    PARALLEL_KEYS,
    AttendRows,
    Block,
    M,
    Step,
    weigh_block,
)
from fastcar_compile.codegen.tvm.kernels.attention.value_limbs import (
    SplitWeights,
    ValueSums,
    add_values,
    columns_of,
    lanes_for,
    place,
)
from fastcar_compile.codegen.tvm.kernels.script import inlined
from fastcar_compile.codegen.tvm.kernels.simd.vectors import fold_fours, load_from, ramp
from fastcar_compile.ops.cached import BLOCK as EXPONENT_BLOCK

AHEAD = 2 * KEY_BLOCK
"""The prefetch distance in rows. Measured: 48 to 96 are alike, prefetching into the first-level cache is slower."""


def suits(d: int, dtype: str, isa: InstructionSet) -> bool:
    """Return whether rows of heads of d elements are whole vectors and the instruction set has AVX-512 VNNI."""
    return dtype == "int8" and d % VECTOR_BYTES == 0 and isa.int8 == "vnni512"


def attend_rows(d: int, group: int, rule: LogitRule, _dtype: str, _isa: InstructionSet) -> AttendRows:
    """Return the macros for heads of d elements, `group` query heads per key/value head, caches of int8."""
    split, logits, add = split_query(d, group, rule.scale), multiply_keys(d), add_values(d)
    vectors, columns, lanes, quads = d // VECTOR_BYTES, columns_of(d), lanes_for(d), KEY_BLOCK // PARALLEL_KEYS

    @inlined
    def add_block(o, step, block, query, sums, values):
        logits(o, step, query, sums, block.weights)
        if rule.softcap is not None:
            for v in T.vectorized(KEY_BLOCK):
                block.weights[v] = rule.capped(block.weights[v])
        block.stat[M] = o.state.m[step.slot]
        # sums.m has four maxima of logits without the cap.
        # The cap rises with the logit, so the cap of a maximum is the maximum of the capped logits.
        for v in T.unroll(4):
            block.stat[M] = T.max(rule.capped(sums.m[v]), block.stat[M])
        weigh_block(o.state, step.slot, step.count, block)
        # l: 32 weights in four sums of eight, then in pairs. sums.m is free as a temporary here.
        sums.m[ramp(0, 4)] = fold_fours(load_from(block.weights, [], 0), KEY_BLOCK)
        o.state.l[step.slot] = o.state.l[step.slot] * block.stat[DECAY] + (
            (sums.m[0] + sums.m[1]) + (sums.m[2] + sums.m[3])
        )
        add(o, step, block, *values)

    @inlined
    def attend(o, heads, rows):
        weights = T.alloc_buffer((KEY_BLOCK,), "float32")
        stat = T.alloc_buffer((3,), "float32")
        # The split query of all heads, made once per call.
        limbs = T.alloc_buffer((group * LIMBS * d,), "int8")
        scales = T.alloc_buffer((group * vectors * SUMS,), "float32")
        correction = T.alloc_buffer((group * vectors * SUMS,), "int32")
        # Integer sums of four keys with the query, and the logits that they give.
        keys = T.alloc_buffer((PARALLEL_KEYS * SUMS,), "int32")
        pairs = T.alloc_buffer((2 * SUMS,), "int32")
        logit = T.alloc_buffer((SUMS,), "float32")
        four = T.alloc_buffer((4,), "float32")
        integers = T.alloc_buffer((EXPONENT_BLOCK,), "int32")
        # Weights of a block times the rows' powers of two, and their limbs.
        exact = T.alloc_buffer((quads * lanes,), "float32")
        weight_limbs = T.alloc_buffer((quads * lanes,), "int32")
        largest = T.alloc_buffer((lanes,), "int32")
        unit = T.alloc_buffer((lanes,), "float32")
        # Four rows of values, interleaved bytewise in two steps.
        interleaved = T.alloc_buffer((4 * VECTOR_BYTES,), "int8")
        column = T.alloc_buffer((4 * VECTOR_BYTES,), "int8")
        # Column sums by limb: with 128 columns they are 24 of the 32 registers.
        low = T.alloc_buffer((columns,), "int32")
        middle = T.alloc_buffer((columns,), "int32")
        high = T.alloc_buffer((columns,), "int32")
        query = T.meta_var(SplitQuery(limbs, scales, correction))
        sums = T.meta_var(LogitSums(keys, pairs, logit, four))
        values = T.meta_var(
            (SplitWeights(exact, weight_limbs, largest, unit), ValueSums(interleaved, column, low, middle, high))
        )
        split(o, heads, query, sums, integers)
        # block: rows in order. g: query heads, which find the block in the first-level cache.
        for block in range((rows.last - rows.first + KEY_BLOCK - 1) // KEY_BLOCK):
            for g in range(group):
                count: T.let = T.min(rows.last - rows.first - block * KEY_BLOCK, KEY_BLOCK)
                start: T.let = rows.first + block * KEY_BLOCK
                add_block(o, Step(heads, rows, g, start, count), Block(weights, stat), query, sums, values)

    return AttendRows(AHEAD, attend, place, 4)
