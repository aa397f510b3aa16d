"""Exact attention of several rows over one cache: the lanes of a vector are rows of a video and their query heads.

A block of keys, and of values, is widened once for the query rows of a tile. Each lane computes what `exact_attention`
computes for its row, in the same order, so the bits are the same.
"""

from typing import Any

from tvm.script import tirx as T
from tvm.tirx import PrimFunc

from fastcar_compile.codegen.tvm.isa import PORTABLE, InstructionSet
from fastcar_compile.codegen.tvm.kernels import HeadShape, script
from fastcar_compile.codegen.tvm.kernels.attention.decode import PARALLEL_CACHE_ELEMENTS
from fastcar_compile.codegen.tvm.kernels.attention.exact import MINUS_INFINITY
from fastcar_compile.codegen.tvm.kernels.attention.exact_shape import (
    LANES,
    ExactShape,
    not_a_number,
    wide_exponent,
)
from fastcar_compile.codegen.tvm.kernels.attention.exact_tile import (
    ROWS,
    ExactTile,
    find_ranges,
    multiply,
    read_exponents,
    see,
    tile_buffers,
)
from fastcar_compile.codegen.tvm.kernels.attention.exact_values import numerators, round_logits
from fastcar_compile.codegen.tvm.kernels.attention.rows import find_active, seen_ranges
from fastcar_compile.codegen.tvm.kernels.cache import bounded, power_of_two
from fastcar_compile.codegen.tvm.kernels.linear.activations import read_knots
from fastcar_compile.codegen.tvm.kernels.linear.tiles import active_rows
from fastcar_compile.codegen.tvm.kernels.tas import INFINITY
from fastcar_compile.codegen.tvm.kernels.vectors import (
    Expr,
    cast,
    fence,
    intrinsic,
    magnitude_bits,
    nearest,
    ramp,
    vector,
)
from fastcar_compile.ir import exact
from fastcar_compile.ir.ops.operator import BLOCK, INT8_MAX, LEAST_EXPONENT
from fastcar_compile.ir.ops.operator import NOT_A_NUMBER as NAN_EXPONENT

# The annotations of a T.prim_func are calls, which TVMScript evaluates.
# pyright: reportInvalidTypeForm=false


def _integer(tile: ExactTile, own: Any, values: Expr, e: Expr) -> Expr:
    """Return the mantissas of values of a wide block."""
    return nearest(values * power_of_two(tile.every(T.int32(0)) - own.exponents[e, tile.all], tile.lanes), tile.lanes)


