"""Sums of one group of 128 int4 weights times int8 activations, for every instruction set, exact in int32."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from tvm.script import tirx as T
from tvm.tirx import PrimFunc

from fastcar_compile.codegen.tvm.isa import PORTABLE, InstructionSet, Int8
from fastcar_compile.codegen.tvm.kernels import script, vectors
from fastcar_compile.codegen.tvm.kernels.linear import tiles
from fastcar_compile.codegen.tvm.kernels.linear.tiles import PARALLEL_WEIGHTS, Tile
from fastcar_compile.codegen.tvm.kernels.vectors import Expr, Load, fence, intrinsic, load_from, ramp, vector, vpdpbusd
from fastcar_compile.ir.ops.linear import GROUP

HALF = GROUP // 2
"""Bytes of a group. Byte i holds input i in its low and input 64 + i in its high nibble."""


@dataclass(frozen=True)
class Int4Dot:
    """How a kernel adds up a group.

    Args:
        lanes: int32 sums of a group.
        unsigned: 8 is added to every weight. A group of zero weights gives the zero-point correction.
        streams: as in `Int8Dot`, for rows that fit a page.
        group: (64 bytes of weights, 128 activations) -> sums.
    """

    lanes: int
    unsigned: bool
    streams: int
    group: Callable[[Load, Load], Expr]


def nibbles(w: Load, offset: int, width: int) -> tuple[Expr, Expr]:
    """Return low and high nibbles of `width` bytes, plus 8: of two's complement that is the sign bit inverted."""
    mask, sign, four = (T.Broadcast(T.uint8(number), width) for number in (15, 8, 4))
    both = w(offset, width)
    if width == 64:
        # An and with an exclusive or behind it are one instruction of AVX-512, vpternlogd.
        low, high = (T.bitwise_xor(T.bitwise_and(value, mask), sign) for value in (both, T.shift_right(both, four)))
    else:
        both = T.bitwise_xor(both, T.Broadcast(T.uint8(0x88), width))
        low, high = (T.bitwise_and(value, mask) for value in (both, T.shift_right(both, four)))
    return T.reinterpret(f"int8x{width}", low), T.reinterpret(f"int8x{width}", high)


def signed_nibbles(w: Load, offset: int, width: int) -> tuple[Expr, Expr]:
    """Return low and high nibbles, sign-extended."""
    # The shift to the right is arithmetic: it extends the sign of the nibble that is on top.
    four = T.Broadcast(T.int8(4), width)
    low = T.reinterpret(f"int8x{width}", T.shift_left(w(offset, width), T.Broadcast(T.uint8(4), width)))
    return T.shift_right(low, four), T.shift_right(T.reinterpret(f"int8x{width}", w(offset, width)), four)


def _pairs(w: Load, q: Load, width: int) -> Iterator[tuple[Expr, Expr]]:
    """Yield signed nibbles and the activations that they meet: low ones the first 64 inputs, high ones the last 64."""
    for offset in range(0, HALF, width):
        low, high = signed_nibbles(w, offset, width)
        yield low, q(offset, width)
        yield high, q(HALF + offset, width)


