"""Exact attention of several rows over one cache: the lanes of a vector are rows of a video and their query heads.

A block of keys, and of values, becomes int32 once for 16 query rows. Each lane computes what `exact_attention` computes
for its row, in the same order, so the bits are the same.
"""

from dataclasses import dataclass
from typing import Any

from tvm.script import tirx as T
from tvm.tirx import PrimFunc

from fastcar_compile.codegen.tvm.isa import PORTABLE, InstructionSet
from fastcar_compile.codegen.tvm.kernels import HeadShape, script
from fastcar_compile.codegen.tvm.kernels.attention.decode import PARALLEL_CACHE_ELEMENTS
from fastcar_compile.codegen.tvm.kernels.attention.exact import MINUS_INFINITY
from fastcar_compile.codegen.tvm.kernels.attention.exact_shape import LANES, UNSEEN, ExactShape, wide_exponent
from fastcar_compile.codegen.tvm.kernels.attention.exact_values import numerators
from fastcar_compile.codegen.tvm.kernels.attention.rows import find_active, see
from fastcar_compile.codegen.tvm.kernels.cache import bounded, power_of_two
from fastcar_compile.codegen.tvm.kernels.linear.activations import read_knots
from fastcar_compile.codegen.tvm.kernels.linear.tiles import active_rows
from fastcar_compile.codegen.tvm.kernels.tas import INFINITY, NOT_A_NUMBER
from fastcar_compile.codegen.tvm.kernels.vectors import Expr, cast, fence, magnitude_bits, ramp, vector
from fastcar_compile.ir import exact
from fastcar_compile.ir.ops.operator import BLOCK, INT8_MAX
from fastcar_compile.ir.ops.operator import NOT_A_NUMBER as NAN_EXPONENT

# The annotations of a T.prim_func are calls, which TVMScript evaluates.
# pyright: reportInvalidTypeForm=false

EVERY = ramp(0, LANES)
"""All lanes of a vector."""

KEYS = 4
"""Keys that meet a vector of the query together."""


def _all(value: Expr) -> Expr:
    return T.Broadcast(value, LANES)


@dataclass(frozen=True)
class _Tile:
    """16 of the `total` query rows of a key/value head: row after row of the active ones, all `group` heads of each.

    Those past the last one are copies of it.
    """

    shape: ExactShape
    active: Any
    video: Expr
    rows: Expr
    h: Expr
    group: int
    first: Expr
    total: Expr

    def number(self, lane: Expr) -> Expr:
        """Return the place among the active rows."""
        return T.min(self.first + lane, self.total - 1) // self.group

    def query_row(self, lane: Expr) -> tuple[Expr, Expr, Expr]:
        head = T.min(self.first + lane, self.total - 1) % self.group
        return self.rows + self.active.rows[self.number(lane)], self.h * self.group + head, 0

    def width(self, e: Expr) -> Expr:
        """Return the columns of a block."""
        return BLOCK if self.shape.d % BLOCK == 0 else T.min(BLOCK, self.shape.d - e * BLOCK)

    @property
    def run(self) -> int:
        """Columns whose sums are in registers; divides every block."""
        return next(v for v in (8, 4, 2, 1) if self.shape.d % v == 0)


@script.inlined
def _round_queries(tile, q, own):
    """Round the query rows to wide blocks."""
    for r in range(LANES):
        for c in range(tile.shape.d):
            own.query[c, r] = q[(*tile.query_row(r), c)]
    own.unknown[EVERY] = _all(T.int32(0))
    for e in range(tile.shape.blocks):
        own.top[EVERY] = _all(T.int32(0))
        for c in range(tile.width(e)):
            own.top[EVERY] = T.max(own.top[EVERY], magnitude_bits(own.query[e * BLOCK + c, EVERY], LANES))
        own.unknown[EVERY] = T.max(own.unknown[EVERY], cast("int32", own.top[EVERY] > _all(T.int32(INFINITY)), LANES))
        own.exponents[e, EVERY] = wide_exponent(
            T.min(own.top[EVERY], _all(T.reinterpret("int32", T.float32(INT8_MAX)))), LANES
        )
        for c in range(tile.width(e)):
            own.mantissas[e * BLOCK + c, EVERY] = cast(
                "int32",
                T.nearbyint(
                    bounded(own.query[e * BLOCK + c, EVERY], LANES)
                    * power_of_two(_all(T.int32(0)) - own.exponents[e, EVERY], LANES)
                ),
                LANES,
            )


