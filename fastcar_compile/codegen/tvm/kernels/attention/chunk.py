"""Attention of a prefill chunk: many query rows over the filled part of the cache, as two small matrix products."""

# The annotations of a T.prim_func are calls, which TVMScript evaluates.
# pyright: reportInvalidTypeForm=false

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tvm.script import tirx as T
from tvm.tirx import PrimFunc

from fastcar_compile.codegen.tvm.isa import PORTABLE, InstructionSet
from fastcar_compile.codegen.tvm.kernels import OPAQUE, HeadShape, script
from fastcar_compile.codegen.tvm.kernels.attention.decode import filled_rows
from fastcar_compile.codegen.tvm.kernels.attention.exponential import LogitRule, exp_not_positive
from fastcar_compile.codegen.tvm.kernels.attention.online_softmax import context_parts
from fastcar_compile.codegen.tvm.kernels.attention.softmax_block import LOWEST
from fastcar_compile.codegen.tvm.kernels.cache.elements import RowFormat, row_at
from fastcar_compile.codegen.tvm.kernels.script import inlined, kernel
from fastcar_compile.codegen.tvm.kernels.simd.vectors import Expr
from fastcar_compile.ops.cached import BLOCK as EXPONENT_BLOCK

CHUNK_KEYS = 32
"""Keys of one block: two AVX-512 registers of logits per query row."""


def tile_rows(t: int) -> int:
    """Return the query rows whose products run together. All are of one head, so that a tile never straddles two."""
    return next(r for r in (4, 2, 1) if t % r == 0)


@dataclass(frozen=True)
class _Shape:
    """What is known when the kernel is made: T, S and D, the query rows of a tile, and how logits and rows are read."""

    t: int
    s: int
    tile: int
    rule: LogitRule
    rows_of: RowFormat

    @property
    def d(self) -> int:
        return self.rows_of.dim

    @property
    def width(self) -> int:
        """Columns of the accumulator of a tile."""
        return next(v for v in (32, 16, 8, 4, 2, 1) if self.d % v == 0)


@dataclass(frozen=True)
class _Operands:
    """The arguments of the kernel; y holds the accumulators until the last block."""

    q: Any
    keys: Any
    values: Any
    position: Any
    y: Any


@dataclass(frozen=True)
class _Temporaries:
    """Transposed keys float32 [D, 32], m and l of the part's rows, and per tile: weights, acc, new m, decay, new l."""

    keys: Any
    m: Any
    l: Any  # noqa: E741 (the paper's name)
    weights: Any
    acc: Any
    tile_m: Any
    decay: Any
    tile_l: Any


@dataclass(frozen=True)
class _Tile:
    """Rows i .. of query head `head`, whose m and l begin at `row`, meet the `count` keys from number `start` on."""

    b: Expr
    h: Expr
    head: Expr
    i: Expr
    row: Expr
    start: Expr
    count: Expr


