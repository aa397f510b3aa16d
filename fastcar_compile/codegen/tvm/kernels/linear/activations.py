"""Dynamic int8 quantisation of activation rows, bit for bit as fastcar_compile.ir.ops.linear defines it."""

from collections.abc import Callable
from typing import Any

import numpy as np
from tvm.script import tirx as T
from tvm.tirx import PrimFunc

from fastcar_compile.codegen.tvm.isa import PORTABLE, InstructionSet
from fastcar_compile.codegen.tvm.kernels import script
from fastcar_compile.codegen.tvm.kernels.linear.tiles import SCAN_LANES, is_zero, or_float32
from fastcar_compile.codegen.tvm.kernels.vectors import Expr, broadcast, intrinsic, ramp
from fastcar_compile.ir.ops.linear import FACTORS, INPUT_STEPS, KNOTS

TINY = 1e-30
INV_127 = float(np.float32(1.0) / np.float32(127.0))
MAX_LANES = 32
"""Independent maxima of a row."""

PARALLEL_ROW_ELEMENTS = 1 << 15
"""Elements of several rows from which a second thread pays for launching and awaiting a parallel region."""


def row_loop(m: int, k: int) -> Any:
    """Return the loop over m rows of k elements: parallel where a second thread pays."""
    return T.parallel if m > 1 and m * k >= PARALLEL_ROW_ELEMENTS else T.serial


def _quantized(x: Any, inverse: Any) -> Any:
    # Rounded half to even, then clamped: -128 is never used.
    return T.Cast("int8", T.max(T.min(T.nearbyint(x * inverse), T.float32(127.0)), T.float32(-127.0)))


