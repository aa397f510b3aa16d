"""Scores of the gates beside `tas`: one row per batch row, float32 sums in order."""

from __future__ import annotations

from tvm.script import tirx as T
from tvm.tirx import PrimFunc

from fastcar_compile.codegen.tvm.isa import PORTABLE, InstructionSet
from fastcar_compile.codegen.tvm.kernels import OPAQUE
from fastcar_compile.codegen.tvm.kernels.cache.elements import element
from fastcar_compile.codegen.tvm.kernels.script import kernel
from fastcar_compile.ops.cached import row_size
from fastcar_compile.ops.gates import HASH_BITS, HASH_FACTORS, HASH_PRIME, HASH_ROUNDS, TINY

Shape = tuple[int, int, int, int]


@kernel
def tas_heads(
    query: Shape, cache: Shape, stride: int, scale: float, dtype: str = "float32", isa: InstructionSet = PORTABLE
) -> PrimFunc:
    """Sum over every query head times its factor, 0 for a head that is not chosen."""
    b, hq, t, d = query
    hkv, s = cache[1], cache[2]
    group, width = hq // hkv, row_size(d, dtype)

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
                acc = T.alloc_buffer((2,), "float32")
                before: T.let = T.max(T.Cast("int32", position[0]) - stride, 0)
                acc[1] = T.float32(0)
                for h in range(hq):
                    acc[0] = T.float32(0)
                    for c in range(d):
                        acc[0] += q[i, h, 0, c] * element(keys, (i, h // group, before), c, 0, d, dtype, isa)
                    acc[1] += acc[0] * factor[h]
                y[i] = acc[1] * T.float32(scale)

    return weighted_temporal_score


@kernel
def input_delta(rows: int, width: int) -> PrimFunc:
    """||x - cached|| / ||x|| of every row, sums of absolute values."""

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
                acc = T.alloc_buffer((2,), "float32")
                acc[0] = T.float32(0)
                acc[1] = T.float32(0)
                for c in range(width):
                    acc[0] += T.abs(x[i, c] - cached[i, c])
                    acc[1] += T.abs(x[i, c])
                y[i] = acc[0] / T.max(acc[1], T.float32(TINY))

    return relative_change


@kernel
def cosine_distance(
    query: Shape, cache: Shape, stride: int, dtype: str = "float32", isa: InstructionSet = PORTABLE
) -> PrimFunc:
    """sqrt(max(0, 1 - cosine of query and key one frame earlier, mean over query heads)) of every row."""
    b, hq, t, d = query
    hkv, s = cache[1], cache[2]
    group, width = hq // hkv, row_size(d, dtype)

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
                acc = T.alloc_buffer((5,), "float32")
                before: T.let = T.max(T.Cast("int32", position[0]) - stride, 0)
                acc[3] = T.float32(0)
                for h in range(hq):
                    acc[0] = T.float32(0)
                    acc[1] = T.float32(0)
                    acc[2] = T.float32(0)
                    for c in range(d):
                        acc[4] = element(keys, (i, h // group, before), c, 0, d, dtype, isa)
                        acc[0] += q[i, h, 0, c] * acc[4]
                        acc[1] += q[i, h, 0, c] * q[i, h, 0, c]
                        acc[2] += acc[4] * acc[4]
                    acc[3] += acc[0] / T.sqrt(T.max(acc[1] * acc[2], T.float32(TINY)))
                y[i] = T.sqrt(T.max(T.float32(1) - acc[3] / T.float32(hq), T.float32(0)))

    return temporal_distance


@kernel
def random_score(rows: int, layer: int) -> PrimFunc:
    """The hash of (forward, layer, row) as a number in (0, 1]: the integer steps of `ops.gates.random_score`."""
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
                x = T.alloc_buffer((3,), "int64")
                p: T.let = T.int64(HASH_PRIME)
                row: T.let = (T.Cast("int64", i) + T.int64(1)) * T.int64(by_row)
                x[0] = ((step[0] + T.int64(1)) * T.int64(by_step) + row + T.int64(offset)) % p
                x[1] = x[0] * x[0] % p
                x[0] = (x[1] * x[1] % p * x[0] + T.int64(first)) % p
                x[1] = x[0] * x[0] % p
                x[0] = (x[1] * x[1] % p * x[0] + T.int64(second)) % p
                x[1] = x[0] * x[0] % p
                x[0] = (x[1] * x[1] % p * x[0] + T.int64(third)) % p
                y[i] = T.Cast("float32", x[0] // T.int64(low_bits) + T.int64(1)) * T.float32(2.0**-HASH_BITS)

    return hashed_score
