"""Table factor of an activation, bit for bit as fastcar_compile.ops.activations defines it."""

# The annotations of a T.prim_func are calls, which TVMScript evaluates.
# pyright: reportInvalidTypeForm=false

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm.script import tirx as T
from tvm.tirx import PrimFunc

from fastcar_compile.codegen.tvm.isa import PORTABLE, InstructionSet
from fastcar_compile.codegen.tvm.kernels import script
from fastcar_compile.codegen.tvm.kernels.script import inlined, kernel
from fastcar_compile.codegen.tvm.kernels.simd.vectors import Expr, broadcast, intrinsic, ramp
from fastcar_compile.ops.activations import FACTORS, INPUT_STEPS, KNOTS

TABLE_LANES = 16
"""Elements whose integer steps are vectorised. Only the table is read one element at a time."""


def fixed_input(x: Any, activation: str) -> Any:
    """Return u of the definition: x as an int32 in 1/64 of the table's step, from 0."""
    kind = FACTORS[activation]
    # T.min gives its second operand for a NaN: the factor is that of the limit, and x * factor is NaN by x.
    clamped = T.max(T.min(x, T.float32(kind.limit)), T.float32(-kind.limit))
    # The scale is a power of two, so its product is exact and only nearbyint rounds.
    return T.Cast("int32", T.nearbyint(clamped * T.float32(kind.input_scale))) + INPUT_STEPS


def _knot(u: Any) -> Any:
    # i of the definition: the table entry at or before u.
    # The last interval takes the upper limit too, where u has no next entry.
    return T.min(T.shift_right(u, 6), KNOTS - 2)


def blend(low: Any, high: Any, u: Any) -> Any:
    """Return the factor between two neighbouring entries. The integer sum is rounded once, half up."""
    # f is 0 to 64. It is 64 at the upper limit only.
    f = u - T.shift_left(_knot(u), 6)
    # A factor is at most 2^24, so the weighted sum stays below 2^31.
    return T.Cast("float32", T.shift_right(low * (64 - f) + high * f + 32, 6)) * T.float32(2.0**-24)


def table_factor(table: Any, u: Any) -> Any:
    """Return the factor of one element."""
    return blend(table[_knot(u)], table[_knot(u) + 1], u)


def _pairs(table: Any, u: Any, half: int) -> Expr:
    """Return eight entries with the next one beside each: int32x16. AVX-512 gathers them as eight int64."""
    lanes = TABLE_LANES // 2
    at = T.shift_right(u[ramp(half * lanes, lanes)], broadcast(T.int32(6), lanes))
    # A gather of int64 at a scale of 4 bytes: the element at i holds the entries i and i + 1.
    loaded = intrinsic(
        f"int64x{lanes}",
        "llvm.x86.avx512.mask.gather.dpq.512",
        broadcast(T.int64(0), lanes),
        T.address_of(table[0]),
        T.min(at, broadcast(T.int32(KNOTS - 2), lanes)),
        broadcast(T.bool(True), lanes),
        T.int32(4),
    )
    return T.reinterpret(f"int32x{TABLE_LANES}", loaded)


def _every_second(pairs: Any, first: int) -> Expr:
    halves = [pairs[ramp(start, TABLE_LANES)] for start in (0, TABLE_LANES)]
    # Even lanes are the entries at u, odd lanes the next ones.
    return T.Shuffle(halves, list(range(first, 2 * TABLE_LANES, 2)))


@inlined
def _load_knots(table, u, low, high):
    # v: unrolled, one scalar load per entry. The table has 2 KiB and stays in the first-level cache.
    for v in T.unroll(TABLE_LANES):
        low[v] = table[_knot(u[v])]
        high[v] = table[_knot(u[v]) + 1]


@inlined
def _gather_knots(table, u, low, high):
    # Two gathers of eight int64 read 32 entries. With one entry per element they would be two of 16.
    pairs = T.alloc_buffer((2 * TABLE_LANES,), "int32")
    pairs[ramp(0, TABLE_LANES)] = _pairs(table, u, 0)
    pairs[ramp(TABLE_LANES, TABLE_LANES)] = _pairs(table, u, 1)
    low[ramp(0, TABLE_LANES)] = _every_second(pairs, 0)
    high[ramp(0, TABLE_LANES)] = _every_second(pairs, 1)


def read_knots(isa: InstructionSet) -> Callable[..., None]:
    """Return the macro (table, u, low, high): the table entries around u int32 [16]."""
    return _gather_knots if isa.float_lanes == TABLE_LANES else _load_knots


@kernel
def activation_factor(size: int, activation: str, isa: InstructionSet = PORTABLE) -> PrimFunc:
    """Return the factor float32 [size] of x float32 [size] by the activation's table int32 [513]."""
    knots, read = KNOTS, read_knots(isa)

    @script.prim_func(private=True, s_tir=True)
    def factor_table(
        x: T.Buffer((size,), "float32"), table: T.Buffer((knots,), "int32"), y: T.Buffer((size,), "float32")
    ):
        for block in range(size // TABLE_LANES):
            with T.sblock("points"):
                T.reads(x[0:size], table[0:knots])
                T.writes(y[0:size])
                u = T.alloc_buffer((TABLE_LANES,), "int32")
                low = T.alloc_buffer((TABLE_LANES,), "int32")
                high = T.alloc_buffer((TABLE_LANES,), "int32")
                for v in T.vectorized(TABLE_LANES):
                    u[v] = fixed_input(x[block * TABLE_LANES + v], activation)
                read(table, u, low, high)
                for v in T.vectorized(TABLE_LANES):
                    y[block * TABLE_LANES + v] = blend(low[v], high[v], u[v])
        for i in range(size % TABLE_LANES):
            with T.sblock("point"):
                T.reads(x[0:size], table[0:knots])
                T.writes(y[0:size])
                at: T.let = size // TABLE_LANES * TABLE_LANES + i
                w: T.let = fixed_input(x[at], activation)
                y[at] = table_factor(table, w)

    return factor_table