@kernel
def chunk_attention(
    query: HeadShape,
    cache: HeadShape,
    scale: float,
    dtype: str = "float32",
    softcap: float | None = None,
    isa: InstructionSet = PORTABLE,
) -> PrimFunc:
    """Return causal grouped-query attention: row i of query [B, Hq, T, D] sees cache rows 0 .. position + i.

    The result and query are float32 [B, Hq, T, D], keys and values [B, Hkv, S, D] of `dtype`. Online softmax over
    blocks of keys. A block is transposed once for all query rows of its group, so that both products run along
    registers without a sum across lanes. Blocks that no row of a tile sees are skipped. Parallel over key/value heads
    and, where those are few, query rows.
    """
    b, hq, t, d = query
    hkv, s = cache[1], cache[2]
    group, tile = hq // hkv, tile_rows(t)
    shape = _Shape(t, s, tile, LogitRule(scale, softcap), RowFormat(d, dtype, isa))
    size, width = shape.rows_of.size, shape.width
    pieces = context_parts(b * hkv, b * hq * t * s * d // 2)
    parts = next(p for p in range(max(pieces, 1), 0, -1) if (group * t // tile) % p == 0)
    rows = group * t // parts
    loop = T.parallel if pieces else T.serial
    transpose, attend = _transpose_keys(shape), _attend_tile(shape)

    @script.prim_func(private=True, s_tir=True)
    def attend_chunk(
        q: T.Buffer((b, hq, t, d), "float32"),
        keys: T.Buffer((b, hkv, s, size), dtype),
        values: T.Buffer((b, hkv, s, size), dtype),
        position: T.Buffer((1,), "int64"),
        y: T.Buffer((b, hq, t, d), "float32"),
    ):
        T.func_attr({"op_pattern": OPAQUE})
        for item in loop(b * hkv * parts):
            with T.sblock("rows"):
                T.reads(
                    q[0:b, 0:hq, 0:t, 0:d],
                    keys[0:b, 0:hkv, 0:s, 0:size],
                    values[0:b, 0:hkv, 0:s, 0:size],
                    position[0:1],
                )
                T.writes(y[0:b, 0:hq, 0:t, 0:d])
                transposed = T.alloc_buffer((d, CHUNK_KEYS), "float32")
                m = T.alloc_buffer((rows,), "float32")
                l = T.alloc_buffer((rows,), "float32")  # noqa: E741
                weights = T.alloc_buffer((tile * CHUNK_KEYS,), "float32")
                acc = T.alloc_buffer((tile * width,), "float32")
                tile_m = T.alloc_buffer((tile,), "float32")
                decay = T.alloc_buffer((tile,), "float32")
                tile_l = T.alloc_buffer((tile,), "float32")
                o = T.meta_var(_Operands(q, keys, values, position, y))
                temporaries = T.meta_var(_Temporaries(transposed, m, l, weights, acc, tile_m, decay, tile_l))
                bi: T.let = item // (hkv * parts)
                h: T.let = item // parts % hkv
                begin: T.let = item % parts * rows
                seen: T.let = filled_rows(position[0], t - 1, s)
                for r in range(rows):
                    m[r] = T.float32(LOWEST)
                    l[r] = T.float32(0)
                    for c in range(d):
                        y[bi, h * group + (begin + r) // t, (begin + r) % t, c] = T.float32(0)
                # block: keys in order. part: tiles of the group's query rows, which share the transposed keys.
                for block in range((seen + CHUNK_KEYS - 1) // CHUNK_KEYS):
                    start: T.let = block * CHUNK_KEYS
                    transpose(o, transposed, (bi, h), start, seen)
                    for part in range(rows // tile):
                        head: T.let = h * group + (begin + part * tile) // t
                        i: T.let = (begin + part * tile) % t
                        count: T.let = T.min(filled_rows(position[0], i + tile - 1, s) - start, CHUNK_KEYS)
                        if count > 0:
                            attend(o, temporaries, _Tile(bi, h, head, i, part * tile, start, count))
                for r in range(rows):
                    for c in range(d):
                        y[bi, h * group + (begin + r) // t, (begin + r) % t, c] /= l[r]

    return attend_chunk


def _transpose_keys(shape: _Shape) -> Callable[..., None]:
    """Return the macro (o, transposed, (b, h), start, seen): float32 keys from `start` on, one column per key."""
    d, rows_of = shape.d, shape.rows_of

    @inlined
    def transpose(o, transposed, head, start, seen):
        # v: keys, the last one of the cache again past its end. e: exponent blocks. c: elements of a block.
        for v, e in T.grid(CHUNK_KEYS, -(-d // EXPONENT_BLOCK)):
            for c in range(T.min(EXPONENT_BLOCK, d - e * EXPONENT_BLOCK)):
                transposed[e * EXPONENT_BLOCK + c, v] = rows_of.element(
                    row_at(o.keys, head[0], head[1], T.min(start + v, seen - 1)), e * EXPONENT_BLOCK, c
                )

    return transpose


def _attend_tile(shape: _Shape) -> Callable[..., None]:
    """Return the macro (o, temporaries, tile): the tile's rows meet the block of transposed keys and its values."""
    tile_size, d = shape.tile, shape.d
    weigh, add_values = _weigh(shape), _add_values(shape)

    @inlined
    def multiply_keys(o, tmp, tile):
        for r in T.unroll(tile_size):
            for v in T.vectorized(CHUNK_KEYS):
                tmp.weights[r * CHUNK_KEYS + v] = T.float32(0)
        # c: the reduction. r: unrolled, query rows. v: two registers of keys; the logits are in registers.
        for c in range(d):
            for r in T.unroll(tile_size):
                for v in T.vectorized(CHUNK_KEYS):
                    tmp.weights[r * CHUNK_KEYS + v] += o.q[tile.b, tile.head, tile.i + r, c] * tmp.keys[c, v]

    @inlined
    def attend(o, tmp, tile):
        multiply_keys(o, tmp, tile)
        for r in T.unroll(tile_size):
            weigh(o, tmp, tile, r)
        # The sum has one order: key by key, as acc has.
        for v in range(tile.count):
            for r in T.unroll(tile_size):
                tmp.tile_l[r] += tmp.weights[r * CHUNK_KEYS + v]
        for r in T.unroll(tile_size):
            tmp.l[tile.row + r] = tmp.tile_l[r]
        for piece in range(d // shape.width):
            add_values(o, tmp, tile, piece)

    return attend


def _weigh(shape: _Shape) -> Callable[..., None]:
    """Return the macro (o, temporaries, tile, r): row r's logits become weights, its m and decay are updated."""
    s, rule = shape.s, shape.rule

    @inlined
    def weigh(o, tmp, tile, r):
        for v in T.vectorized(CHUNK_KEYS):
            tmp.weights[r * CHUNK_KEYS + v] = T.Select(
                tile.start + v < filled_rows(o.position[0], tile.i + r, s),
                rule.logit(tmp.weights[r * CHUNK_KEYS + v]),
                T.float32(LOWEST),
            )
        tmp.tile_m[r] = T.max(
            T.call_llvm_pure_intrin(
                "float32", "llvm.vector.reduce.fmax", tmp.weights[T.ramp(r * CHUNK_KEYS, 1, CHUNK_KEYS)]
            ),
            tmp.m[tile.row + r],
        )
        tmp.decay[r] = exp_not_positive(tmp.m[tile.row + r] - tmp.tile_m[r])
        tmp.m[tile.row + r] = tmp.tile_m[r]
        tmp.tile_l[r] = tmp.l[tile.row + r] * tmp.decay[r]
        for v in T.vectorized(CHUNK_KEYS):
            tmp.weights[r * CHUNK_KEYS + v] = exp_not_positive(tmp.weights[r * CHUNK_KEYS + v] - tmp.tile_m[r])

    return weigh


def _add_values(shape: _Shape) -> Callable[..., None]:
    """Return the macro (o, temporaries, tile, piece): `width` columns of y are rescaled and get the values."""
    tile_size, width, rows_of = shape.tile, shape.width, shape.rows_of

    @inlined
    def add_values(o, tmp, tile, piece):
        for r in T.unroll(tile_size):
            for c in T.vectorized(width):
                tmp.acc[r * width + c] = o.y[tile.b, tile.head, tile.i + r, piece * width + c] * tmp.decay[r]
        # v: values in order. r: unrolled, query rows. c: columns in registers, widened once per value.
        for v in range(tile.count):
            for r in T.unroll(tile_size):
                for c in T.vectorized(width):
                    tmp.acc[r * width + c] += tmp.weights[r * CHUNK_KEYS + v] * rows_of.element(
                        row_at(o.values, tile.b, tile.h, tile.start + v), piece * width, c
                    )
        for r in T.unroll(tile_size):
            for c in T.vectorized(width):
                o.y[tile.b, tile.head, tile.i + r, piece * width + c] = tmp.acc[r * width + c]

    return add_values
