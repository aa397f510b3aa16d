"""GEMM of a prefill chunk or a large batch with float32 or bfloat16 weights."""

# The annotations of a T.prim_func are calls, which TVMScript evaluates.
# pyright: reportInvalidTypeForm=false

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tvm.script import tirx as T
from tvm.tirx import PrimFunc

from fastcar_compile.codegen.tvm.isa import PORTABLE, InstructionSet
from fastcar_compile.codegen.tvm.kernels import OPAQUE, script
from fastcar_compile.codegen.tvm.kernels.linear.active_rows import (
    SCAN_LANES,
    ActiveRows,
    append_active,
    is_zero,
    or_float32,
)
from fastcar_compile.codegen.tvm.kernels.linear.float_gemv import PARALLEL_WEIGHTS
from fastcar_compile.codegen.tvm.kernels.linear.weight_type import WeightType, widen_weight
from fastcar_compile.codegen.tvm.kernels.script import inlined, kernel
from fastcar_compile.codegen.tvm.kernels.simd.vectors import Expr

TRANSPOSED = 16
"""Columns of x that are transposed together: a cache line of each row."""


@dataclass(frozen=True)
class _Operands:
    """xt float32 [tiles, k, columns] (x, transposed in tiles), w [n, k], y float32 [m, n], and the active rows."""

    xt: Any
    w: Any
    y: Any
    active: ActiveRows


def tile_shape(m: int, isa: InstructionSet) -> tuple[int, int]:
    """Return rows of x and rows of w of one register tile: as many sums as registers hold beside what is loaded.

    Four registers of x by six weights with AVX-512 and NEON (32 registers), two by six otherwise (16). Fewer rows of x
    leave room for twelve weights.
    """
    registers = 4 if isa.float_lanes == 16 or isa.machine == "aarch64" else 2
    largest = registers * isa.float_lanes
    columns = next((c for c in (16, 32) if m <= c < largest), largest)
    return columns, 6 if columns == largest else 12


@kernel
def float_gemm(m: int, n: int, k: int, dtype: WeightType = "float32", isa: InstructionSet = PORTABLE) -> PrimFunc:
    """Return y[m, n] = sum_k x[m, k] * w[n, k], x and y float32, w float32 or bfloat16.

    Inactive rows of x are not multiplied. The active rows are transposed once, so that a vector holds one column of
    many rows: a weight is one broadcast, and no sum across lanes is needed. Rows beyond the last are computed as copies
    of it. Parallel over columns of x while it is transposed, then over tiles of weight rows.
    """
    columns, rows = tile_shape(m, isa)
    tiles, blocks = -(-m // columns), -(-n // rows)
    loop = T.parallel if n * k * m >= PARALLEL_WEIGHTS else T.serial
    transpose, multiply = _transpose(k, columns), _multiply(n, k, dtype, (columns, rows))

    @script.prim_func(private=True, s_tir=True)
    def linear_tiles(x: T.Buffer((m, k), "float32"), w: T.Buffer((n, k), dtype), y: T.Buffer((m, n), "float32")):
        T.func_attr({"op_pattern": OPAQUE})
        with T.sblock("product"):
            T.reads(x[0:m, 0:k], w[0:n, 0:k])
            T.writes(y[0:m, 0:n])
            xt = T.alloc_buffer((tiles, k, columns), "float32")
            active = T.alloc_buffer((m,), "int32")
            count = T.alloc_buffer((1,), "int32")
            count[0] = 0
            for i in range(m):
                bits = T.alloc_buffer((SCAN_LANES,), "uint32")
                or_float32(x, i, k, bits)
                if is_zero(bits):
                    for j in range(n):
                        y[i, j] = T.float32(0)
                else:
                    append_active(ActiveRows(active, count), i)
            for piece in loop(-(-k // TRANSPOSED)):
                transpose(x, xt, ActiveRows(active, count), piece)
            for j in loop(blocks):
                for o in range((count[0] + columns - 1) // columns):
                    multiply(_Operands(xt, w, y, ActiveRows(active, count)), j, o)

    return linear_tiles


def _transpose(k: int, columns: int) -> Any:
    @inlined
    def transpose(x, xt, active, piece):
        # o: tiles of active rows. i: rows of a tile. c: columns of one cache line.
        for o, i, c in T.grid((active.count[0] + columns - 1) // columns, columns, TRANSPOSED):
            if piece * TRANSPOSED + c < k:
                xt[o, piece * TRANSPOSED + c, i] = x[
                    active.rows[T.min(o * columns + i, active.count[0] - 1)], piece * TRANSPOSED + c
                ]

    return transpose


def _multiply(n: int, k: int, dtype: WeightType, shape: tuple[int, int]) -> Any:
    """Return the macro (o, j, i): the register tile of weight block j and tile i of active rows."""
    columns, rows = shape
    half = columns // 2

    def weight(o: _Operands, j: Expr, r: Expr, c: Expr) -> Expr:
        return widen_weight(o.w[T.min(j * rows + r, n - 1), c], dtype)

    @inlined
    def store(o, j, acc, first):
        for i in range(half):
            at: T.let = o.active.rows[T.min(first + i, o.active.count[0] - 1)]
            for r in T.unroll(rows):
                o.y[at, T.min(j * rows + r, n - 1)] = acc[r * half + i]

    @inlined
    def multiply(o, j, i):
        # Two buffers: one of all sums has 1024 bytes or more, and TVM would not keep it on the stack.
        low = T.alloc_buffer((rows * half,), "float32")
        high = T.alloc_buffer((rows * half,), "float32")
        for r in T.unroll(rows):
            for v in T.vectorized(half):
                low[r * half + v] = T.float32(0)
                high[r * half + v] = T.float32(0)
        # c: the reduction. r: unrolled, weight rows; low and high are in registers. v: vectors of active rows.
        for c in range(k):
            for r in T.unroll(rows):
                for v in T.vectorized(half):
                    low[r * half + v] += o.xt[i, c, v] * weight(o, j, r, c)
                    high[r * half + v] += o.xt[i, c, half + v] * weight(o, j, r, c)
        store(o, j, low, i * columns)
        store(o, j, high, i * columns + half)

    return multiply
