"""GEMV and small-batch GEMM with float32 or bfloat16 weights: dot products along the reduction."""

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
    TileMacro,
    Tiling,
    append_active,
    for_tiles,
    is_zero,
    or_float32,
)
from fastcar_compile.codegen.tvm.kernels.linear.weight_type import WeightType, widen_weight
from fastcar_compile.codegen.tvm.kernels.script import inlined, kernel
from fastcar_compile.codegen.tvm.kernels.simd.vectors import LINE, add_lanes, prefetch, prefetch_distance

ROWS = 4
"""Weight rows read in parallel: independent sums that hide the multiply-add latency, and four memory streams."""

SMALL_BATCH = 8
"""The most rows of x for this kernel. Up to here the arithmetic per weight hides behind the memory."""

PARALLEL_WEIGHTS = 1 << 18
"""Weights from which a second thread pays for launching and awaiting a parallel region, which takes about 3 us. One
thread reads 2^18 int8 weights from the last-level cache in about 10 us."""


@dataclass(frozen=True)
class _Operands:
    """x float32 [m, k], w [n, k], y float32 [m, n], active int32 [m]."""

    x: Any
    w: Any
    y: Any
    active: Any


def _weight_rows(m: int, n: int) -> int:
    # Sums are weight rows times rows of x. The more rows of x there are, the fewer streams fit the registers.
    return min(n, ROWS if m <= 2 else 2 if m < SMALL_BATCH else 1)


@kernel
def float_gemv(m: int, n: int, k: int, dtype: WeightType = "float32", isa: InstructionSet = PORTABLE) -> PrimFunc:
    """Return y[m, n] = sum_k x[m, k] * w[n, k], x and y float32, w float32 or bfloat16, m at most 8.

    While a weight is in a register it meets all rows of x, so weights are streamed once. Where some rows are inactive,
    the others meet the weight one by one while it is in the first-level cache. The order of a row's sum does not depend
    on the other rows. Parallel over weight rows from PARALLEL_WEIGHTS products on.
    """
    # A single row is multiplied without a search for zeros.
    scanned = k if m > 1 else 0
    tiling = Tiling(n, _weight_rows(m, n), m, T.parallel if n * k * m >= PARALLEL_WEIGHTS else T.serial)
    multiply = _multiply(m, n, k, dtype, isa)

    @script.prim_func(private=True, s_tir=True)
    def linear_float(x: T.Buffer((m, k), "float32"), w: T.Buffer((n, k), dtype), y: T.Buffer((m, n), "float32")):
        with T.sblock("root"):
            T.reads(x[0:m, 0:k], w[0:n, 0:k])
            T.writes(y[0:m, 0:n])
            active = T.alloc_buffer((m,), "int32")
            count = T.alloc_buffer((1,), "int32")

            count[0] = 0
            for i in range(m):
                with T.sblock("row"):
                    T.reads(x[0:m, 0:k], count[0])
                    T.writes(active[0:m], count[0], y[0:m, 0:n])
                    bits = T.alloc_buffer((SCAN_LANES,), "uint32")
                    # With `scanned` of 0 nothing is read, and the row counts as active.
                    or_float32(x, i, scanned, bits)
                    if scanned > 0 and is_zero(bits):
                        for j in range(n):
                            y[i, j] = T.float32(0)
                    else:
                        append_active(ActiveRows(active, count), i)
            for_tiles(tiling, multiply, _Operands(x, w, y, active), count[0])

    return linear_float


def _multiply(m: int, n: int, k: int, dtype: WeightType, isa: InstructionSet) -> TileMacro:
    # A single row of x leaves room for two registers of partial sums per output.
    lanes = 2 * isa.float_lanes if m == 1 else max(isa.float_lanes, 8)
    steps, tail = divmod(k, lanes)
    size = 4 if dtype == "float32" else 2
    (rows_ahead, bytes_ahead), lines = prefetch_distance(_weight_rows(m, n), k * size), -(-lanes * size // LINE)

    @inlined
    def prefetch_weights(o, tile, c):
        # r: weight rows. u: cache lines of a step. One of the two distances is 0: that in bytes for several streams,
        # that in rows for a single one.
        for r in T.unroll(tile.rows):
            for u in T.unroll(lines):
                T.evaluate(prefetch(o.w[tile.j + rows_ahead + r, c * lanes + u * (LINE // size) + bytes_ahead // size]))

    @inlined
    def add_products(o, tile, acc):
        # c: steps of `lanes` along k. r, i: unrolled, weight rows and rows of x. v: one vector multiply-add; acc is in
        # registers.
        for c in range(steps):
            prefetch_weights(o, tile, c)
            for r in T.unroll(tile.rows):
                for i in T.unroll(tile.columns):
                    for v in T.vectorized(lanes):
                        acc[(r * tile.columns + i) * lanes + v] += o.x[
                            o.active[tile.i + i], c * lanes + v
                        ] * widen_weight(o.w[tile.j + r, c * lanes + v], dtype)

    @inlined
    def store(o, tile, acc, r, i):
        # The lanes first, then the remainder in order: a row's sum does not depend on the other rows.
        add_lanes(acc, (r * tile.columns + i) * lanes, lanes)
        for t in range(tail):
            acc[(r * tile.columns + i) * lanes] += o.x[o.active[tile.i + i], steps * lanes + t] * widen_weight(
                o.w[tile.j + r, steps * lanes + t], dtype
            )
        o.y[o.active[tile.i + i], tile.j + r] = acc[(r * tile.columns + i) * lanes]

    @inlined
    def multiply(o, tile):
        with T.sblock("tile"):
            T.reads(o.x[0:m, 0:k], o.w[0:n, 0:k], o.active[0:m])
            T.writes(o.y[0:m, 0:n])
            # At most 14 vectors of sums: below 1024 bytes, so they are on the stack and LLVM keeps them in registers.
            acc = T.alloc_buffer((tile.outputs * lanes,), "float32")
            for r in T.unroll(tile.outputs):
                for v in T.vectorized(lanes):
                    acc[r * lanes + v] = T.float32(0)
            add_products(o, tile, acc)
            for r in T.unroll(tile.rows):
                for i in T.unroll(tile.columns):
                    store(o, tile, acc, r, i)

    return multiply