@script.inlined
def _widen(tile, cache, own, start, count):
    """Write the mantissas of a block of cached rows as int32."""
    for k in range(count):
        for c in T.vectorized(tile.shape.d):
            own.cached[k, c] = T.Cast("int32", cache[tile.video, tile.h, start + k, c])


@script.inlined
def _multiply_four(tile, keys, own, start, k):
    """Write the sums of four keys of the block with all lanes to own.totals."""
    for u in T.unroll(KEYS):
        own.totals[vector(u, LANES)] = _all(T.float32(0))
    for e in range(tile.shape.blocks):
        for u in T.unroll(KEYS):
            own.acc[vector(u, LANES)] = _all(T.int32(0))
        for c in range(tile.width(e)):
            for u in T.unroll(KEYS):
                own.acc[vector(u, LANES)] = own.acc[vector(u, LANES)] + own.mantissas[e * BLOCK + c, EVERY] * _all(
                    own.cached[k + u, e * BLOCK + c]
                )
        for u in T.unroll(KEYS):
            exponent: T.let = T.Cast(
                "int32", keys[tile.video, tile.h, T.min(start + k + u, tile.shape.s - 1), tile.shape.d + e]
            )
            own.power[EVERY] = T.max(
                T.min(own.exponents[e, EVERY] + _all(exponent), _all(T.int32(127))), _all(T.int32(-126))
            )
            own.totals[vector(u, LANES)] = own.totals[vector(u, LANES)] + fence(
                f"float32x{LANES}",
                cast("float32", own.acc[vector(u, LANES)], LANES) * power_of_two(own.power[EVERY], LANES),
            )
            # A key's block with a NaN has zero mantissas, so its product does not show the NaN.
            if exponent == NAN_EXPONENT:
                own.totals[vector(u, LANES)] = _all(T.reinterpret("float32", T.int32(NOT_A_NUMBER)))


@script.inlined
def _keep_logits(tile, own, j, k, u):
    """Keep the logits of a key: NaN where a lane does not see it."""
    seen = T.meta_var(T.bitwise_and(T.shift_right(own.seen[EVERY], _all(k + u)), _all(T.int32(1))) != _all(T.int32(0)))
    own.totals[vector(u, LANES)] = own.totals[vector(u, LANES)] * _all(T.float32(tile.shape.factor))
    own.unknown[EVERY] = T.Select(
        T.And(seen, magnitude_bits(own.totals[vector(u, LANES)], LANES) > _all(T.int32(INFINITY))),
        _all(T.int32(1)),
        own.unknown[EVERY],
    )
    own.most[EVERY] = T.Select(seen, T.max(own.most[EVERY], own.totals[vector(u, LANES)]), own.most[EVERY])
    own.logits[j, EVERY] = T.Select(
        seen, own.totals[vector(u, LANES)], _all(T.reinterpret("float32", T.int32(NOT_A_NUMBER)))
    )


