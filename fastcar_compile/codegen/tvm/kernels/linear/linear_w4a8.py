"""int4 GEMV and GEMM in groups of 128, exact int32 group sums, bit for bit as fastcar_compile.ops.quant defines it."""

from __future__ import annotations

from functools import partial

from tvm.script import tirx as T
from tvm.tirx import PrimFunc

from fastcar_compile.codegen.tvm.isa import PORTABLE, InstructionSet
from fastcar_compile.codegen.tvm.kernels.linear.active_rows import LANES, in_tiles, none_seen, note_int8
from fastcar_compile.codegen.tvm.kernels.linear.float_gemv import PARALLEL_WEIGHTS
from fastcar_compile.codegen.tvm.kernels.linear.int4_dot import HALF, INT4_DOTS
from fastcar_compile.codegen.tvm.kernels.linear.int4_tiles import tile_for, tile_of
from fastcar_compile.codegen.tvm.kernels.script import kernel
from fastcar_compile.codegen.tvm.kernels.simd.vectors import Expr, lane_total, row
from fastcar_compile.ops.quant import GROUP


@kernel
def linear_w4a8(m: int, n: int, k: int, isa: InstructionSet = PORTABLE) -> PrimFunc:
    """Group by group: y = float(sum q * w) * ws, added in ascending order; then times the row's scale.

    q int8 [m, k], s float32 [m], w uint8 [n, 64 * G] (`ops.quant.pack_int4`), ws float16 [n, G], y float32 [m, n].
    Rows of q that are zero are not multiplied. As for w8a8, another kernel adds the bias.
    """
    dot = INT4_DOTS[isa.int8]
    lanes, group = dot.lanes, dot.group
    groups = -(-k // GROUP)
    padded, packed = groups * GROUP, groups * HALF
    rows, columns = tile_of(m, n, k, dot)
    tile = tile_for(m, n, k, isa)
    scanned = k if m > 1 else 0
    loop = T.parallel if n * k * m >= 2 * PARALLEL_WEIGHTS else T.serial

    def nothing(offset: int, size: int) -> Expr:
        return T.Broadcast(T.uint8(0), size)

    @T.prim_func(private=True, s_tir=True)
    def linear_i4(
        q: T.Buffer((m, k), "int8"),
        s: T.Buffer((m,), "float32"),
        w: T.Buffer((n, packed), "uint8"),
        ws: T.Buffer((n, groups), "float16"),
        y: T.Buffer((m, n), "float32"),
    ):
        T.func_attr({"tir.noalias": True})
        with T.sblock("root"):
            T.reads(q[0:m, 0:k], s[0:m], w[0:n, 0:packed], ws[0:n, 0:groups])
            T.writes(y[0:m, 0:n])
            x = T.alloc_buffer((m, padded), "int8")
            excess = T.alloc_buffer((m, groups), "int32")

            live = T.alloc_buffer((m,), "int32")
            count = T.alloc_buffer((1,), "int32")

            count[0] = 0
            for i in range(m):
                with T.sblock("row"):
                    T.reads(q[0:m, 0:k], s[0:m], count[0])
                    T.writes(x[0:m, 0:padded], excess[0:m, 0:groups], live[0:m], count[0], y[0:m, 0:n])
                    seen = T.alloc_buffer((LANES,), "uint32")
                    note_int8(q, i, scanned, seen)
                    if scanned > 0 and none_seen(seen):
                        for j in range(n):
                            y[i, j] = T.float32(0) * s[i]
                    else:
                        for t in range(k):
                            x[count[0], t] = q[i, t]
                        for t in range(padded - k):
                            x[count[0], k + t] = T.int8(0)
                        for g in range(groups):
                            if dot.unsigned:
                                excess[count[0], g] = lane_total(group(nothing, row(x, [count[0]], g * GROUP)), lanes)
                            else:
                                excess[count[0], g] = 0
                        live[count[0]] = i
                        count[0] += 1
            in_tiles(loop, partial(tile, x, s, w, ws, y, excess, live), n, rows, count[0], columns)

    return linear_i4
