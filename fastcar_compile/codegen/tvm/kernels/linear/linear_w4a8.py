"""int4 GEMV and GEMM in groups of 128, exact int32 group sums, bit for bit as fastcar_compile.ops.quant defines it."""

# The annotations of a T.prim_func are calls, which TVMScript evaluates.
# pyright: reportInvalidTypeForm=false

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tvm.script import tirx as T
from tvm.tirx import PrimFunc

from fastcar_compile.codegen.tvm.isa import PORTABLE, InstructionSet
from fastcar_compile.codegen.tvm.kernels import script
from fastcar_compile.codegen.tvm.kernels.linear.active_rows import (
    SCAN_LANES,
    ActiveRows,
    Tiling,
    append_active,
    for_tiles,
    is_zero,
    or_int8,
)
from fastcar_compile.codegen.tvm.kernels.linear.float_gemv import PARALLEL_WEIGHTS
from fastcar_compile.codegen.tvm.kernels.linear.int4_dot import HALF, INT4_DOTS, Int4Dot
from fastcar_compile.codegen.tvm.kernels.linear.int4_tiles import Int4Operands, Int4Sizes, tile_macro, tile_shape
from fastcar_compile.codegen.tvm.kernels.script import inlined, kernel
from fastcar_compile.codegen.tvm.kernels.simd.vectors import Expr, load_from, reduce_add
from fastcar_compile.ops.quant import GROUP


@kernel
def linear_w4a8(m: int, n: int, k: int, isa: InstructionSet = PORTABLE) -> PrimFunc:
    """Return y[m, n] = s[m] * sum_g float(sum_k q[m, k] * w[n, k]) * ws[n, g], groups g in ascending order.

    q int8 [m, k], s float32 [m], w uint8 [n, 64 G] (`ops.quant.pack_int4`), ws float16 [n, G], y float32 [m, n]. A
    group is 128 inputs, and its sum is exact in int32. Inactive rows are not multiplied. As for w8a8, another kernel
    adds the bias.
    """
    dot = INT4_DOTS[isa.int8]
    groups = -(-k // GROUP)
    padded, packed = groups * GROUP, groups * HALF
    # A single row is multiplied without a search for zeros.
    scanned = k if m > 1 else 0
    tiling = Tiling(n, *tile_shape(m, n, k, dot), T.parallel if n * k * m >= PARALLEL_WEIGHTS else T.serial)
    multiply, move_row = tile_macro(Int4Sizes(m, m, n, k), isa), _move_row(k, dot)

    @script.prim_func(private=True, s_tir=True)
    def linear_i4(
        q: T.Buffer((m, k), "int8"),
        s: T.Buffer((m,), "float32"),
        w: T.Buffer((n, packed), "uint8"),
        ws: T.Buffer((n, groups), "float16"),
        y: T.Buffer((m, n), "float32"),
    ):
        with T.sblock("root"):
            T.reads(q[0:m, 0:k], s[0:m], w[0:n, 0:packed], ws[0:n, 0:groups])
            T.writes(y[0:m, 0:n])
            # x holds the active rows side by side, padded to whole groups, so that no tile has a remainder along k.
            x = T.alloc_buffer((m, padded), "int8")
            correction = T.alloc_buffer((m, groups), "int32")
            active = T.alloc_buffer((m,), "int32")
            count = T.alloc_buffer((1,), "int32")

            count[0] = 0
            # i: rows of q. The next active row of x is number count[0], until append_active counts it.
            for i in range(m):
                with T.sblock("row"):
                    T.reads(q[0:m, 0:k], s[0:m], count[0])
                    T.writes(x[0:m, 0:padded], correction[0:m, 0:groups], active[0:m], count[0], y[0:m, 0:n])
                    bits = T.alloc_buffer((SCAN_LANES,), "uint32")
                    or_int8(q, i, scanned, bits)
                    if scanned > 0 and is_zero(bits):
                        for j in range(n):
                            y[i, j] = T.float32(0) * s[i]
                    else:
                        move_row(q, i, x, count[0], correction)
                        append_active(ActiveRows(active, count), i)
            for_tiles(tiling, multiply, Int4Operands(x, s, w, ws, y, correction, active), count[0])

    return linear_i4


@dataclass(frozen=True)
class Few:
    """How a few active rows of many are multiplied.

    Args:
        most: rows. multiply: the macro (q, operands, count); q int8 [m, k].
    """

    most: int
    multiply: Any

    @classmethod
    def of(cls, rows: int, m: int, n: int, k: int, isa: InstructionSet) -> Few:
        """Return it for up to `rows` rows of x int8 [m, k], and w of n rows."""
        dot = INT4_DOTS[isa.int8]
        tiling = Tiling(n, *tile_shape(rows, n, k, dot), T.parallel if n * k >= PARALLEL_WEIGHTS else T.serial)
        tile, move_row = tile_macro(Int4Sizes(rows, m, n, k), isa), _move_row(k, dot)

        @inlined
        def multiply(q, o, count):
            # Rows are moved first: x has room for `most` rows only.
            for i in range(count):
                move_row(q, o.active[i], o.x, i, o.correction)
            for_tiles(tiling, tile, o, count)

        return cls(rows, multiply)

    @staticmethod
    def operands(*buffers: Any) -> Int4Operands:
        """Return the operands: x [most, 128 G], s, w, ws, y, correction [most, G] and active [m]."""
        return Int4Operands(*buffers)


def _zero_weights(_offset: int, size: int) -> Expr:
    return T.Broadcast(T.uint8(0), size)


def _move_row(k: int, dot: Int4Dot) -> Any:
    """Return the macro (q, i, x, to, correction): row i of q becomes row `to` of x, padded with zeros.

    correction[to, g] becomes what unsigned weights add to the sums of group g, or 0.
    """
    groups = -(-k // GROUP)

    @inlined
    def move_row(q, i, x, to, correction):
        for t in range(k):
            x[to, t] = q[i, t]
        # Zeros up to a whole group add nothing, whatever the weights are.
        for t in range(groups * GROUP - k):
            x[to, k + t] = T.int8(0)
        for g in range(groups):
            if dot.unsigned:
                # The sum over zero weights is what the offset of 8 adds to a group: 8 times the sum of its inputs.
                correction[to, g] = reduce_add(dot.group(_zero_weights, load_from(x, [to], g * GROUP)), dot.lanes)
            else:
                correction[to, g] = 0

    return move_row