@script.inlined
def quantize_row(x, at, q, s, i, k):
    """Quantise row `at` of x float32 [., k] to row i of q int8 [m, k] and s[i].

    The maximum is taken in lanes, because a maximum is exact in any order.
    """
    largest = T.alloc_buffer((MAX_LANES,), "float32")
    inverse = T.alloc_buffer((1,), "float32")
    # TINY is the floor of a maximum, so that a row of zeros has a finite inverse.
    for v in T.vectorized(MAX_LANES):
        largest[v] = T.float32(TINY)
    # c: vectors of 32 along the row. 32 maxima stay in registers.
    for c in range(k // MAX_LANES):
        for v in T.vectorized(MAX_LANES):
            largest[v] = T.max(largest[v], T.fabs(x[at, c * MAX_LANES + v]))
    for t in range(k % MAX_LANES):
        largest[0] = T.max(largest[0], T.fabs(x[at, k // MAX_LANES * MAX_LANES + t]))
    for v in range(1, MAX_LANES):
        largest[0] = T.max(largest[0], largest[v])
    # A true division: the reciprocal times 127 would round twice.
    inverse[0] = T.float32(127.0) / largest[0]
    # The definition multiplies by the rounded 1 / 127.
    s[i] = largest[0] * T.float32(INV_127)
    # A plain loop, which LLVM vectorises. TVM would scalarise a T.vectorized one because of T.nearbyint.
    for c in range(k):
        q[i, c] = _quantized(x[at, c], inverse[0])


@script.kernel
def quantize_rows(m: int, k: int) -> PrimFunc:
    """Return q int8 [m, k] and scale float32 [m] of x float32 [m, k], symmetric per row.

    No product feeds an addition, so LLVM can contract nothing.
    """
    loop = row_loop(m, k)

    @script.prim_func(private=True, s_tir=True)
    def quantize_rows_i8(x: T.Buffer((m, k), "float32"), q: T.Buffer((m, k), "int8"), s: T.Buffer((m,), "float32")):
        for i in loop(m):
            with T.sblock("row"):
                script.access([x], [q, s])
                quantize_row(x, i, q, s, i, k)

    return quantize_rows_i8


# Table factor of an activation, bit for bit as fastcar_compile.ir.ops.linear defines it.


TABLE_LANES = 16
"""Elements whose integer steps are vectorised. Only the table is read one element at a time."""

LOOKUP_COST = 4
"""The time of an element that is looked up, of one that is only quantised."""


def fixed_input(x: Any, activation: str) -> Any:
    """Return u of the definition: x as an int32 in 1/64 of the table's step, from 0."""
    kind = FACTORS[activation]
    # T.min gives its second operand for a NaN: the factor is that of the limit, and x * factor is NaN by x.
    clamped = T.max(T.min(x, T.float32(kind.limit)), T.float32(-kind.limit))
    # The scale is a power of two, so its product is exact and only nearbyint rounds.
    return T.Cast("int32", T.nearbyint(clamped * T.float32(kind.input_scale))) + INPUT_STEPS


def _knot(u: Any, lanes: int = 1) -> Any:
    # i of the definition: the table entry at or before u.
    # The last interval takes the upper limit too, where u has no next entry.
    return T.min(T.shift_right(u, broadcast(T.int32(6), lanes)), broadcast(T.int32(KNOTS - 2), lanes))


def blend(low: Any, high: Any, u: Any) -> Any:
    """Return the factor between two neighbouring entries. The integer sum is rounded once, half up."""
    # f is 0 to 64. It is 64 at the upper limit only.
    f = u - T.shift_left(_knot(u), 6)
    # A factor is at most 2^24, so the weighted sum stays below 2^31.
    return T.Cast("float32", T.shift_right(low * (64 - f) + high * f + 32, 6)) * T.float32(2.0**-24)


def table_factor(table: Any, u: Any) -> Any:
    """Return the factor of one element."""
    return blend(table[_knot(u)], table[_knot(u) + 1], u)


def _pairs(knot: Callable[..., Expr], table: Any, u: Any, first: Expr) -> Expr:
    """Return eight entries with the next one beside each: int32x16. AVX-512 gathers them as eight int64."""
    lanes = TABLE_LANES // 2
    # A gather of int64 at a scale of 4 bytes: the element at i holds the entries i and i + 1.
    loaded = intrinsic(
        f"int64x{lanes}",
        "llvm.x86.avx512.mask.gather.dpq.512",
        broadcast(T.int64(0), lanes),
        T.address_of(table[0]),
        knot(u[ramp(first, lanes)], lanes),
        broadcast(T.bool(True), lanes),
        T.int32(4),
    )
    return T.reinterpret(f"int32x{TABLE_LANES}", loaded)


def _every_second(pairs: Any, first: int) -> Expr:
    halves = [pairs[ramp(start, TABLE_LANES)] for start in (0, TABLE_LANES)]
    # Even lanes are the entries at u, odd lanes the next ones.
    return T.Shuffle(halves, list(range(first, 2 * TABLE_LANES, 2)))


@script.inlined
def _load_knots(table, u, low, high, knot=_knot, first=0):
    # v: unrolled, one load per two entries. The table has 2 KiB and stays in the first-level cache.
    pairs = T.alloc_buffer((2 * TABLE_LANES,), "int32")
    for v in T.unroll(TABLE_LANES):
        pairs[ramp(2 * v, 2)] = table[ramp(knot(u[first + v]), 2)]
    low[ramp(0, TABLE_LANES)] = _every_second(pairs, 0)
    high[ramp(0, TABLE_LANES)] = _every_second(pairs, 1)


@script.inlined
def _gather_knots(table, u, low, high, knot=_knot, first=0):
    # Two gathers of eight int64 read 32 entries. With one entry per element they would be two of 16.
    pairs = T.alloc_buffer((2 * TABLE_LANES,), "int32")
    pairs[ramp(0, TABLE_LANES)] = _pairs(knot, table, u, first)
    pairs[ramp(TABLE_LANES, TABLE_LANES)] = _pairs(knot, table, u, first + TABLE_LANES // 2)
    low[ramp(0, TABLE_LANES)] = _every_second(pairs, 0)
    high[ramp(0, TABLE_LANES)] = _every_second(pairs, 1)


def read_knots(isa: InstructionSet) -> Callable[..., None]:
    """Return the macro (table, u, low, high, knot, first): the table entries around 16 of u, knot(u) and the next one.

    u int32 from element `first` on; low and high int32 [16].
    """
    return _gather_knots if isa.float_lanes == TABLE_LANES else _load_knots


@script.kernel
def activation_factor(size: int, activation: str, isa: InstructionSet = PORTABLE) -> PrimFunc:
    """Return the factor float32 [size] of x float32 [size] by the activation's table int32 [513]."""
    knots, read = KNOTS, read_knots(isa)

    @script.prim_func(private=True, s_tir=True)
    def factor_table(
        x: T.Buffer((size,), "float32"), table: T.Buffer((knots,), "int32"), y: T.Buffer((size,), "float32")
    ):
        for block in range(size // TABLE_LANES):
            with T.sblock("points"):
                script.access([x, table], [y])
                u, low, high = script.buffers(3, TABLE_LANES, "int32")
                for v in T.vectorized(TABLE_LANES):
                    u[v] = fixed_input(x[block * TABLE_LANES + v], activation)
                read(table, u, low, high)
                for v in T.vectorized(TABLE_LANES):
                    y[block * TABLE_LANES + v] = blend(low[v], high[v], u[v])
        for i in range(size % TABLE_LANES):
            with T.sblock("point"):
                script.access([x, table], [y])
                at: T.let = size // TABLE_LANES * TABLE_LANES + i
                w: T.let = fixed_input(x[at], activation)
                y[at] = table_factor(table, w)

    return factor_table


# Activation, product with `up` and dynamic int8 quantisation of an MLP's inner rows, in one kernel.
#
# Bit for bit what the three operators give one after the other: no sum could be reordered, and no float32 product
# feeds an addition.


@script.inlined
def multiply_row(g, up, table, a, i, k, activation, read):
    """Write the products of row i of g and up float32 [m, k] to a float32 [1, k]."""
    steps = T.meta_var(k // TABLE_LANES)
    u, low, high = script.buffers(3, TABLE_LANES, "int32")
    # c: vectors along the row. v: vectorised, but for the reads of the table.
    for c in range(steps):
        for v in T.vectorized(TABLE_LANES):
            u[v] = fixed_input(g[i, c * TABLE_LANES + v], activation)
        read(table, u, low, high)
        # Both products are rounded in the order of the three operators that this kernel replaces.
        for v in T.vectorized(TABLE_LANES):
            a[0, c * TABLE_LANES + v] = (g[i, c * TABLE_LANES + v] * blend(low[v], high[v], u[v])) * up[
                i, c * TABLE_LANES + v
            ]
    for t in range(k % TABLE_LANES):
        at: T.let = steps * TABLE_LANES + t
        w: T.let = fixed_input(g[i, at], activation)
        a[0, at] = (g[i, at] * table_factor(table, w)) * up[i, at]


@script.inlined
def _activate_row(g, up, table, q, s, i, k, activation, read):
    """Write row i of the results."""
    # a: the row of products, which quantize_row reads twice: for its maximum and for its integers.
    a = T.alloc_buffer((1, k), "float32")
    multiply_row(g, up, table, a, i, k, activation, read)
    quantize_row(a, 0, q, s, i, k)


@script.kernel
def activate_quantize(m: int, k: int, activation: str, isa: InstructionSet = PORTABLE) -> PrimFunc:
    """Return q int8 [m, k] and scale float32 [m] of gate * factor(gate) * up, gate and up float32 [m, k].

    The factor is read from table int32 [513]. Rows of zeros, which are inactive, are not looked up.
    """
    knots, loop, read = KNOTS, row_loop(m, LOOKUP_COST * k), read_knots(isa)

    @script.prim_func(private=True, s_tir=True)
    def activate_quantize_i8(
        g: T.Buffer((m, k), "float32"),
        up: T.Buffer((m, k), "float32"),
        table: T.Buffer((knots,), "int32"),
        q: T.Buffer((m, k), "int8"),
        s: T.Buffer((m,), "float32"),
    ):
        for i in loop(m):
            with T.sblock("row"):
                script.access([g, up, table], [q, s])
                # A single row is computed without a search for zeros.
                if m > 1:
                    bits = T.alloc_buffer((SCAN_LANES,), "uint32")
                    or_float32(g, i, k, bits)
                    if is_zero(bits):
                        or_float32(up, i, k, bits)  # 0 times infinity is no number
                    if is_zero(bits):
                        for c in range(k):
                            q[i, c] = T.int8(0)
                        s[i] = T.float32(TINY) * T.float32(INV_127)
                    else:
                        _activate_row(g, up, table, q, s, i, k, activation, read)
                else:
                    _activate_row(g, up, table, q, s, i, k, activation, read)

    return activate_quantize_i8
