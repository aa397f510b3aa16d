"""Products of several rows of x where a vector holds a block of sums: some rows of x by some weight rows.

No sum goes across lanes. The active rows of x are packed once: a vector has a step of each row of a block. Lines of the
weight rows of a tile are transposed and unpacked to vectors of the same form, once for all rows of x. `products` says
how an instruction multiplies such vectors, how weights are unpacked, and which tiles registers hold.
"""

from dataclasses import dataclass
from typing import Any, Literal

from tvm.script import tirx as T
from tvm.tirx import PrimFunc

from fastcar_compile.codegen.tvm.isa import InstructionSet
from fastcar_compile.codegen.tvm.kernels import script, vectors
from fastcar_compile.codegen.tvm.kernels.linear import few_rows, products, tiles
from fastcar_compile.codegen.tvm.kernels.linear.products import Tiling
from fastcar_compile.codegen.tvm.kernels.linear.tiles import SMALL_BATCH
from fastcar_compile.codegen.tvm.kernels.vectors import LINE, fence, ramp, vector


@dataclass(frozen=True)
class _Tile:
    """Weight rows from j on, number t of the panel, by vectors of x from `first` on."""

    j: Any
    t: Any
    first: Any


def _packed_rows(f: Tiling, m: int) -> Any:
    """Allocate packed rows of x, their numbers and scales as lanes, and what the sums of a group begin with."""
    blocks, lanes = -(-m // f.product.rows), f.product.lanes
    return script.temporaries(
        packed=(blocks, f.groups * f.lines * f.steps, f.product.width, "int8"),
        at=(blocks * f.product.rows, "int32"),
        scales=(blocks, lanes, "float32"),
        begin=(blocks, f.groups, lanes, "int32"),
    )


@script.inlined
def _pack_rows(f, o, x, active, block):
    """Pack a block of active rows; rows beyond the last are copies of it."""
    size = T.meta_var(f.product.unit * f.product.copies)
    for i in range(f.product.rows):
        x.at[block * f.product.rows + i] = active.rows[T.min(block * f.product.rows + i, active.count[0] - 1)]
        if hasattr(o, "s"):
            x.scales[block, ramp(i * f.product.across, f.product.across)] = vectors.broadcast(
                o.s[x.at[block * f.product.rows + i]], f.product.across
            )
    # piece: of every row, so that what is written stays in the first-level cache.
    for piece in range(f.groups * f.lines * f.steps // f.piece):
        for i in range(f.product.rows):
            row: T.let = x.at[block * f.product.rows + i]
            for c in T.unroll(f.piece):
                # Zeros up to a whole line or group add nothing, whatever the weights are.
                start = T.meta_var(f.begin(piece, f.piece * f.inputs) + c * f.inputs)
                if start >= piece * (f.piece * f.inputs) and start + f.inputs <= f.k:
                    x.packed[block, piece * f.piece + f.place(c), ramp(i * size, size)] = f.take(o.q, row, start)
                else:
                    x.packed[block, piece * f.piece + f.place(c), ramp(i * size, size)] = T.Broadcast(T.int8(0), size)
            # Inputs that do not fill a step are in the last piece.
            if f.k % f.inputs > 0:
                last = T.meta_var(f.k // f.inputs)
                if piece == last // f.piece:
                    for t in range(f.k % f.inputs):
                        x.packed[block, piece * f.piece + f.place(last % f.piece), i * size + t] = o.q[
                            row, last * f.inputs + t
                        ]
    if f.product.unsigned:
        for g in range(f.groups):
            _begin_group(f, x, block, g)


@script.inlined
def _begin_group(f, x, block, g):
    """Write what the sums of a group begin with: minus what the offset of unsigned weights adds."""
    lanes = T.meta_var(f.product.lanes)
    acc = T.alloc_buffer((lanes,), "int32")
    acc[vector(0, lanes)] = T.Broadcast(0, lanes)
    for c in range(f.lines * f.steps):
        acc[vector(0, lanes)] = f.product.add(
            acc[vector(0, lanes)],
            x.packed[block, g * f.lines * f.steps + c, ramp(0, f.product.width)],
            T.Broadcast(T.int8((f.format.offset + 128) % 256 - 128), f.product.across * f.product.unit),
        )
    x.begin[block, g, ramp(0, lanes)] = T.Broadcast(0, lanes) - acc[vector(0, lanes)]


# Weights: a line of `across` weight rows is transposed in registers, so that a step of all is in one place, and then
# unpacked.


@script.inlined
def _transpose_fours(one, two, lanes):
    """Transpose four by four lanes of four vectors, in every block of four lanes."""
    for p in T.unroll(2):
        a, b = T.meta_var((one[vector(2 * p, lanes)], one[vector(2 * p + 1, lanes)]))
        two[vector(2 * p, lanes)] = vectors.interleave(a, b, lanes, 1, 0)
        two[vector(2 * p + 1, lanes)] = vectors.interleave(a, b, lanes, 1, 1)
    for p in T.unroll(2):
        a, b = T.meta_var((two[vector(p, lanes)], two[vector(2 + p, lanes)]))
        one[vector(2 * p, lanes)] = vectors.interleave(a, b, lanes, 2, 0)
        one[vector(2 * p + 1, lanes)] = vectors.interleave(a, b, lanes, 2, 1)


@script.inlined
def _transpose_twos(one, two):
    for half in T.unroll(2):
        two[vector(half, 2)] = one[vector(half, 2)]
    one[vector(0, 2)] = T.Shuffle([two[vector(0, 2)], two[vector(1, 2)]], [0, 2])
    one[vector(1, 2)] = T.Shuffle([two[vector(0, 2)], two[vector(1, 2)]], [1, 3])


@script.inlined
def _unpack(f, o, j, line, to, at, first):
    """Write a line of a tile to `to`, from set `at` and vector `first` on."""
    across, unit = T.meta_var((f.product.across, f"int{8 * f.product.unit}"))
    for p in f.steps_loop(f.sets):
        one, two = script.buffers(2, across * f.units, unit)
        for v in T.unroll(across):
            one[vector(v, f.units)] = T.reinterpret(
                f"{unit}x{f.units}", o.w[f.row(j, across * p + v), ramp(f.begin(line, f.line), f.line)]
            )
        if across == 4:
            _transpose_fours(one, two, f.units)
        if across == 2:
            _transpose_twos(one, two)
        for v in T.unroll(across):
            script.each(_put, range(f.parts), f, one[vector(v, f.units)], to, at + p, first + v)


@script.inlined
def _put(f, value, to, at, first, part, _number):
    width = T.meta_var(f.product.width)
    to[at, vector(first + part * f.product.across, width)] = f.format.unpack(
        T.reinterpret(f"int8x{width}", value), width, f.product.unsigned
    )[part]


@script.inlined
def _widen_scales(f, ws, j, factors, t):
    """Write the float16 scales of a tile as float32 to factors [t, groups, rows], four by four."""
    for p in range(-(-f.sets * f.product.across // 4)):
        for b in range(f.groups // 4):
            one, two = script.buffers(2, 16)
            for v in T.unroll(4):
                one[vector(v, 4)] = T.Cast("float32x4", ws[f.row(j, 4 * p + v), vector(b, 4)])
            _transpose_fours(one, two, 4)
            for v in T.unroll(4):
                factors[t, b * 4 + v, vector(p, 4)] = one[vector(v, 4)]
        for g in range(f.groups % 4):
            for v in T.unroll(4):
                factors[t, f.groups // 4 * 4 + g, 4 * p + v] = T.Cast(
                    "float32", ws[f.row(j, 4 * p + v), f.groups // 4 * 4 + g]
                )


# Tiles.


@script.inlined
def _begin(f, x, tile, g, acc, h):
    lanes = T.meta_var(f.product.lanes)
    for p in T.unroll(f.sets):
        if f.product.unsigned:
            acc[vector(p, lanes)] = x.begin[tile.first + h, g, ramp(0, lanes)]
        else:
            acc[vector(p, lanes)] = T.Broadcast(T.Cast(f.product.sums, 0), lanes)


@script.inlined
def _clear(f, total, _h):
    for p in T.unroll(f.sets):
        total[vector(p, f.product.lanes)] = T.Broadcast(T.float32(0), f.product.lanes)


@script.inlined
def _add(f, x, bytes, tile, step, p, at, acc, h):
    size = T.meta_var(f.product.across * f.product.unit)
    acc[vector(p, f.product.lanes)] = f.product.add(
        acc[vector(p, f.product.lanes)],
        x.packed[tile.first + h, step, ramp(0, f.product.width)],
        bytes[at[0] + p, vector(at[1], size)],
    )


@script.inlined
def _prefetch(f, o, tile, line, part, parts):
    """Prefetch a share of a line's rows: of the next tile or panel, and the next line of this one."""
    # Only the first tile of x does so, once per cache line: the others find the weights in the cache.
    if tile.first == 0 and line * f.product.width % LINE == 0:
        for v in T.unroll(-(-f.rows // parts)):
            number = T.meta_var(part * -(-f.rows // parts) + v)
            T.evaluate(vectors.prefetch(o.w[tile.j + f.ahead + number, line * f.line]))
            if f.panel == 0 and f.product.width == LINE:
                T.evaluate(vectors.prefetch(o.w[tile.j + number, (line + 1) * f.line], 1))


@script.inlined
def _multiply_line(f, o, x, p, tile, accs, line):
    if f.panel == 0:
        _unpack(f, o, tile.j, line, p.bytes, 0, 0)
    # b, c: steps. A vector of a few steps is in registers: its loop is unrolled. q: unrolled, sets of weight rows; a
    # vector of weights serves all vectors of rows.
    for b in f.steps_loop(f.steps // 2):
        _prefetch(f, o, tile, line, b, f.steps // 2)
        for c in T.unroll(2):
            step = T.meta_var(line * f.steps + 2 * b + c)
            at = T.meta_var((0, 2 * b + c) if f.panel == 0 else (tile.t * f.sets, step))
            for q in T.unroll(f.sets):
                script.each(_add, accs, f, x, p.bytes, tile, step, q, at)


@script.inlined
def _add_group(f, p, tile, g, accs, total, h):
    # A group's sum is exact. Groups are added in ascending order, and the fence rounds each product first.
    lanes, across = T.meta_var((f.product.lanes, f.product.across))
    for q in T.unroll(f.sets):
        total[vector(q, lanes)] = total[vector(q, lanes)] + fence(
            f"float32x{lanes}",
            T.Cast(f"float32x{lanes}", accs[h][vector(q, lanes)])
            * f.for_all_rows(p.factors[tile.t, g, ramp(q * across, across)]),
        )


@script.inlined
def _finish(f, o, x, tile, accs, total, h):
    """Write the results of a vector of rows of x."""
    lanes, across = T.meta_var((f.product.lanes, f.product.across))
    for q in T.unroll(f.sets):
        if f.kind == "bfloat16":
            total[vector(q, lanes)] = accs[h][vector(q, lanes)]
        elif f.kind == "int4":
            total[vector(q, lanes)] = total[vector(q, lanes)] * x.scales[tile.first + h, ramp(0, lanes)]
        else:
            # The scales are multiplied first: the order of the definition decides the rounding.
            total[vector(q, lanes)] = T.Cast(f"float32x{lanes}", accs[h][vector(q, lanes)]) * (
                x.scales[tile.first + h, ramp(0, lanes)] * f.for_all_rows(f.scales(o.ws, tile.j, q))
            )
    if across == 1:
        for q in T.unroll(f.sets // 4):
            _store_four(f, o, x, tile, total, h, q)
    else:
        for q in T.unroll(f.rows // across):
            _store(f, o, x, tile, total, h, q, across)
        if f.rows % across > 0:
            _store(f, o, x, tile, total, h, f.sets - 1, f.rows % across)


@script.inlined
def _store(f, o, x, tile, total, h, q, width):
    # i: rows of x, of which a repeated one is stored again. Its lanes are adjacent columns.
    across = T.meta_var(f.product.across)
    for i in T.unroll(f.product.rows):
        o.y[x.at[(tile.first + h) * f.product.rows + i], ramp(tile.j + across * q, width)] = total[
            ramp(q * f.product.lanes + across * i, width)
        ]


@script.inlined
def _store_four(f, o, x, tile, total, h, q):
    # Four vectors of 16 rows of x become vectors of four rows, so that a store is four columns.
    lanes = T.meta_var(f.product.lanes)
    one, two = script.buffers(2, 4 * lanes)
    for v in T.unroll(4):
        one[vector(v, lanes)] = total[vector(4 * q + v, lanes)]
    _transpose_fours(one, two, lanes)
    for i in T.unroll(lanes):
        o.y[x.at[(tile.first + h) * lanes + i], ramp(tile.j + 4 * q, 4)] = one[ramp(i % 4 * lanes + i // 4 * 4, 4)]


@script.inlined
def _multiply(f, o, x, p, tile, count):
    """Write a tile by `count` vectors of rows of x."""
    # A buffer for each vector of rows of x: all sums of a group are in registers.
    accs = script.buffers(count, f.sets * f.product.lanes, f.product.sums)
    totals = script.buffers(count, f.sets * f.product.lanes)
    script.each(_clear, totals, f)
    for g in range(f.groups):
        script.each(_begin, accs, f, x, tile, g)
        for line in range(f.lines):
            _multiply_line(f, o, x, p, tile, accs, g * f.lines + line)
        if f.kind == "int4":
            script.each(_add_group, totals, f, p, tile, g, accs)
    script.each(_finish, totals, f, o, x, tile, accs)


@script.inlined
def _multiply_tiles(f, o, x, p, panel, first, count):
    for t in range(f.together):
        if (panel * f.together + t) * f.rows < f.n:
            _multiply(f, o, x, p, _Tile(f.first_row(panel, t), t, first), count)


@script.inlined
def _multiply_rest(f, o, x, p, panel, blocks, count, _number):
    if blocks % f.vectors == count:
        _multiply_tiles(f, o, x, p, panel, blocks // f.vectors * f.vectors, count)


@script.inlined
def _multiply_panel(f, o, x, panel, blocks):
    size = T.meta_var(f.product.across * f.product.unit * f.steps)
    steps = T.meta_var(f.groups * f.lines if f.panel > 0 else 1)
    p = script.temporaries(
        bytes=(f.together * f.sets, size * steps, "int8"),
        factors=(f.together, f.groups, -(-f.sets * f.product.across // 4) * 4, "float32"),
    )
    for t in range(f.together):
        if (panel * f.together + t) * f.rows < f.n:
            if f.kind == "int4":
                _widen_scales(f, o.ws, f.first_row(panel, t), p.factors, t)
            for line in range(f.groups * f.lines if f.panel > 0 else 0):
                _unpack(f, o, f.first_row(panel, t), line, p.bytes, t * f.sets, line * f.product.across * f.parts)
    # b: tiles of x. Those that remain have code for each number of vectors.
    twos: T.let = T.truncmod(3 - blocks % 3, 3) if f.twos else 0
    for b in range((blocks - 2 * twos) // f.vectors):
        _multiply_tiles(f, o, x, p, panel, b * f.vectors, f.vectors)
    if f.twos:
        for b in range(twos):
            _multiply_tiles(f, o, x, p, panel, blocks - 2 * twos + 2 * b, 2)
    else:
        script.each(_multiply_rest, f.rests, f, o, x, p, panel, blocks)


@script.inlined
def multiply(f, m, o, active, scan, loop):
    """Write the products of at most m active rows. scan, loop: T.parallel or T.serial, over rows and weight rows."""
    x = _packed_rows(f, m)
    for block in scan(-(-m // f.product.rows)):
        if block * f.product.rows < active.count[0]:
            _pack_rows(f, o, x, active, block)
    for panel in loop(-(-f.n // (f.together * f.rows))):
        # Weights are not read for inactive rows.
        if active.count[0] > 0:
            _multiply_panel(f, o, x, panel, (active.count[0] + f.product.rows - 1) // f.product.rows)


@script.inlined
def _choose(tilings, o, active, scan, loop):
    # The last one is for all that the ones before it do not take.
    if len(tilings) == 1 or active.count[0] <= tilings[0][0]:
        multiply(tilings[0][1], tilings[0][0], o, active, scan, loop)
    else:
        _choose(tilings[1:], o, active, scan, loop)


@script.kernel
def linear_blocks(kind: Literal["int8", "int4", "bfloat16"], m: int, n: int, k: int, isa: InstructionSet) -> PrimFunc:
    """Return what `linear_few` returns, or for bfloat16 y[m, n] = sum_k x[m, k] * w[n, k].

    bfloat16: x is rounded half to even. Inactive rows are not multiplied, and the order of a row's sum does not depend
    on the other rows. Parallel over blocks of many rows while they are packed, then over panels of weight rows.
    """
    tilings = products.tilings_of(kind, m, n, k, isa)
    f = tilings[0][1]
    loop = T.parallel if n * k * m >= tiles.PARALLEL_WEIGHTS else T.serial
    scan = loop if len(tilings) > 1 else T.serial
    if kind == "bfloat16":
        return _bfloat16(m, tilings, loop, products.BRIDGES[isa.bfloat16])
    few_loop = T.parallel if n * k >= tiles.PARALLEL_WEIGHTS else T.serial
    in_dots, few = kind == "int8" and f.product is products.FOURS, few_rows.FewRows("int8", SMALL_BATCH, n, k, isa.int8)
    moved = few.temporaries() if in_dots else {}

    @script.inlined
    def body(q, s, w, ws, y):
        o = script.temporaries(q=q, s=s, w=w, ws=ws, y=y, **moved)
        active = tiles.active_rows(m)
        tiles.find_active(o, (m, n, k), active, tiles.nothing)
        if in_dots and active.count[0] <= SMALL_BATCH:
            for i in range(active.count[0]):
                few_rows.move_row(few, o, active.rows[i], i)
            few_rows.multiply(few, few_loop, o, active)
        else:
            _choose(tilings, o, active, scan, loop)

    return tiles.integer_linear(kind, "_blocks", (m, n, k), body)


def _bfloat16(m: int, tilings: list[tuple[int, Tiling]], loop: Any, bridge: str) -> PrimFunc:
    n, k = tilings[0][1].n, tilings[0][1].k
    scan = T.parallel if m * k >= tiles.PARALLEL_WEIGHTS else T.serial

    @script.inlined
    def body(x, w, y):
        T.attr(0, "pragma_import_llvm", bridge)
        active = tiles.active_rows(m)
        o = script.temporaries(q=x, w=w, y=y)
        tiles.find_active(o, (m, n, k), active, tiles.nothing, scan)
        _choose(tilings, o, active, scan, loop)

    return tiles.float_linear("linear_bfloat16_blocks", "bfloat16", (m, n, k), body)
