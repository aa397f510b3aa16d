"""GEMV and small-batch GEMM with float32 or bfloat16 weights: dot products along the reduction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal

from tvm.s_tir import SBlock, SBlockRealize, renew_defs
from tvm.script import tirx as T
from tvm.tirx import Bind, DeclBuffer, For, ForKind, IfThenElse, IntImm, PrimFunc, SeqStmt, Stmt, Var

from fastcar_compile.codegen.tvm.isa import PORTABLE, InstructionSet
from fastcar_compile.codegen.tvm.kernels import script
from fastcar_compile.codegen.tvm.kernels.linear.rows import (
    SCAN_LANES,
    ActiveRows,
    TileMacro,
    Tiling,
    append_active,
    for_tiles,
    is_zero,
    or_float32,
)
from fastcar_compile.codegen.tvm.kernels.script import access, inlined, kernel
from fastcar_compile.codegen.tvm.kernels.vectors import LINE, add_lanes, prefetch, prefetch_distance
from fastcar_compile.errors import InternalError

# How a kernel reads a float weight.


WeightType = Literal["float32", "bfloat16"]


def widen_weight(value: Any, dtype: WeightType) -> Any:
    """Return a loaded weight as float32. The bits of a bfloat16 are the upper half of those of the same float32."""
    if dtype == "float32":
        return value
    return T.reinterpret("float32", T.shift_left(T.Cast("uint32", T.reinterpret("uint16", value)), T.uint32(16)))


# The annotations of a T.prim_func are calls, which TVMScript evaluates.
# pyright: reportInvalidTypeForm=false


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
            access([x, w], [y])
            active = T.alloc_buffer((m,), "int32")
            count = T.alloc_buffer((1,), "int32")

            count[0] = 0
            for i in range(m):
                with T.sblock("row"):
                    access([x, count], [active, count, y])
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
            access([o.x, o.w, o.active], [o.y])
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


# Parallel matmuls combined: their parallel loops become one loop, which is launched and awaited once.


def combine(kernels: Sequence[PrimFunc], shared: int) -> PrimFunc:
    """Return one kernel with all results, each computed by the statements of its own kernel, so bit for bit.

    First comes what the kernels do before their parallel loops, then one loop over the iterations of all kernels, then
    what they do after it. A kernel without a parallel loop runs before that loop as a whole.

    Args:
        kernels: each has one block as its body and the result as its last argument. A kernel may occur several times.
        shared: how many of the first arguments are the same for all.

    Returns:
        A kernel of the shared arguments, the other arguments of each kernel in order, and the results.

    Raises:
        InternalError: a kernel has two parallel loops.
    """
    kernels = [renew_defs(kernel) for kernel in kernels]  # every variable is defined once
    common = list(kernels[0].params[:shared])
    # Every other kernel has buffers of its own for these arguments: a DeclBuffer makes each an alias.
    again = [
        DeclBuffer(other, data=buffer.data)
        for kernel in kernels[1:]
        for other, buffer in zip(kernel.params[:shared], common, strict=True)
    ]
    blocks = [kernel.body.block for kernel in kernels]
    before, loops, after = zip(*(_split(block.body) for block in blocks), strict=True)
    # Aliases, then all statements before the loops, one parallel loop, and all statements behind them.
    body = SeqStmt([*again, *chain(*before), *_one_loop([loop for loop in loops if loop is not None]), *chain(*after)])
    # A region of an alias is left out: the first kernel's regions name the same data.
    copies = {one.buffer for one in again}
    reads = [region for b in blocks for region in b.reads if region.source not in copies]
    block = SBlock([], reads, [region for b in blocks for region in b.writes], "combined", body)
    own = chain.from_iterable(kernel.params[shared:-1] for kernel in kernels)
    params = [*common, *own, *(kernel.params[-1] for kernel in kernels)]
    merged = PrimFunc(params, SBlockRealize([], True, block), attrs=kernels[0].attrs)
    assert isinstance(merged, PrimFunc)
    return merged


def _split(body: Stmt) -> tuple[list[Stmt], For | None, list[Stmt]]:
    """Return the statements before the parallel loop, the loop, and those after it."""
    statements = list(body.seq) if isinstance(body, SeqStmt) else [body]
    loops = [(i, s) for i, s in enumerate(statements) if isinstance(s, For) and s.kind == ForKind.PARALLEL]
    if len(loops) > 1:
        raise InternalError(f"a kernel with {len(loops)} parallel loops cannot be combined with another")
    if not loops:
        return statements, None, []
    at, loop = loops[0]
    return statements[:at], loop, statements[at + 1 :]


def _one_loop(loops: Sequence[Any]) -> list[For]:
    """Return one parallel loop over the iterations of these loops, all of which begin at 0, or nothing for no loops."""
    if not loops:
        return []
    # Loop i has the iterations ends[i - 1] .. ends[i] - 1 of the common loop.
    ends = [sum(int(loop.extent) for loop in loops[: i + 1]) for i in range(len(loops))]
    every = Var("block", "int32")
    body: Any = None
    # From the last loop backwards, because every earlier loop is a branch in front of the later ones.
    for loop, end in zip(reversed(loops), reversed(ends), strict=True):
        mine = SeqStmt([Bind(loop.loop_var, every - (end - int(loop.extent))), loop.body])
        body = mine if body is None else IfThenElse(every < end, mine, body)
    return [For(every, IntImm("int32", 0), IntImm("int32", ends[-1]), ForKind.PARALLEL, body)]
