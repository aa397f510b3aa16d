"""Scores of the gates beside `tas`: float32 [B], sums in the order of the elements."""

# The annotations of a T.prim_func are calls, which TVMScript evaluates.
# pyright: reportInvalidTypeForm=false

from __future__ import annotations

from tvm.script import tirx as T
from tvm.tirx import PrimFunc

from fastcar_compile.codegen.tvm.isa import PORTABLE, InstructionSet
from fastcar_compile.codegen.tvm.kernels import OPAQUE, HeadShape
from fastcar_compile.codegen.tvm.kernels.cache.elements import RowFormat, row_at
from fastcar_compile.codegen.tvm.kernels.script import inlined, kernel
from fastcar_compile.ops.gates import HASH_BITS, HASH_FACTORS, HASH_PRIME, HASH_ROUNDS, TINY


@kernel
def tas_heads(
    query: HeadShape,
    cache: HeadShape,
    stride: int,
    scale: float,
    dtype: str = "float32",
    isa: InstructionSet = PORTABLE,
) -> PrimFunc:
    """Return the sum over query heads of factor[head] * scale * <query, key at position - stride>.

    The factor of a head that does not count is 0. Shapes are as for `tas`.
    """
    b, hq, t, d = query
    hkv, s = cache[1], cache[2]
    group, keys_of = hq // hkv, RowFormat(d, dtype, isa)
    width = keys_of.size

    @T.prim_func(private=True, s_tir=True)
    def weighted_temporal_score(
        q: T.Buffer((b, hq, t, d), "float32"),
        keys: T.Buffer((b, hkv, s, width), dtype),
        position: T.Buffer((1,), "int64"),
        factor: T.Buffer((hq,), "float32"),
        y: T.Buffer((b,), "float32"),
    ):
        T.func_attr({"tir.noalias": True, "op_pattern": OPAQUE})
        for i in range(b):
            with T.sblock("row"):
                T.reads(q[0:b, 0:hq, 0:t, 0:d], keys[0:b, 0:hkv, 0:s, 0:width], position[0:1], factor[0:hq])
                T.writes(y[0:b])
                sums = T.alloc_buffer((2,), "float32")  # of one head, and of all heads
                before: T.let = T.max(T.Cast("int32", position[0]) - stride, 0)
                sums[1] = T.float32(0)
                for h in range(hq):
                    sums[0] = T.float32(0)
                    for c in range(d):
                        sums[0] += q[i, h, 0, c] * keys_of.element(row_at(keys, i, h // group, before), c, 0)
                    sums[1] += sums[0] * factor[h]
                y[i] = sums[1] * T.float32(scale)

    return weighted_temporal_score


@kernel
def input_delta(rows: int, width: int) -> PrimFunc:
    """Return ||x - cached|| / ||x|| of every row in the 1-norm, x and cached float32 [B, H]."""

    @T.prim_func(private=True, s_tir=True)
    def relative_change(
        x: T.Buffer((rows, width), "float32"),
        cached: T.Buffer((rows, width), "float32"),
        y: T.Buffer((rows,), "float32"),
    ):
        T.func_attr({"tir.noalias": True, "op_pattern": OPAQUE})
        for i in range(rows):
            with T.sblock("row"):
                T.reads(x[0:rows, 0:width], cached[0:rows, 0:width])
                T.writes(y[0:rows])
                change = T.alloc_buffer((1,), "float32")
                norm = T.alloc_buffer((1,), "float32")
                change[0] = T.float32(0)
                norm[0] = T.float32(0)
                for c in range(width):
                    change[0] += T.abs(x[i, c] - cached[i, c])
                    norm[0] += T.abs(x[i, c])
                y[i] = change[0] / T.max(norm[0], T.float32(TINY))

    return relative_change


@kernel
def cosine_distance(
    query: HeadShape, cache: HeadShape, stride: int, dtype: str = "float32", isa: InstructionSet = PORTABLE
) -> PrimFunc:
    """Return sqrt(max(0, 1 - the mean over query heads of cos(query, key at position - stride))) of every row."""
    b, hq, t, d = query
    hkv, s = cache[1], cache[2]
    group, keys_of = hq // hkv, RowFormat(d, dtype, isa)
    width = keys_of.size

    @T.prim_func(private=True, s_tir=True)
    def temporal_distance(
        q: T.Buffer((b, hq, t, d), "float32"),
        keys: T.Buffer((b, hkv, s, width), dtype),
        position: T.Buffer((1,), "int64"),
        y: T.Buffer((b,), "float32"),
    ):
        T.func_attr({"tir.noalias": True, "op_pattern": OPAQUE})
        for i in range(b):
            with T.sblock("row"):
                T.reads(q[0:b, 0:hq, 0:t, 0:d], keys[0:b, 0:hkv, 0:s, 0:width], position[0:1])
                T.writes(y[0:b])
                # <q, k>, <q, q> and <k, k> of one head, the sum of the cosines, an element of k
                acc = T.alloc_buffer((5,), "float32")
                before: T.let = T.max(T.Cast("int32", position[0]) - stride, 0)
                acc[3] = T.float32(0)
                for h in range(hq):
                    acc[0] = T.float32(0)
                    acc[1] = T.float32(0)
                    acc[2] = T.float32(0)
                    for c in range(d):
                        acc[4] = keys_of.element(row_at(keys, i, h // group, before), c, 0)
                        acc[0] += q[i, h, 0, c] * acc[4]
                        acc[1] += q[i, h, 0, c] * q[i, h, 0, c]
                        acc[2] += acc[4] * acc[4]
                    acc[3] += acc[0] / T.sqrt(T.max(acc[1] * acc[2], T.float32(TINY)))
                y[i] = T.sqrt(T.max(T.float32(1) - acc[3] / T.float32(hq), T.float32(0)))

    return temporal_distance


@inlined
def _hash_round(x, p, added):
    """Write x[0]^5 + added modulo p to x[0]."""
    x[1] = x[0] * x[0] % p
    x[0] = (x[1] * x[1] % p * x[0] + T.int64(added)) % p


@kernel
def random_score(rows: int, layer: int) -> PrimFunc:
    """Return the hash of (step, layer, row) as a number in (0, 1], by the integer steps of `ops.gates.random_score`."""
    by_step, by_row, by_layer = HASH_FACTORS
    first, second, third = HASH_ROUNDS
    offset = (layer + 1) * by_layer
    low_bits = 2 ** (31 - HASH_BITS)

    @T.prim_func(private=True, s_tir=True)
    def hashed_score(step: T.Buffer((1,), "int64"), y: T.Buffer((rows,), "float32")):
        T.func_attr({"op_pattern": OPAQUE})
        for i in range(rows):
            with T.sblock("row"):
                T.reads(step[0:1])
                T.writes(y[0:rows])
                x = T.alloc_buffer((2,), "int64")
                p: T.let = T.int64(HASH_PRIME)
                row: T.let = (T.Cast("int64", i) + T.int64(1)) * T.int64(by_row)
                x[0] = ((step[0] + T.int64(1)) * T.int64(by_step) + row + T.int64(offset)) % p
                _hash_round(x, p, first)
                _hash_round(x, p, second)
                _hash_round(x, p, third)
                y[i] = T.Cast("float32", x[0] // T.int64(low_bits) + T.int64(1)) * T.float32(2.0**-HASH_BITS)

    return hashed_score