@script.inlined
def _multiply_block(tile, keys, ranges, own, bits, start, count):
    """Write the logits of a block of 32 keys."""
    see(tile.active, ranges, tile.rows, start, bits)
    for r in range(LANES):
        own.seen[r] = bits[tile.number(r)]
    _widen(tile, keys, own, start, count)
    for part in range(BLOCK // KEYS):
        _multiply_four(tile, keys, own, start, part * KEYS)
        for u in T.unroll(KEYS):
            _keep_logits(tile, own, start + part * KEYS + u, part * KEYS, u)


@script.inlined
def _weigh(read, own, table, rows):
    """Write the numerators of whole blocks, UNSEEN where the logit is NaN, and their sums."""
    own.count[EVERY] = T.Broadcast(T.int64(0), LANES)
    for j in range((rows + BLOCK - 1) // BLOCK * BLOCK):
        numerators(read, table, own, own.logits[j, EVERY], own.most[EVERY])
        own.weights[j, EVERY] = own.power[EVERY]
        own.count[EVERY] = own.count[EVERY] + cast("int64", T.max(own.power[EVERY], _all(T.int32(0))), LANES)


@script.inlined
def _scale_weights(tile, values, own, start, count, e):
    """Round a block's numerators, times the powers of two of the values' exponents, to a wide block of each lane."""
    own.top[EVERY] = _all(T.int32(0))
    for k in range(count):
        exponent: T.let = T.Cast("int32", values[tile.video, tile.h, start + k, tile.shape.d + e])
        if exponent == NAN_EXPONENT:
            # weight - UNSEEN is 0 for a row that is not seen and positive for one that is.
            own.columns[e, EVERY] = T.max(own.columns[e, EVERY], own.weights[start + k, EVERY] - _all(T.int32(UNSEEN)))
        own.scaled[k, EVERY] = cast("float32", T.max(own.weights[start + k, EVERY], _all(T.int32(0))), LANES) * _all(
            power_of_two(T.max(exponent - exact.EXP_BITS, -126))
        )
        own.top[EVERY] = T.max(own.top[EVERY], magnitude_bits(own.scaled[k, EVERY], LANES))
    own.power[EVERY] = wide_exponent(own.top[EVERY], LANES)
    for k in range(count):
        own.integers[k, EVERY] = cast(
            "int32", T.nearbyint(own.scaled[k, EVERY] * power_of_two(_all(T.int32(0)) - own.power[EVERY], LANES)), LANES
        )


@script.inlined
def _add_values(tile, values, own, start, count):
    """Add a block of values, weighted, to own.out, whose columns have a lane for each query row."""
    _widen(tile, values, own, start, count)
    for e in range(tile.shape.blocks):
        _scale_weights(tile, values, own, start, count, e)
        for piece in range(tile.width(e) // tile.run):
            for u in T.unroll(tile.run):
                own.sums[vector(u, LANES)] = _all(T.int32(0))
            for k in range(count):
                for u in T.unroll(tile.run):
                    own.sums[vector(u, LANES)] = own.sums[vector(u, LANES)] + own.integers[k, EVERY] * _all(
                        own.cached[k, e * BLOCK + piece * tile.run + u]
                    )
            # Blocks are added in float32 in the order of the cache. The fence rounds the product before the addition.
            for u in T.unroll(tile.run):
                own.out[e * BLOCK + piece * tile.run + u, EVERY] = own.out[
                    e * BLOCK + piece * tile.run + u, EVERY
                ] + fence(
                    f"float32x{LANES}",
                    cast("float32", own.sums[vector(u, LANES)], LANES) * power_of_two(own.power[EVERY], LANES),
                )


@script.inlined
def _finish(tile, y, own):
    """Write the results. A maximum that is not finite makes all of a row NaN, a NaN of a value its block of columns."""
    own.most[EVERY] = T.Select(
        T.Or(own.unknown[EVERY] > _all(T.int32(0)), magnitude_bits(own.most[EVERY], LANES) >= _all(T.int32(INFINITY))),
        _all(T.reinterpret("float32", T.int32(NOT_A_NUMBER))),
        _all(T.float32(1)) / (cast("float32", own.count[EVERY], LANES) * _all(T.float32(2.0**-exact.EXP_BITS))),
    )
    for c in range(tile.shape.d):
        own.out[c, EVERY] = T.Select(
            own.columns[c // BLOCK, EVERY] > _all(T.int32(0)),
            _all(T.reinterpret("float32", T.int32(NOT_A_NUMBER))),
            own.out[c, EVERY] * own.most[EVERY],
        )
    for r in range(T.min(LANES, tile.total - tile.first)):
        for c in range(tile.shape.d):
            y[(*tile.query_row(r), c)] = own.out[c, r]


def _buffers(shape: ExactShape) -> Any:
    """Allocate the temporaries of a tile: a lane for each query row."""
    held, n = -(-shape.s // BLOCK) * BLOCK, shape.blocks
    return script.temporaries(
        # The query rows, and their wide blocks.
        query=(shape.d, LANES, "float32"),
        mantissas=(shape.d, LANES, "int32"),
        exponents=(n, LANES, "int32"),
        # 1 in `unknown` where a row has a NaN; its largest logit, and in the end the inverse of the sum of numerators.
        unknown=(LANES, "int32"),
        most=(LANES, "float32"),
        count=(LANES, "int64"),
        # Of all cached rows.
        logits=(held, LANES, "float32"),
        weights=(held, LANES, "int32"),
        # A block of cached rows: mantissas, which lanes see which, and its numerators as wide blocks.
        cached=(BLOCK, shape.d, "int32"),
        seen=(LANES, "int32"),
        scaled=(BLOCK, LANES, "float32"),
        integers=(BLOCK, LANES, "int32"),
        # Sums in registers.
        acc=(KEYS * LANES, "int32"),
        totals=(KEYS * LANES, "float32"),
        sums=(8 * LANES, "int32"),
        top=(LANES, "int32"),
        power=(LANES, "int32"),
        units=(LANES, "int32"),
        low=(LANES, "int32"),
        high=(LANES, "int32"),
        # The weighted values, and where a block of columns is NaN.
        out=(shape.d, LANES, "float32"),
        columns=(n, LANES, "int32"),
    )


@script.kernel
def exact_spans_attention(
    query: HeadShape, cache: HeadShape, scale: float, spans: int, isa: InstructionSet = PORTABLE
) -> PrimFunc:
    """Return exact attention over ranges of cache rows: float32 [B, Hq, 1, D].

    query float32 [B, Hq, 1, D], int8 rows [V, Hkv, S, .], ranges int64 [B, spans, 2]: begin and end of those that a row
    of the batch sees. A row that sees nothing is zero. Row b reads row set b // (B / V). Parallel over key/value heads
    and tiles of 16 query rows.
    """
    read = read_knots(isa)
    (b, hq, _, d), (videos, hkv, s, _) = query, cache
    share, group = b // videos, hq // hkv
    shape = ExactShape(d, s, None, float(exact.logit_factor(scale)))
    size, knots, tiles = d + shape.blocks, exact.EXP_KNOTS + 1, -(-share * group // LANES)
    items = videos * hkv * tiles
    loop = T.parallel if items > 1 and b * hq * s * d >= PARALLEL_CACHE_ELEMENTS else T.serial

    @script.prim_func(private=True, s_tir=True)
    def attend_exact_rows(
        q: T.Buffer((b, hq, 1, d), "float32"),
        keys: T.Buffer((videos, hkv, s, size), "int8"),
        values: T.Buffer((videos, hkv, s, size), "int8"),
        ranges: T.Buffer((b, spans, 2), "int64"),
        table: T.Buffer((knots,), "int32"),
        y: T.Buffer((b, hq, 1, d), "float32"),
    ):
        for item in loop(items):
            with T.sblock("rows"):
                script.access([q, keys, values, ranges, table], [y])
                active = active_rows(share)
                own = _buffers(shape)
                end = T.alloc_buffer((2,), "int32")
                bits = T.alloc_buffer((share + 1,), "int32")
                video: T.let = item // (hkv * tiles)
                h: T.let = item // tiles % hkv
                first: T.let = item % tiles * LANES
                find_active(active, ranges, y, video * share, h * group, group, end)
                total: T.let = active.count[0] * group
                if first < total:
                    tile = T.meta_var(_Tile(shape, active, video, video * share, h, group, first, total))
                    rows: T.let = T.min(end[0], s)
                    _round_queries(tile, q, own)
                    own.most[EVERY] = _all(T.reinterpret("float32", T.int32(MINUS_INFINITY)))
                    for block in range((rows + BLOCK - 1) // BLOCK):
                        count = T.meta_var(T.min(rows - block * BLOCK, BLOCK))
                        _multiply_block(tile, keys, ranges, own, bits, block * BLOCK, count)
                    _weigh(read, own, table, rows)
                    for c in range(d):
                        own.out[c, EVERY] = _all(T.float32(0))
                    for e in range(shape.blocks):
                        own.columns[e, EVERY] = _all(T.int32(0))
                    for block in range((rows + BLOCK - 1) // BLOCK):
                        count = T.meta_var(T.min(rows - block * BLOCK, BLOCK))
                        _add_values(tile, values, own, block * BLOCK, count)
                    _finish(tile, y, own)

    return attend_exact_rows
