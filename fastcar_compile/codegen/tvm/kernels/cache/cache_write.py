"""The append to a key/value cache: rows rounded to the KV type, bit for bit as ops/cached.py defines it."""

# The annotations of a T.prim_func are calls, which TVMScript evaluates.
# pyright: reportInvalidTypeForm=false

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm.script import tirx as T
from tvm.tirx import PrimFunc

from fastcar_compile.codegen.tvm.isa import PORTABLE, InstructionSet
from fastcar_compile.codegen.tvm.kernels import OPAQUE, HeadShape, script
from fastcar_compile.codegen.tvm.kernels.cache.elements import power_of_two
from fastcar_compile.codegen.tvm.kernels.script import inlined, kernel
from fastcar_compile.codegen.tvm.kernels.simd.float16 import from_float32
from fastcar_compile.codegen.tvm.kernels.simd.vectors import (
    Expr,
    cast,
    intrinsic,
    magnitude_bits,
    ramp,
    vector,
    vector_lanes,
)
from fastcar_compile.ops import cached
from fastcar_compile.ops.cached import row_size

_INFINITY = 0xFF << 23
"""Bits of a float32."""

PARALLEL_VALUES = 1 << 15
"""Values from which a second thread pays for launching and awaiting a parallel region."""

_LARGEST = (254 << 23) | (0x7E << 16)
"""Bits of `cached.INT8_MAX`."""


@kernel
def cache_write(cache: HeadShape, rows: int, dtype: str = "float32", isa: InstructionSet = PORTABLE) -> PrimFunc:
    """Write value float32 [B, H, rows, D] to cache [B, H, S, D] of `dtype` from row `position` on, in place.

    Rows beyond S are dropped.
    """
    return _append(cache, rows, lambda position: position, dtype, isa)


@kernel
def ring_write(
    cache: HeadShape, rows: int, sinks: int, dtype: str = "float32", isa: InstructionSet = PORTABLE
) -> PrimFunc:
    """Write value float32 [B, H, rows, D] to the ring cache [B, H, sinks + R, D] from `position` on, in place."""

    def row_of(position: Expr) -> Expr:
        # Sinks keep their rows. A later position wraps around the ring behind them.
        return T.if_then_else(position < sinks, position, sinks + (position - sinks) % (cache[2] - sinks))

    return _append(cache, rows, row_of, dtype, isa)


def _append(cache: HeadShape, rows: int, row_of: Callable[[Expr], Expr], dtype: str, isa: InstructionSet) -> PrimFunc:
    """Return the kernel. `row_of` gives the cache's row of a position."""
    if dtype == "int8":
        return _append_blocks(cache, rows, row_of)
    b, h, s, d = cache
    loop = _loop(cache, rows)

    @script.prim_func(private=True, s_tir=True)
    def append(
        keys: T.Buffer((b, h, s, d), dtype),
        value: T.Buffer((b, h, rows, d), "float32"),
        position: T.Buffer((1,), "int64"),
    ):
        T.func_attr({"op_pattern": OPAQUE})
        # head: batch rows times key/value heads. r: appended rows. c: one row, vectorised along D.
        for head in loop(b * h):
            for r in range(rows):
                with T.sblock("row"):
                    T.reads(value[0:b, 0:h, 0:rows, 0:d], position[0:1])
                    T.writes(keys[0:b, 0:h, 0:s, 0:d])
                    i: T.let = head // h
                    j: T.let = head % h
                    p: T.let = T.Cast("int32", position[0]) + r
                    at: T.let = row_of(p)
                    # A chunk may reach past the cache. Row S would be row 0 of the next head.
                    if at < s:
                        for c in T.vectorized(d):
                            keys[i, j, at, c] = from_float32(value[i, j, r, c], dtype, isa)

    return append


def _loop(cache: HeadShape, rows: int) -> Any:
    """Return the loop over the heads of all rows of the batch: parallel where a second thread pays."""
    b, h, _, d = cache
    return T.parallel if b * h > 1 and b * h * rows * d >= PARALLEL_VALUES else T.serial


