"""int4 GEMV and GEMM in groups of 128, exact int32 group sums, bit for bit as fastcar_compile.ops.quant defines it."""

from __future__ import annotations

from tvm.script import tirx as T
from tvm.tirx import PrimFunc

from fastcar_compile.lowering.isa import PORTABLE, InstructionSet
from fastcar_compile.lowering.kernels.int4_dot import HALF, INT4_DOTS
from fastcar_compile.lowering.kernels.linear import PARALLEL_ELEMENTS
from fastcar_compile.lowering.kernels.vectors import Expr, fence, gather, lane_total, row, totals4
from fastcar_compile.ops.quant import GROUP

_FLOAT_EXPONENT = 112 << 23
"""Difference of the exponent biases of float32 and float16, in place."""


def tile_of(m: int, n: int) -> tuple[int, int]:
    """Weight rows and activation rows that are multiplied together: eight sums, added up four at a time."""
    columns = 1 if m == 1 else 2 if m < 4 else 4
    return min(8 // columns, n), columns


def float_scales(scales: list[Expr]) -> Expr:
    """float32 vector of float16 scalars, all of them normal: their bits, moved."""
    bits = gather([T.Cast("uint32", T.reinterpret("uint16", scale)) for scale in scales])
    count = len(scales)
    moved = T.shift_left(bits, T.Broadcast(T.uint32(13), count)) + T.Broadcast(T.uint32(_FLOAT_EXPONENT), count)
    return T.reinterpret(f"float32x{count}", moved)


def linear_w4a8(m: int, n: int, k: int, isa: InstructionSet = PORTABLE) -> PrimFunc:
    """Group by group: y = float(sum q * w) * ws, added in ascending order; then times the row's scale.

    q int8 [m, k], s float32 [m], w uint8 [n, 64 * G] (`ops.quant.pack_int4`), ws float16 [n, G], y float32 [m, n].
    Four outputs at a time, in the lanes of one vector. The fence keeps LLVM from contracting a product and the
    addition after it into one rounding. As for w8a8, another kernel adds the bias.
    """
    dot = INT4_DOTS[isa.int8]
    lanes, group = dot.lanes, dot.group
    groups = -(-k // GROUP)
    padded = groups * GROUP
    rows, columns = tile_of(m, n)
    loop = T.parallel if n * k * m >= 2 * PARALLEL_ELEMENTS else T.serial

    def nothing(offset: int, size: int) -> Expr:
        return T.Broadcast(T.uint8(0), size)

    @T.prim_func(private=True, s_tir=True)
    def linear_i4(
        q: T.Buffer((m, k), "int8"),
        s: T.Buffer((m,), "float32"),
        w: T.Buffer((n, groups * HALF), "uint8"),
        ws: T.Buffer((n, groups), "float16"),
        y: T.Buffer((m, n), "float32"),
    ):
        T.func_attr({"tir.noalias": True})
        with T.sblock("root"):
            T.reads(q[0:m, 0:k], s[0:m], w[0:n, 0 : groups * HALF], ws[0:n, 0:groups])
            T.writes(y[0:m, 0:n])
            x = T.alloc_buffer((m, padded), "int8")
            excess = T.alloc_buffer((m, groups), "int32")

            @T.inline
            def quad(total, j, i, g, number, last, cs):
                """Adds group g of outputs 4 * number ..; those beyond the last one repeat it."""
                parts = T.alloc_buffer((4 * lanes,), "int32")
                sums = T.alloc_buffer((4,), "int32")
                for v in T.unroll(4):
                    parts[T.Ramp(v * lanes, 1, lanes)] = group(
                        row(w, [j + T.min(number * 4 + v, last) // cs], g * HALF),
                        row(x, [i + T.min(number * 4 + v, last) % cs], g * GROUP),
                    )
                totals4(sums, 0, parts, [0, 1, 2, 3], lanes)
                total[T.Ramp(number * 4, 1, 4)] = total[T.Ramp(number * 4, 1, 4)] + fence(
                    "float32x4",
                    T.Cast(
                        "float32x4",
                        sums[T.Ramp(0, 1, 4)]
                        - gather([excess[i + T.min(number * 4 + v, last) % cs, g] for v in range(4)]),
                    )
                    * float_scales([ws[j + T.min(number * 4 + v, last) // cs, g] for v in range(4)]),
                )

            @T.inline
            def tile(j, i, rs, cs):
                with T.sblock("tile"):
                    T.reads(
                        x[0:m, 0:padded], s[0:m], w[0:n, 0 : groups * HALF], ws[0:n, 0:groups], excess[0:m, 0:groups]
                    )
                    T.writes(y[0:m, 0:n])
                    total = T.alloc_buffer((-(-rs * cs // 4) * 4,), "float32")
                    for p in T.unroll(-(-rs * cs // 4)):
                        total[T.Ramp(p * 4, 1, 4)] = T.Broadcast(T.float32(0), 4)
                    for g in range(groups):
                        for p in T.unroll(-(-rs * cs // 4)):
                            quad(total, j, i, g, p, rs * cs - 1, cs)
                    for v in T.unroll(rs * cs):
                        y[i + v % cs, j + v // cs] = total[v] * s[i + v % cs]

            @T.inline
            def all_rows(j, rs):
                for io in range(m // columns):
                    tile(j, io * columns, rs, columns)
                if m % columns > 0:
                    tile(j, m // columns * columns, rs, m % columns)

            for i in range(m):
                with T.sblock("padded"):
                    T.reads(q[0:m, 0:k])
                    T.writes(x[0:m, 0:padded], excess[0:m, 0:groups])
                    for t in range(k):
                        x[i, t] = q[i, t]
                    for t in range(padded - k):
                        x[i, k + t] = T.int8(0)
                    for g in range(groups):
                        if dot.unsigned:
                            excess[i, g] = lane_total(group(nothing, row(x, [i], g * GROUP)), lanes)
                        else:
                            excess[i, g] = 0
            for jo in loop(n // rows):
                all_rows(jo * rows, rows)
            if n % rows > 0:
                all_rows(n // rows * rows, n % rows)

    return linear_i4
