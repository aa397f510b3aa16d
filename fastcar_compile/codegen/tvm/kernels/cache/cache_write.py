"""The key/value cache append: rows rounded to the cache's type, as ops/cached.py defines it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm.script import tirx as T
from tvm.tirx import PrimFunc

from fastcar_compile.codegen.tvm.isa import PORTABLE, InstructionSet
from fastcar_compile.codegen.tvm.kernels import OPAQUE
from fastcar_compile.codegen.tvm.kernels.cache.elements import power_of_two
from fastcar_compile.codegen.tvm.kernels.script import kernel
from fastcar_compile.codegen.tvm.kernels.simd.float16 import from_float32
from fastcar_compile.codegen.tvm.kernels.simd.vectors import along, cast, magnitudes, pure, vector_lanes
from fastcar_compile.ops import cached
from fastcar_compile.ops.cached import row_size

Shape = tuple[int, int, int, int]
_INFINITY = 0xFF << 23
"""Bits of a float32."""

_LARGEST = (254 << 23) | (0x7E << 16)
"""Bits of `cached.INT8_MAX`."""


@kernel
def cache_write(cache: Shape, rows: int, dtype: str = "float32", isa: InstructionSet = PORTABLE) -> PrimFunc:
    """In place: cache [B, H, S, D] of `dtype` gets value [B, H, rows, D] from row `position` on.

    Rows beyond S are dropped. D is a head's dimension, whatever the size of a cached row.
    """
    return _append(cache, rows, lambda position: position, dtype, isa)


@kernel
def ring_write(cache: Shape, rows: int, sinks: int, dtype: str = "float32", isa: InstructionSet = PORTABLE) -> PrimFunc:
    """In place: ring cache [B, H, sinks + R, D] gets value [B, H, rows, D] from position `position` on."""

    def row_of(position: Any) -> Any:
        return T.if_then_else(position < sinks, position, sinks + (position - sinks) % (cache[2] - sinks))

    return _append(cache, rows, row_of, dtype, isa)


def _append(cache: Shape, rows: int, row_of: Callable[[Any], Any], dtype: str, isa: InstructionSet) -> PrimFunc:
    """`row_of` gives the cache's row of a position."""
    if dtype == "int8":
        return _append_blocks(cache, rows, row_of)
    b, h, s, d = cache

    @T.prim_func(private=True, s_tir=True)
    def append(
        keys: T.Buffer((b, h, s, d), dtype),
        value: T.Buffer((b, h, rows, d), "float32"),
        position: T.Buffer((1,), "int64"),
    ):
        T.func_attr({"op_pattern": OPAQUE})
        for i, j, r in T.grid(b, h, rows):
            with T.sblock("row"):
                T.reads(value[0:b, 0:h, 0:rows, 0:d], position[0:1])
                T.writes(keys[0:b, 0:h, 0:s, 0:d])
                p: T.let = T.Cast("int32", position[0]) + r
                at: T.let = row_of(p)
                if at < s:
                    for c in T.vectorized(d):
                        keys[i, j, at, c] = from_float32(value[i, j, r, c], dtype, isa)

    return append


def _append_blocks(cache: Shape, rows: int, row_of: Callable[[Any], Any]) -> PrimFunc:
    """int8: the exponent of every block from the bits of its largest magnitude, then the block's mantissas."""
    b, h, s, d = cache
    width, lanes, block = row_size(d, "int8"), vector_lanes(d), cached.BLOCK

    @T.prim_func(private=True, s_tir=True)
    def append_blocks(
        keys: T.Buffer((b, h, s, width), "int8"),
        value: T.Buffer((b, h, rows, d), "float32"),
        position: T.Buffer((1,), "int64"),
    ):
        T.func_attr({"op_pattern": OPAQUE})
        for i, j, r in T.grid(b, h, rows):
            with T.sblock("row"):
                T.reads(value[0:b, 0:h, 0:rows, 0:d], position[0:1])
                T.writes(keys[0:b, 0:h, 0:s, 0:width])
                top = T.alloc_buffer((lanes,), "int32")
                exponent = T.alloc_buffer((1,), "int32")
                inverse = T.alloc_buffer((1,), "float32")
                p: T.let = T.Cast("int32", position[0]) + r
                at: T.let = row_of(p)
                if at < s:
                    for e in range(width - d):
                        for v in T.vectorized(lanes):
                            top[v] = 0
                        for c in range(T.min(block, d - e * block) // lanes):
                            for v in T.vectorized(lanes):
                                top[v] = T.max(top[v], magnitudes(value[i, j, r, e * block + c * lanes + v], 1))
                        if lanes > 1:
                            top[0] = pure("int32", f"llvm.vector.reduce.smax.v{lanes}i32", top[T.Ramp(0, 1, lanes)])
                        exponent[0] = T.max(_exponent(T.min(top[0], _LARGEST)), cached.LEAST_EXPONENT)
                        inverse[0] = T.Select(top[0] > _INFINITY, T.float32(0), power_of_two(-exponent[0]))
                        keys[i, j, at, d + e] = T.Cast(
                            "int8", T.Select(top[0] > _INFINITY, cached.NOT_A_NUMBER, exponent[0])
                        )
                        for c in range(T.min(block, d - e * block) // lanes):
                            keys[i, j, at, along(e * block + c * lanes, lanes)] = cast(
                                "int8",
                                T.nearbyint(_bounded(value[i, j, r, along(e * block + c * lanes, lanes)]) * inverse[0]),
                                lanes,
                            )

    return append_blocks


def _exponent(bits: Any) -> Any:
    """Of the least scale with which a float32 of these bits rounds to at most 127."""
    return T.shift_right(bits + T.int32(cached.ROUNDS_UP), T.int32(cached.MANTISSA_BITS)) - T.int32(cached.EXCESS)


def _bounded(value: Any) -> Any:
    """Within what an int8 cache keeps; T.min gives its second operand where the first is a NaN."""
    return T.max(T.min(value, T.float32(cached.INT8_MAX)), T.float32(-cached.INT8_MAX))