@script.inlined
def _round_queries(tile, q, own):
    """Round the query rows to wide blocks."""
    pair = T.meta_var(tile.dot.pair)
    for r in range(tile.lanes):
        for c in range(tile.shape.d):
            own.query[c, r] = q[(*tile.query_row(r), c)]
    own.unknown[tile.all] = tile.every(T.int32(0))
    for e in range(tile.shape.blocks):
        own.power[tile.all] = tile.every(T.int32(0))
        for c in range(tile.width(e)):
            own.power[tile.all] = T.max(
                own.power[tile.all], magnitude_bits(own.query[e * BLOCK + c, tile.all], tile.lanes)
            )
        own.unknown[tile.all] = T.max(own.unknown[tile.all], own.power[tile.all])
        own.exponents[e, tile.all] = wide_exponent(
            T.min(own.power[tile.all], tile.every(T.reinterpret("int32", T.float32(INT8_MAX)))), tile.lanes
        )
        own.powers[e, tile.all] = power_of_two(own.exponents[e, tile.all], tile.lanes)
        for c in range(tile.width(e) // pair):
            own.mantissas[e * (BLOCK // pair) + c, tile.all] = tile.dot.packed(
                [
                    _integer(tile, own, bounded(own.query[e * BLOCK + c * pair + i, tile.all], tile.lanes), e)
                    for i in range(pair)
                ]
            )
    _find_range(own, 0, own.exponents, tile.all, tile.lanes)


@script.inlined
def _find_range(own, at, exponents, lanes, count):
    """Write the least and the largest of the exponents of all blocks to own.least[at] and own.largest[at]."""
    own.least[at] = 127
    own.largest[at] = -128
    for e in T.unroll(exponents.shape[0]):
        own.least[at] = T.min(own.least[at], _reduced("smin", exponents[e, lanes], count))
        own.largest[at] = T.max(own.largest[at], _reduced("smax", exponents[e, lanes], count))


def _reduced(how: str, values: Expr, lanes: int) -> Expr:
    return intrinsic("int32", f"llvm.vector.reduce.{how}.v{lanes}i32", values)


@script.inlined
def _multiply_keys(tile, plain, own, k):
    """Write the products of tile.keys keys of the block with all query rows to own.totals."""
    pair = T.meta_var(tile.dot.pair)
    row = T.meta_var(tile.shape.d // pair)
    totals = T.meta_var(own.totals[: tile.keys])
    script.each(_begin_total, totals, tile)
    for e in T.unroll(tile.shape.blocks):
        multiply(
            tile,
            own,
            tile.keys,
            (own.mantissas, e * (BLOCK // pair)),
            tile.width(e) // pair,
            (k * row + e * (BLOCK // pair), 1, row),
        )
        if plain:
            script.each(_add_plain_block, totals, tile, own, e, k)
        else:
            script.each(_add_block, totals, tile, own, e, k)


@script.inlined
def _begin_total(tile, total, _u):
    total[tile.all] = tile.every(T.float32(-0.0))  # plus a number it is that number


@script.inlined
def _add_block(tile, own, e, k, total, u):
    # The sum of two exponents may leave those of normal numbers.
    own.power[tile.all] = T.max(
        T.min(own.exponents[e, tile.all] + tile.every(own.others[e, k + u]), tile.every(T.int32(127))),
        tile.every(T.int32(-126)),
    )
    total[tile.all] = total[tile.all] + fence(
        f"float32x{tile.lanes}",
        cast("float32", own.sums[u][tile.all], tile.lanes) * power_of_two(own.power[tile.all], tile.lanes),
    )


@script.inlined
def _add_plain_block(tile, own, e, k, total, u):
    # The product is exact, so that it may be contracted with the sum.
    total[tile.all] = total[tile.all] + cast("float32", own.sums[u][tile.all], tile.lanes) * (
        own.powers[e, tile.all] * tile.every(own.key_powers[e, k + u])
    )


@script.inlined
def _keep_plain_logits(tile, own, j, total, u):
    total[tile.all] = total[tile.all] * tile.every(T.float32(tile.shape.factor))
    own.most[tile.all] = T.max(total[tile.all], own.most[tile.all])
    own.logits[j + u, tile.all] = total[tile.all]


@script.inlined
def _keep_logits(tile, own, j, total, u):
    """Keep the logits of a key: minus infinity, whose numerator is 0, where a lane does not see it."""
    total[tile.all] = T.Select(
        T.bitwise_and(own.power[tile.all], tile.every(T.shift_left(T.int32(1), u))) != tile.every(T.int32(0)),
        total[tile.all] * tile.every(own.factors[(j + u) % BLOCK]),
        tile.every(T.reinterpret("float32", T.int32(MINUS_INFINITY))),
    )
    # T.max may lose a NaN; `unknown` remembers it.
    own.unknown[tile.all] = T.max(own.unknown[tile.all], magnitude_bits(total[tile.all], tile.lanes))
    own.most[tile.all] = T.max(total[tile.all], own.most[tile.all])
    own.logits[j + u, tile.all] = total[tile.all]


def _is_seen(tile: ExactTile, own: Any, block: Expr) -> Expr:
    """Return whether a lane sees a row of a block."""
    return _reduced("or", own.seen[block, tile.all], tile.lanes) != 0


def _is_plain(tile: ExactTile, own: Any, block: Expr) -> Expr:
    """Return whether all lanes see a block whose logits are finite, by powers of two that are normal."""
    # The least exponent of a NaN lies below those of numbers.
    return T.And(
        T.And(_reduced("and", own.seen[block, tile.all], tile.lanes) == -1, own.least[1] >= LEAST_EXPONENT),
        T.And(own.least[0] + own.least[1] >= -126, own.largest[0] + own.largest[1] <= tile.shape.highest),
    )


@script.inlined
def _multiply_block(tile, keys, own, block):
    """Write the logits of a block of 32 keys."""
    for k in range(BLOCK):
        read_exponents(tile, keys, own, block * BLOCK, k)
        for c in range(tile.shape.d // tile.run):
            own.cached[vector(k * (tile.shape.d // tile.run) + c, tile.run // tile.dot.pair)] = tile.dot.widened(
                keys[tile.cached(block * BLOCK + k, ramp(c * tile.run, tile.run))], tile.run
            )
    _find_range(own, 1, own.others, ROWS, BLOCK)
    if _is_plain(tile, own, block):
        for e in T.unroll(tile.shape.blocks):
            own.key_powers[e, ROWS] = power_of_two(own.others[e, ROWS], BLOCK)
        _multiply_all_keys(tile, True, own, block)
    else:
        # A key's block with a NaN has zero mantissas, so its product does not show the NaN.
        own.factors[ROWS] = T.Broadcast(T.float32(tile.shape.factor), BLOCK)
        for e in range(tile.shape.blocks):
            own.factors[ROWS] = T.Select(
                own.others[e, ROWS] == T.Broadcast(T.int32(NAN_EXPONENT), BLOCK),
                T.Broadcast(not_a_number(), BLOCK),
                own.factors[ROWS],
            )
        _multiply_all_keys(tile, False, own, block)


@script.inlined
def _multiply_all_keys(tile, plain, own, block):
    for part in range(BLOCK // tile.keys):
        k = T.meta_var(part * tile.keys)
        _multiply_keys(tile, plain, own, k)
        if plain:
            script.each(_keep_plain_logits, own.totals[: tile.keys], tile, own, block * BLOCK + k)
        else:
            own.power[tile.all] = T.shift_right(own.seen[block, tile.all], tile.every(k))
            script.each(_keep_logits, own.totals[: tile.keys], tile, own, block * BLOCK + k)


@script.inlined
def _weigh(read, tile, own, table, block):
    """Write the numerators of a block, and add their sums to own.count."""
    halves = T.meta_var(tile.lanes // LANES)
    own.top[tile.all] = tile.every(T.int32(0))
    # All first, so that those whose knots are loaded one by one are in memory.
    for k in range(BLOCK):
        for half in T.unroll(halves):
            own_lanes = T.meta_var(vector(half, LANES))
            round_logits(own, k * halves + half, own.logits[block * BLOCK + k, own_lanes], own.most[own_lanes])
    for k in range(BLOCK):
        for half in T.unroll(halves):
            own_lanes = T.meta_var(vector(half, LANES))
            numerators(read, table, own, k * halves + half)
            own.weights[k, own_lanes] = cast("float32", own.power[ramp(0, LANES)], LANES)
            # 32 numerators of at most 2^24 fit int32.
            own.top[own_lanes] = own.top[own_lanes] + own.power[ramp(0, LANES)]
    own.count[tile.all] = own.count[tile.all] + cast("int64", own.top[tile.all], tile.lanes)


@script.inlined
def _scale_weights(tile, dot, own, e):
    """Round a block's numerators, times the powers of two of the values' exponents, to a wide block of each lane."""
    own.top[tile.all] = tile.every(T.int32(0))
    for k in range(BLOCK):
        own.scaled[k, tile.all] = own.weights[k, tile.all] * tile.every(own.factors[k])
        own.top[tile.all] = T.max(own.top[tile.all], T.reinterpret(f"int32x{tile.lanes}", own.scaled[k, tile.all]))
    own.exponents[e, tile.all] = wide_exponent(own.top[tile.all], tile.lanes)
    for k in range(BLOCK // dot.pair):
        own.integers[k, tile.all] = dot.packed(
            [_integer(tile, own, own.scaled[k * dot.pair + i, tile.all], e) for i in range(dot.pair)]
        )


def _columns(tile: ExactTile, values: Any, row: Expr, c: Expr) -> Expr:
    """Return columns of cached rows from `row` on, as many as an int32 has factors: their columns are in turn."""
    rows = [values[tile.cached(row + i, ramp(c * tile.run, tile.run))] for i in range(tile.dot.pair)]
    return tile.dot.packed([cast("int32", columns, tile.run) for columns in rows])


@script.inlined
def _add_values(tile, values, own, block):
    """Add a block of values, weighted, to own.out, whose columns have a lane for each query row."""
    for k in range(BLOCK // tile.dot.pair):
        for i in T.unroll(tile.dot.pair):
            read_exponents(tile, values, own, block * BLOCK, k * tile.dot.pair + i)
        for c in range(tile.shape.d // tile.run):
            own.cached[vector(k * (tile.shape.d // tile.run) + c, tile.run)] = _columns(
                tile, values, block * BLOCK + k * tile.dot.pair, c
            )
    for e in range(tile.shape.blocks):
        own.columns[e, tile.all] = T.bitwise_or(
            own.columns[e, tile.all], T.bitwise_and(own.seen[block, tile.all], tile.every(_unknowns(own, e)))
        )
        # From -126 on the power is normal.
        own.factors[ROWS] = power_of_two(
            T.max(own.others[e, ROWS] - T.Broadcast(T.int32(exact.EXP_BITS), BLOCK), T.Broadcast(T.int32(-126), BLOCK)),
            BLOCK,
        )
        _scale_weights(tile, tile.dot, own, e)
        for piece in range(tile.width(e) // tile.columns):
            c = T.meta_var(e * BLOCK + piece * tile.columns)
            multiply(tile, own, tile.columns, (own.integers, 0), BLOCK // tile.dot.pair, (c, tile.shape.d, 1))
            # Blocks are added in float32 in the order of the cache. The fence rounds the product before the addition.
            script.each(_add_column, own.sums[: tile.columns], tile, own, e, c)


@script.inlined
def _add_column(tile, own, e, c, sums, u):
    own.out[c + u, tile.all] = own.out[c + u, tile.all] + fence(
        f"float32x{tile.lanes}",
        cast("float32", sums[tile.all], tile.lanes) * power_of_two(own.exponents[e, tile.all], tile.lanes),
    )


def _unknowns(own: Any, e: Expr) -> Expr:
    """Return which rows of a block have an exponent that is NaN, as bits."""
    bits = T.shift_left(T.Broadcast(T.int32(1), BLOCK), T.Ramp(T.int32(0), T.int32(1), BLOCK))
    found = own.others[e, ROWS] == T.Broadcast(T.int32(NAN_EXPONENT), BLOCK)
    return _reduced("or", T.Select(found, bits, T.Broadcast(T.int32(0), BLOCK)), BLOCK)


@script.inlined
def _finish(tile, y, own):
    """Write the results. A maximum that is not finite makes all of a row NaN, a NaN of a value its block of columns."""
    own.most[tile.all] = T.Select(
        T.Or(
            own.unknown[tile.all] > tile.every(T.int32(INFINITY)),
            magnitude_bits(own.most[tile.all], tile.lanes) >= tile.every(T.int32(INFINITY)),
        ),
        tile.every(not_a_number()),
        tile.every(T.float32(1))
        / (cast("float32", own.count[tile.all], tile.lanes) * tile.every(T.float32(2.0**-exact.EXP_BITS))),
    )
    for c in range(tile.shape.d):
        own.out[c, tile.all] = T.Select(
            own.columns[c // BLOCK, tile.all] != tile.every(T.int32(0)),
            tile.every(not_a_number()),
            own.out[c, tile.all] * own.most[tile.all],
        )
    for r in range(T.min(tile.lanes, tile.total - tile.first)):
        for c in range(tile.shape.d):
            y[(*tile.query_row(r), c)] = own.out[c, r]


@script.inlined
def _attend(read, tile, o, seen, rows):
    """Write the results of a tile, of which no row sees more than `rows` cached ones."""
    own = tile_buffers(tile.shape, tile.lanes, tile.dot.pair, seen.begin.shape[1])
    find_ranges(tile, seen, own)
    _round_queries(tile, o.q, own)
    own.most[tile.all] = tile.every(T.reinterpret("float32", T.int32(MINUS_INFINITY)))
    for block in range((rows + BLOCK - 1) // BLOCK):
        see(tile, own, block)
        if _is_seen(tile, own, block):
            _multiply_block(tile, o.keys, own, block)
    own.count[tile.all] = T.Broadcast(T.int64(0), tile.lanes)
    for c in range(tile.shape.d):
        own.out[c, tile.all] = tile.every(T.float32(0))
    for e in range(tile.shape.blocks):
        own.columns[e, tile.all] = tile.every(T.int32(0))
    for block in range((rows + BLOCK - 1) // BLOCK):
        if _is_seen(tile, own, block):
            _weigh(read, tile, own, o.table, block)
            _add_values(tile, o.values, own, block)
    _finish(tile, o.y, own)


@script.kernel
def exact_rows_attention(
    query: HeadShape, cache: HeadShape, scale: float, window: int | None, isa: InstructionSet = PORTABLE
) -> PrimFunc:
    """Return exact attention of rows that share a cache: float32 [B, Hq, 1, D].

    query float32 [B, Hq, 1, D], int8 rows [V, Hkv, S, .], position int64 [B], window: as `rows_attention` has them.
    Parallel over key/value heads and tiles of query rows.
    """
    read = read_knots(isa)
    (b, hq, _, d), (videos, hkv, s, _) = query, cache
    share, group = b // videos, hq // hkv
    shape = ExactShape(d, s, None, float(exact.logit_factor(scale)), isa)
    # With AVX-512 two registers of query rows share what is loaded of keys and values.
    most = 2 * LANES if isa.float_lanes == LANES and share * group > LANES else LANES
    size, knots, tiles = d + shape.blocks, exact.EXP_KNOTS + 1, -(-share * group // most)
    items = videos * hkv * tiles
    loop = T.parallel if items > 1 and b * hq * s * d >= PARALLEL_CACHE_ELEMENTS else T.serial

    @script.prim_func(private=True, s_tir=True)
    def attend_exact_rows(
        q: T.Buffer((b, hq, 1, d), "float32"),
        keys: T.Buffer((videos, hkv, s, size), "int8"),
        values: T.Buffer((videos, hkv, s, size), "int8"),
        position: T.Buffer((b,), "int64"),
        table: T.Buffer((knots,), "int32"),
        y: T.Buffer((b, hq, 1, d), "float32"),
    ):
        for item in loop(items):
            with T.sblock("rows"):
                script.access([q, keys, values, position, table], [y])
                active = active_rows(share)
                seen = seen_ranges(share, window)
                video: T.let = item // (hkv * tiles)
                h: T.let = item // tiles % hkv
                first: T.let = item % tiles * most
                find_active(active, seen, position, window, s, y, video * share, h * group, group)
                total: T.let = active.count[0] * group
                place = T.meta_var((shape, active, video, video * share, h, group, first, total))
                o = script.temporaries(q=q, keys=keys, values=values, table=table, y=y)
                rows: T.let = seen.last[0]
                if most > LANES and total - first > LANES:
                    _attend(read, ExactTile(most, *place), o, seen, rows)
                elif total > first:
                    _attend(read, ExactTile(LANES, *place), o, seen, rows)

    return attend_exact_rows
