"""GEMM of a prefill chunk or a large batch with float32 or bfloat16 weights."""

from __future__ import annotations

from tvm.script import tirx as T
from tvm.tirx import PrimFunc

from fastcar_compile.codegen.tvm.isa import PORTABLE, InstructionSet
from fastcar_compile.codegen.tvm.kernels import OPAQUE
from fastcar_compile.codegen.tvm.kernels.linear.active_rows import LANES, none_seen, note_float32
from fastcar_compile.codegen.tvm.kernels.linear.float_gemv import PARALLEL_WEIGHTS
from fastcar_compile.codegen.tvm.kernels.linear.weight_type import WeightType, widen_weight
from fastcar_compile.codegen.tvm.kernels.script import kernel

TURNED = 16
"""Columns of x that are transposed together: a cache line of each row."""


def tile(m: int, isa: InstructionSet) -> tuple[int, int]:
    """Rows of x and rows of w of one register tile: as many sums as registers hold beside what is loaded.

    Four registers of x by six weights with AVX-512 and NEON (32 registers), two by six otherwise (16). Fewer rows of x
    leave room for twelve weights.
    """
    registers = 4 if isa.float_lanes == 16 or isa.machine == "aarch64" else 2
    largest = registers * isa.float_lanes
    columns = next((c for c in (16, 32) if m <= c < largest), largest)
    return columns, 6 if columns == largest else 12


@kernel
def float_gemm(m: int, n: int, k: int, dtype: WeightType = "float32", isa: InstructionSet = PORTABLE) -> PrimFunc:
    """y[m, n] = sum_k x[m, k] * w[n, k], x and y float32, w float32 or bfloat16.

    Rows of x that are zero are not multiplied: the others are moved together. x is transposed once, so that sums run
    along the rows of x: a weight is one broadcast, and no sum across lanes is needed. Each sum is in two buffers, since
    a buffer of 1024 bytes or more would not be kept in registers. Rows beyond the last are computed as copies of it.
    """
    columns, rows = tile(m, isa)
    half = columns // 2
    tiles, blocks = -(-m // columns), -(-n // rows)
    loop = T.parallel if n * k * m >= PARALLEL_WEIGHTS else T.serial

    @T.prim_func(private=True, s_tir=True)
    def linear_tiles(x: T.Buffer((m, k), "float32"), w: T.Buffer((n, k), dtype), y: T.Buffer((m, n), "float32")):
        T.func_attr({"tir.noalias": True, "op_pattern": OPAQUE})
        with T.sblock("product"):
            T.reads(x[0:m, 0:k], w[0:n, 0:k])
            T.writes(y[0:m, 0:n])
            turned = T.alloc_buffer((tiles, k, columns), "float32")
            live = T.alloc_buffer((m,), "int32")
            count = T.alloc_buffer((1,), "int32")
            count[0] = 0
            for i in range(m):
                seen = T.alloc_buffer((LANES,), "uint32")
                note_float32(x, i, k, seen)
                if none_seen(seen):
                    for j in range(n):
                        y[i, j] = T.float32(0)
                else:
                    live[count[0]] = i
                    count[0] += 1
            for piece in loop(-(-k // TURNED)):
                for o, i, c in T.grid((count[0] + columns - 1) // columns, columns, TURNED):
                    if piece * TURNED + c < k:
                        turned[o, piece * TURNED + c, i] = x[
                            live[T.min(o * columns + i, count[0] - 1)], piece * TURNED + c
                        ]
            for j in loop(blocks):
                for o in range((count[0] + columns - 1) // columns):
                    low = T.alloc_buffer((rows * half,), "float32")
                    high = T.alloc_buffer((rows * half,), "float32")
                    for r in T.unroll(rows):
                        for v in T.vectorized(half):
                            low[r * half + v] = T.float32(0)
                            high[r * half + v] = T.float32(0)
                    for c in range(k):
                        for r in T.unroll(rows):
                            for v in T.vectorized(half):
                                low[r * half + v] += turned[o, c, v] * widen_weight(
                                    w[T.min(j * rows + r, n - 1), c], dtype
                                )
                                high[r * half + v] += turned[o, c, half + v] * widen_weight(
                                    w[T.min(j * rows + r, n - 1), c], dtype
                                )
                    for i in range(half):
                        at: T.let = live[T.min(o * columns + i, count[0] - 1)]
                        for r in T.unroll(rows):
                            y[at, T.min(j * rows + r, n - 1)] = low[r * half + i]
                    for i in range(half):
                        at: T.let = live[T.min(o * columns + half + i, count[0] - 1)]
                        for r in T.unroll(rows):
                            y[at, T.min(j * rows + r, n - 1)] = high[r * half + i]

    return linear_tiles
