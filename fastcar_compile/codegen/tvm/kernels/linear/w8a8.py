"""int8 products for every instruction set, exact in int32: of a few rows, and of a prefill chunk or a large batch.

Lane widths and saturation are those of Intel's Intrinsics Guide and of Arm's Neon Intrinsics Reference.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from tvm.script import tirx as T
from tvm.tirx import PrimFunc

from fastcar_compile.codegen.tvm.isa import PORTABLE, InstructionSet, Int8
from fastcar_compile.codegen.tvm.kernels import script, vectors
from fastcar_compile.codegen.tvm.kernels.linear import tiles
from fastcar_compile.codegen.tvm.kernels.vectors import Expr, Load, intrinsic, load_from, ramp, vector, vpdpbusd


@dataclass(frozen=True)
class Int8Dot:
    """How a kernel adds up int8 products.

    Args:
        width: products of one step.
        lanes: int32 sums that a step adds to.
        unsigned: 128 is added to every weight. A step over zero weights gives the zero-point correction.
        accumulators: vectors of sums that fit the registers.
        streams: weight rows that are read in parallel for few activation rows. One where that was measured to be
            faster, several where they share a load of activations.
        step: (sums, weights, activations) -> sums.
    """

    width: int
    lanes: int
    unsigned: bool
    accumulators: int
    streams: int
    step: Callable[[Expr, Load, Load], Expr]


def _vpdpbusd(width: int) -> Callable[[Expr, Load, Load], Expr]:
    # Weights plus 128 are the unsigned factor, so the correction is one number per row of x.
    return lambda acc, w, q: vpdpbusd(acc, vectors.flip_sign(w(0, width), width), q(0, width), width)


def _vpmaddubsw(acc: Expr, w: Load, q: Load) -> Expr:
    """Move the weights' signs to the activations, -127 to 127: two products are at most 2 * 128 * 127 < 2**15."""
    signed = intrinsic("int8x32", "llvm.x86.avx2.psign.b", q(0, 32), w(0, 32))
    size = intrinsic("int8x32", "llvm.abs.v32i8", w(0, 32), T.bool(False))
    pairs = intrinsic("int16x16", "llvm.x86.avx2.pmadd.ub.sw", size, signed)
    # vpmaddwd with ones adds neighbours to 8 int32.
    return acc + intrinsic("int32x8", "llvm.x86.avx2.pmadd.wd", pairs, T.Broadcast(T.int16(1), 16))


def _smull(acc: Expr, w: Load, q: Load) -> Expr:
    """Add two products in int16: 2 * 127 * 128 < 2**15."""
    # Eight products per half. saddlp adds neighbours and widens the sums to int32.
    low, high = (intrinsic("int16x8", "llvm.aarch64.neon.smull.v8i16", w(o, 8), q(o, 8)) for o in (0, 8))
    return acc + intrinsic("int32x4", "llvm.aarch64.neon.saddlp.v4i32.v8i16", low + high)


def _sdot(acc: Expr, w: Load, q: Load) -> Expr:
    # Both factors are signed, so no zero-point correction is needed.
    return intrinsic("int32x4", "llvm.aarch64.neon.sdot.v4i32.v16i8", acc, w(0, 16), q(0, 16))


def _wasm_dot(acc: Expr, w: Load, q: Load) -> Expr:
    for offset in (0, 8):
        acc = acc + intrinsic("int32x4", "llvm.wasm.dot", *(T.Cast("int16x8", x(offset, 8)) for x in (w, q)))
    return acc


def _portable(acc: Expr, w: Load, q: Load) -> Expr:
    """Add two products in int16, as for smull."""
    low, high = (T.Cast("int16x8", w(o, 8)) * T.Cast("int16x8", q(o, 8)) for o in (0, 8))
    return acc + T.Cast("int32x8", low + high)


INT8_DOTS: dict[Int8, Int8Dot] = {
    "vnni512": Int8Dot(64, 16, True, 24, 1, _vpdpbusd(64)),
    "vnni256": Int8Dot(32, 8, True, 8, 1, _vpdpbusd(32)),
    "madd": Int8Dot(32, 8, False, 8, 8, _vpmaddubsw),
    "smmla": Int8Dot(16, 4, False, 12, 8, _sdot),
    "sdot": Int8Dot(16, 4, False, 12, 8, _sdot),
    "smull": Int8Dot(16, 4, False, 8, 8, _smull),
    "dot": Int8Dot(16, 4, False, 8, 8, _wasm_dot),
    "portable": Int8Dot(16, 8, False, 4, 8, _portable),
}