def _append_blocks(cache: HeadShape, rows: int, row_of: Callable[[Expr], Expr]) -> PrimFunc:
    """Return the kernel for int8: per block the exponent from its largest magnitude's bits, then the mantissas."""
    b, h, s, d = cache
    width = row_size(d, "int8")
    write_row, loop = _write_row(d), _loop(cache, rows)

    @script.prim_func(private=True, s_tir=True)
    def append_blocks(
        keys: T.Buffer((b, h, s, width), "int8"),
        value: T.Buffer((b, h, rows, d), "float32"),
        position: T.Buffer((1,), "int64"),
    ):
        T.func_attr({"op_pattern": OPAQUE})
        for head in loop(b * h):
            for r in range(rows):
                with T.sblock("row"):
                    T.reads(value[0:b, 0:h, 0:rows, 0:d], position[0:1])
                    T.writes(keys[0:b, 0:h, 0:s, 0:width])
                    i: T.let = head // h
                    j: T.let = head % h
                    p: T.let = T.Cast("int32", position[0]) + r
                    at: T.let = row_of(p)
                    # Row S would be row 0 of the next head.
                    if at < s:
                        write_row(keys, (i, j, at), value, (i, j, r))

    return append_blocks


def _write_row(d: int) -> Callable[..., None]:
    """Return the macro (keys, index of the cached row, value, index of its row): a row of d elements in int8 blocks."""
    lanes, block = vector_lanes(d), cached.BLOCK

    @inlined
    def largest_magnitude(value, source, e, top):
        # c: vectors of the block, whose magnitudes compare as integers. v: one vector.
        for v in T.vectorized(lanes):
            top[v] = 0
        for c in range(T.min(block, d - e * block) // lanes):
            for v in T.vectorized(lanes):
                top[v] = T.max(top[v], magnitude_bits(value[(*source, e * block + c * lanes + v)], 1))
        # The intrinsic takes a vector. A single lane is the maximum already.
        if lanes > 1:
            top[0] = intrinsic("int32", f"llvm.vector.reduce.smax.v{lanes}i32", top[vector(0, lanes)])

    @inlined
    def write_mantissas(keys, target, value, source, e, inverse):
        # c: vectors of the block. nearbyint rounds half to even, and a ramp keeps it a vector instruction.
        # The inverse is a power of two, so its product is exact and only nearbyint rounds.
        for c in range(T.min(block, d - e * block) // lanes):
            keys[(*target, ramp(e * block + c * lanes, lanes))] = cast(
                "int8",
                T.nearbyint(_bounded(value[(*source, ramp(e * block + c * lanes, lanes))]) * inverse[0]),
                lanes,
            )

    @inlined
    def write_row(keys, target, value, source):
        top = T.alloc_buffer((lanes,), "int32")
        exponent = T.alloc_buffer((1,), "int32")
        inverse = T.alloc_buffer((1,), "float32")
        # e: blocks of 32 elements. The last one is shorter where 32 does not divide D.
        for e in range(-(-d // block)):
            largest_magnitude(value, source, e, top)
            # The exponent is that of limited magnitudes, because the mantissas are made from limited values.
            exponent[0] = T.max(_exponent(T.min(top[0], _LARGEST)), cached.LEAST_EXPONENT)
            # Above infinity only NaN is left. Its block has mantissas of 0 and the exponent NOT_A_NUMBER.
            inverse[0] = T.Select(top[0] > _INFINITY, T.float32(0), power_of_two(-exponent[0]))
            # Exponents stand behind all D mantissas, so mantissas are whole vectors.
            keys[(*target, d + e)] = T.Cast("int8", T.Select(top[0] > _INFINITY, cached.NOT_A_NUMBER, exponent[0]))
            write_mantissas(keys, target, value, source, e, inverse)

    return write_row


def _exponent(bits: Expr) -> Expr:
    """Return the exponent of the least scale with which a float32 of these bits rounds to at most 127."""
    # The addition carries into the exponent field just where a mantissa of 127.5 or more would round to 128.
    return T.shift_right(bits + T.int32(cached.rounds_up(cached.CACHE_BITS)), T.int32(cached.MANTISSA_BITS)) - T.int32(
        cached.excess(cached.CACHE_BITS)
    )


def _bounded(value: Expr) -> Expr:
    """Return the value within what an int8 cache keeps. T.min gives its second operand where the first is a NaN."""
    return T.max(T.min(value, T.float32(cached.INT8_MAX)), T.float32(-cached.INT8_MAX))