def _vpdpbusd(width: int) -> Callable[[Load, Load], Expr]:
    def group(w: Load, q: Load) -> Expr:
        acc = T.Broadcast(T.int32(0), width // 4)
        # acc is one register. Low nibbles meet the first 64 inputs, high nibbles the last 64.
        for offset in range(0, HALF, width):
            low, high = nibbles(w, offset, width)
            acc = vpdpbusd(acc, low, q(offset, width), width)
            acc = vpdpbusd(acc, high, q(HALF + offset, width), width)
        return acc

    return group


def _vpmaddubsw(w: Load, q: Load) -> Expr:
    """Add four results in int16. vpmaddubsw saturates there, which 4 * 2 * 15 * 127 does not reach."""
    parts = []
    # Unsigned nibbles times signed bytes, two products per int16 lane.
    for offset in (0, 32):
        low, high = nibbles(w, offset, 32)
        parts += [(low, q(offset, 32)), (high, q(HALF + offset, 32))]
    products = [intrinsic("int16x16", "llvm.x86.avx2.pmadd.ub.sw", *part) for part in parts]
    # The four results are added in int16, so one widening serves all of them.
    pairs = (products[0] + products[1]) + (products[2] + products[3])
    # vpmaddwd with ones adds neighbours into int32.
    return intrinsic("int32x8", "llvm.x86.avx2.pmadd.wd", pairs, T.Broadcast(T.int16(1), 16))


def _sdot(w: Load, q: Load) -> Expr:
    # Both factors of sdot are signed, so no zero-point correction is needed.
    acc = T.Broadcast(T.int32(0), 4)
    for pair in _pairs(w, q, 16):
        acc = intrinsic("int32x4", "llvm.aarch64.neon.sdot.v4i32.v16i8", acc, *pair)
    return acc


def _smull(w: Load, q: Load) -> Expr:
    """Add 16 products of at most 8 * 127 in each int16 lane."""
    products = [intrinsic("int16x8", "llvm.aarch64.neon.smull.v8i16", *pair) for pair in _pairs(w, q, 8)]
    # saddlp adds neighbours and widens the sums to int32.
    return intrinsic("int32x4", "llvm.aarch64.neon.saddlp.v4i32.v8i16", sum(products[1:], products[0]))


def _wasm_dot(w: Load, q: Load) -> Expr:
    """Add 16 products in each int16 lane, as for smull; the dot product with ones adds neighbours."""
    products = [T.Cast("int16x8", a) * T.Cast("int16x8", b) for a, b in _pairs(w, q, 8)]
    return intrinsic("int32x4", "llvm.wasm.dot", sum(products[1:], products[0]), T.Broadcast(T.int16(1), 8))


def _portable(w: Load, q: Load) -> Expr:
    """Add 16 products in each int16 lane, as for smull."""
    products = [T.Cast("int16x8", a) * T.Cast("int16x8", b) for a, b in _pairs(w, q, 8)]
    # 16 * 8 * 127 is below 2^15, so the int16 sums are exact before they are widened.
    return T.Cast("int32x8", sum(products[1:], products[0]))


INT4_DOTS: dict[Int8, Int4Dot] = {
    "vnni512": Int4Dot(16, True, 1, _vpdpbusd(64)),
    "vnni256": Int4Dot(8, True, 1, _vpdpbusd(32)),
    "madd": Int4Dot(8, True, 8, _vpmaddubsw),
    "smmla": Int4Dot(4, False, 8, _sdot),
    "sdot": Int4Dot(4, False, 8, _sdot),
    "smull": Int4Dot(4, False, 8, _smull),
    "dot": Int4Dot(4, False, 8, _wasm_dot),
    "portable": Int4Dot(8, False, 8, _portable),
}


# Tiles of the int4 kernel: exact int32 group sums, times their scales, added in ascending order of the groups.


_FLOAT_EXPONENT = 112 << 23
"""Difference of the exponent biases of float32 and float16, in place."""

PAGE = 4096
"""Bytes of the longest row that is one stream."""


@dataclass(frozen=True)
class Int4Sizes:
    """x holds `rows` active rows; n weight rows of k inputs; `dot` adds up their groups."""

    rows: int
    n: int
    k: int
    dot: Int4Dot

    @property
    def groups(self) -> int:
        """G."""
        return -(-self.k // GROUP)


@dataclass(frozen=True)
class _Group:
    """One group of one output: weight row j, row i of x, group g."""

    j: Expr
    i: Expr
    g: Expr


def tile_shape(m: int, n: int, k: int, dot: Int4Dot) -> tuple[int, int]:
    """Return weight rows and rows of x of a tile: eight outputs, or one where weights are a single stream."""
    if _one_stream(m, k, dot):
        return 1, 1
    # Eight outputs are two vectors of four, which share the loads of weights and of x.
    columns = 1 if m == 1 else 2 if m < 4 else 4
    return min(8 // columns, n), columns


def _one_stream(m: int, k: int, dot: Int4Dot) -> bool:
    # Measured: short rows are faster one after the other, longer ones, or those with a remainder, in parallel.
    groups = -(-k // GROUP)
    return m == 1 and dot.streams == 1 and groups % 4 == 0 and groups * HALF <= PAGE


def _float_scales(bits: Expr) -> Expr:
    """Return float32x4 of four float16 bits uint32x4. All are normal, so bits move and the bias changes."""
    # Ten mantissa bits become the upper ones of 23. Scales are positive, so no sign moves.
    moved = T.shift_left(bits, T.Broadcast(T.uint32(13), 4)) + T.Broadcast(T.uint32(_FLOAT_EXPONENT), 4)
    return T.reinterpret("float32x4", moved)


def _scale_bits(scales: Expr, lanes: str = "") -> Expr:
    return T.Cast(f"uint32{lanes}", T.reinterpret(f"uint16{lanes}", scales))


def _group_sums(dot: Int4Dot, o: Any, group: _Group) -> Expr:
    return dot.group(load_from(o.w, [group.j], group.g * HALF), load_from(o.x, [group.i], group.g * GROUP))


@script.inlined
def _four_products(dot, lanes, o, groups, correction, scales, products):
    """Write float(sum - correction) * scale of four groups to products float32 [4].

    correction is int32x4, scales uint32x4 holds the bits of four float16. The fence keeps LLVM from contracting the
    product and a later addition into one rounding.
    """
    # Four independent group sums hide the latency of the dot products. All three buffers stay in registers.
    acc = T.alloc_buffer((4 * lanes,), "int32")
    pairs = T.alloc_buffer((2 * lanes,), "int32")
    fours = T.alloc_buffer((lanes,), "int32")
    acc[vector(0, lanes)] = _group_sums(dot, o, groups[0])
    acc[vector(1, lanes)] = _group_sums(dot, o, groups[1])
    acc[vector(2, lanes)] = _group_sums(dot, o, groups[2])
    acc[vector(3, lanes)] = _group_sums(dot, o, groups[3])
    # One reduction gives four sums in the lanes of one vector.
    vectors.interleave_fours([acc[vector(v, lanes)] for v in range(4)], lanes, pairs, fours)
    # A corrected sum is at most 128 * 8 * 127, so its cast to float32 is exact and the product rounds once.
    products[ramp(0, 4)] = fence(
        "float32x4",
        T.Cast("float32x4", vectors.fold_fours(load_from(fours, [], 0), lanes) - correction) * _float_scales(scales),
    )


def _four_groups(tile: Tile, first: Expr) -> Sequence[_Group]:
    return [_Group(tile.j, tile.i, first + v) for v in range(4)]


@script.inlined
def _groups_in_lanes(sizes, o, tile):
    """Write one output: a vector holds four groups of one weight row, which is read as one stream."""
    ahead = T.meta_var(vectors.prefetch_distance(1, sizes.groups * HALF)[1])
    with T.sblock("tile"):
        script.access([o.x, o.s, o.w, o.ws, o.correction, tile.active.rows], [o.y])
        products = T.alloc_buffer((4,), "float32")
        total = T.alloc_buffer((1,), "float32")
        total[0] = T.float32(0)
        # g: four groups at a time. v: unrolled; the sum stays in the order of the groups.
        for g in range(sizes.groups // 4):
            # A group's 64 bytes are one cache line of the row, which is a single stream.
            for v in T.unroll(4):
                T.evaluate(vectors.prefetch(o.w[tile.j, (g * 4 + v) * HALF + ahead]))
            groups, four = T.meta_var((_four_groups(tile, g * 4), ramp(g * 4, 4)))
            scales = T.meta_var(_scale_bits(o.ws[tile.j, four], "x4"))
            _four_products(sizes.dot, sizes.dot.lanes, o, groups, o.correction[tile.i, four], scales, products)
            # Scalar and in turn, because float32 sums depend on the order of the groups.
            for v in T.unroll(4):
                total[0] += products[v]
        o.y[tile.active_row(0), tile.j] = total[0] * o.s[tile.active_row(0)]


def _four_outputs(tile: Tile, g: Expr, first: Expr) -> Sequence[_Group]:
    # The last quad may not be full: it repeats the last output, whose copies are not stored.
    outputs = [T.min(first + v, tile.outputs - 1) for v in range(4)]
    return [_Group(tile.weight_row(v), tile.place(v), g) for v in outputs]


@script.inlined
def _add_group(dot, o, tile, g, products, total):
    # p: unrolled, four outputs at a time.
    for p in T.unroll(-(-tile.outputs // 4)):
        groups = T.meta_var(_four_outputs(tile, g, p * 4))
        correction = T.meta_var(vectors.vector_of([o.correction[at.i, g] for at in groups]))
        scales = T.meta_var(vectors.vector_of([_scale_bits(o.ws[at.j, g]) for at in groups]))
        _four_products(dot, dot.lanes, o, groups, correction, scales, products)
        # Four outputs in lanes: every lane adds its groups in ascending order.
        total[ramp(p * 4, 4)] = total[ramp(p * 4, 4)] + products[ramp(0, 4)]


@script.inlined
def _rows_in_lanes(sizes, ahead, o, tile):
    """Write a tile of outputs. A load of activations serves several weight rows, and a vector holds four outputs."""
    with T.sblock("tile"):
        script.access([o.x, o.s, o.w, o.ws, o.correction, tile.active.rows], [o.y])
        products = T.alloc_buffer((4,), "float32")
        total = T.alloc_buffer((-(-tile.outputs // 4) * 4,), "float32")
        for p in T.unroll(-(-tile.outputs // 4)):
            total[ramp(p * 4, 4)] = T.Broadcast(T.float32(0), 4)
        # g: groups in ascending order, for all outputs of the tile. total is at most two vectors, in registers.
        for g in range(sizes.groups):
            # With many rows of x the first tile brings the weights to the cache: no prefetch is needed.
            if sizes.rows <= tiles.SMALL_BATCH:
                for v in T.unroll(tile.rows):
                    T.evaluate(vectors.prefetch(o.w[tile.j + ahead + v, g * HALF]))
            _add_group(sizes.dot, o, tile, g, products, total)
        for v in T.unroll(tile.outputs):
            o.y[tile.active_row(v), tile.weight_row(v)] = total[v] * o.s[tile.active_row(v)]


@script.kernel
def linear_w4a8(m: int, n: int, k: int, isa: InstructionSet = PORTABLE) -> PrimFunc:
    """Return y[m, n] = s[m] * sum_g float(sum_k q[m, k] * w[n, k]) * ws[n, g], groups g in ascending order.

    q int8 [m, k], s float32 [m], w uint8 [n, 64 G] (`ir.ops.linear.pack_int4`), ws float16 [n, G], y float32 [m, n]. A
    group is 128 inputs, and its sum is exact in int32. Inactive rows are not multiplied. As for w8a8, another kernel
    adds the bias.
    """
    groups, packed = -(-k // GROUP), -(-k // GROUP) * HALF
    sizes, shape = Int4Sizes(m, n, k, INT4_DOTS[isa.int8]), tile_shape(m, n, k, INT4_DOTS[isa.int8])
    loop = T.parallel if n * k * m >= PARALLEL_WEIGHTS else T.serial
    ahead, _ = vectors.prefetch_distance(shape[0], packed)
    one = _one_stream(m, k, sizes.dot)
    multiply = partial(_groups_in_lanes, sizes) if one else partial(_rows_in_lanes, sizes, ahead)

    @script.inlined
    def body(q, s, w, ws, y):
        # x: the active rows side by side, padded with zeros to whole groups, so that no tile has a remainder along k.
        x, correction = T.meta_var(((m, groups * GROUP, "int8"), (m, groups, "int32")))
        o = script.temporaries(x=x, correction=correction, q=q, s=s, w=w, ws=ws, y=y)
        active = tiles.active_rows(m)
        tiles.find_active(o, (m, n, k), active, partial(_move_row, sizes))
        tiles.for_tiles(tiles.RowTiling(n, *shape, loop), multiply, o, active)

    return tiles.integer_linear("linear_i4", (m, n, k), ((n, packed), "uint8"), ((n, groups), "float16"), body)


def _zero_weights(_offset: int, size: int) -> Expr:
    return T.Broadcast(T.uint8(0), size)


@script.inlined
def _move_row(sizes, o, i, to):
    """Move row i of o.q to row `to` of o.x, padded with zeros.

    o.correction[to, g] becomes what unsigned weights add to the sums of group g, or 0.
    """
    for t in range(sizes.k):
        o.x[to, t] = o.q[i, t]
    # Zeros up to a whole group add nothing, whatever the weights are.
    for t in range(sizes.groups * GROUP - sizes.k):
        o.x[to, sizes.k + t] = T.int8(0)
    for g in range(sizes.groups):
        if sizes.dot.unsigned:
            # The sum over zero weights is what the offset of 8 adds to a group: 8 times the sum of its inputs.
            sums = T.meta_var(sizes.dot.group(_zero_weights, load_from(o.x, [to], g * GROUP)))
            o.correction[to, g] = vectors.reduce_add(sums, sizes.dot.lanes)
        else:
            o.correction[to, g] = 0