def tile_shape(m: int, n: int, dot: Int8Dot) -> tuple[int, int]:
    """Return weight rows and activation rows of a tile, so that the fewest tiles cover m."""
    if m == 1 or (m == 2 and dot.streams == 1):
        return min(dot.streams, n), m
    widest = max(2, dot.accumulators // 4)
    columns = -(-m // -(-m // widest))
    return min(4, dot.accumulators // columns, n), columns


@script.kernel
def linear_w8a8(m: int, n: int, k: int, isa: InstructionSet = PORTABLE) -> PrimFunc:
    """Return y[m, n] = float(sum_k q[m, k] * w[n, k]) * (s[m] * ws[n]), with the sum exact in int32.

    q int8 [m, k], s float32 [m], w int8 [n, k], ws float32 [n], y float32 [m, n]. Inactive rows are not multiplied.
    Parallel over tiles of weight rows. Such a tile stays in the first-level cache while all rows of q pass, so weights
    are read from memory once. The bias is added by another kernel: LLVM would contract the last product and the
    addition into one rounding.
    """
    correct, multiply = few(m, n, k, isa, T.parallel if n * k * m >= tiles.PARALLEL_WEIGHTS else T.serial)

    @script.inlined
    def body(q, s, w, ws, y):
        o = script.temporaries(q=q, s=s, w=w, ws=ws, y=y, correction=(m, "int32"))
        active = tiles.active_rows(m)
        tiles.find_active(o, (m, n, k), active, correct)
        multiply(o, active)

    return tiles.integer_linear("linear_i8", (m, n, k), ((n, k), "int8"), ((n,), "float32"), body)


def few(rows: int, n: int, k: int, isa: InstructionSet, loop: Any) -> tuple[Callable[..., None], Callable[..., None]]:
    """Return two macros for at most so many active rows: what `find_active` calls, and (o, active), their products."""
    dot = INT8_DOTS[isa.int8]
    shape = tile_shape(rows, n, dot)
    multiply = partial(_multiply, dot, k, vectors.prefetch_distance(shape[0], k) if rows <= tiles.SMALL_BATCH else None)
    return partial(_correct, dot, k), partial(
        tiles.for_tiles, tiles.RowTiling(n, *shape, loop, together=True), multiply
    )


def _zero_weights(_offset: int, size: int) -> Expr:
    return T.Broadcast(T.int8(0), size)


@script.inlined
def _correct(dot, k, o, i, _place):
    """Write what unsigned weights add to the sums of row i to o.correction[i], or 0."""
    if dot.unsigned:
        acc = T.alloc_buffer((dot.lanes,), "int32")
        acc[vector(0, dot.lanes)] = T.Broadcast(0, dot.lanes)
        # Whole steps only: the remainder of a row is multiplied with signed weights and needs no correction.
        for c in range(k // dot.width):
            acc[vector(0, dot.lanes)] = dot.step(
                acc[vector(0, dot.lanes)], _zero_weights, load_from(o.q, [i], c * dot.width)
            )
        o.correction[i] = vectors.reduce_add(acc[vector(0, dot.lanes)], dot.lanes)
    else:
        o.correction[i] = 0


@script.inlined
def _clear(lanes, columns, acc, _r):
    for i in T.unroll(columns):
        acc[vector(i, lanes)] = T.Broadcast(0, lanes)


@script.inlined
def _add_row(dot, o, tile, c, acc, r):
    for i in T.unroll(tile.columns):
        acc[vector(i, dot.lanes)] = dot.step(
            acc[vector(i, dot.lanes)],
            load_from(o.w, [tile.j + r], c * dot.width),
            load_from(o.q, [tile.active_row(i)], c * dot.width),
        )


@script.inlined
def _finish_four(dot, k, o, tile, accs, t, i, first, _number):
    """Write the outputs of up to four weight rows from number `first` of the tile on with its active row i."""
    # The last vector stands for those that do not exist.
    four = T.meta_var([accs[min(first + v, tile.rows - 1)][vector(i, dot.lanes)] for v in range(4)])
    vectors.interleave_fours(four, dot.lanes, t.pairs, t.fours)
    t.sums[ramp(0, 4)] = vectors.fold_fours(load_from(t.fours, [], 0), dot.lanes)
    row: T.let = tile.active_row(i)
    whole, count = T.meta_var((k // dot.width * dot.width, min(4, tile.rows - first)))
    for c in range(k - whole):
        for v in T.unroll(count):
            t.sums[v] += T.Cast("int32", o.q[row, whole + c]) * T.Cast("int32", o.w[tile.j + first + v, whole + c])
    # The scales are multiplied first: the order of the definition decides the rounding.
    for v in T.vectorized(count):
        o.y[row, tile.j + first + v] = T.Cast("float32", t.sums[v] - o.correction[row]) * (
            o.s[row] * o.ws[tile.j + first + v]
        )


@script.inlined
def _multiply(dot, k, ahead, o, tile):
    """Write the outputs of a tile. ahead: the prefetch distance in weight rows and in bytes; None: no prefetch."""
    with T.sblock("tile"):
        script.access([o.q, o.s, o.w, o.ws, o.correction, tile.active.rows], [o.y])
        # One buffer for each weight row, a vector for each active row: all sums are in registers.
        accs = script.buffers(tile.rows, tile.columns * dot.lanes, "int32")
        t = script.temporaries(pairs=(2 * dot.lanes, "int32"), fours=(dot.lanes, "int32"), sums=(4, "int32"))
        script.each(_clear, accs, dot.lanes, tile.columns)
        # c: steps of `width` along k.
        for c in range(k // dot.width):
            # With many rows of x the first tile brings the weights to the cache: no prefetch is needed.
            if ahead is not None:
                for v in T.unroll(tile.rows):
                    T.evaluate(vectors.prefetch(o.w[tile.j + ahead[0] + v, c * dot.width + ahead[1]]))
            script.each(_add_row, accs, dot, o, tile, c)
        for i in T.unroll(tile.columns):
            script.each(_finish_four, range(0, tile.rows, 4), dot, k, o, tile, accs, t, i)
