"""Attention of a prefill chunk: many query rows over the filled part of the cache, as two small matrix products."""

from __future__ import annotations

from tvm.script import tirx as T
from tvm.tirx import PrimFunc

from fastcar_compile.codegen.tvm.isa import PORTABLE, InstructionSet
from fastcar_compile.codegen.tvm.kernels import OPAQUE
from fastcar_compile.codegen.tvm.kernels.attention.decode import filled_rows
from fastcar_compile.codegen.tvm.kernels.attention.exponential import exp_not_positive
from fastcar_compile.codegen.tvm.kernels.attention.online_softmax import context_parts
from fastcar_compile.codegen.tvm.kernels.attention.softmax_block import LOWEST
from fastcar_compile.codegen.tvm.kernels.cache.elements import element
from fastcar_compile.codegen.tvm.kernels.script import kernel
from fastcar_compile.ops.cached import BLOCK as SHARING
from fastcar_compile.ops.cached import row_size

Shape = tuple[int, int, int, int]
BLOCK = 32
"""Keys of one block: two AVX-512 registers of logits per query row."""


def tile_rows(t: int) -> int:
    """Query rows whose products run together; all of one head, so that a tile never straddles two."""
    return next(r for r in (4, 2, 1) if t % r == 0)


@kernel
def chunk_attention(
    query: Shape, cache: Shape, scale: float, dtype: str = "float32", isa: InstructionSet = PORTABLE
) -> PrimFunc:
    """Causal grouped-query attention; query [B, Hq, T, D] row i sees cache [B, Hkv, S, D] rows 0 .. position + i,
    which are of `dtype`.

    Online softmax over blocks of keys. A block is transposed once for all query rows of its group, so that both
    products run along registers without a sum across lanes. Blocks that no row of a tile sees are skipped.
    """
    b, hq, t, d = query
    hkv, s = cache[1], cache[2]
    group, size = hq // hkv, row_size(d, dtype)
    tile = tile_rows(t)
    width = next(v for v in (32, 16, 8, 4, 2, 1) if d % v == 0)
    pieces = context_parts(b * hkv, b * hq * t * s * d // 2)
    wanted = max(pieces, 1)
    parts = next(p for p in range(wanted, 0, -1) if (group * t // tile) % p == 0)
    rows = group * t // parts
    loop = T.parallel if pieces else T.serial

    @T.prim_func(private=True, s_tir=True)
    def attend_chunk(
        q: T.Buffer((b, hq, t, d), "float32"),
        keys: T.Buffer((b, hkv, s, size), dtype),
        values: T.Buffer((b, hkv, s, size), dtype),
        position: T.Buffer((1,), "int64"),
        y: T.Buffer((b, hq, t, d), "float32"),
    ):
        T.func_attr({"tir.noalias": True, "op_pattern": OPAQUE})
        for item in loop(b * hkv * parts):
            with T.sblock("rows"):
                T.reads(
                    q[0:b, 0:hq, 0:t, 0:d],
                    keys[0:b, 0:hkv, 0:s, 0:size],
                    values[0:b, 0:hkv, 0:s, 0:size],
                    position[0:1],
                )
                T.writes(y[0:b, 0:hq, 0:t, 0:d])
                turned = T.alloc_buffer((d, BLOCK), "float32")
                tops = T.alloc_buffer((rows,), "float32")
                totals = T.alloc_buffer((rows,), "float32")
                weights = T.alloc_buffer((tile * BLOCK,), "float32")
                acc = T.alloc_buffer((tile * width,), "float32")
                top = T.alloc_buffer((tile,), "float32")
                kept = T.alloc_buffer((tile,), "float32")
                total = T.alloc_buffer((tile,), "float32")
                bi: T.let = item // (hkv * parts)
                h: T.let = item // parts % hkv
                begin: T.let = item % parts * rows
                seen: T.let = filled_rows(position[0], t - 1, s)
                for r in range(rows):
                    tops[r] = T.float32(LOWEST)
                    totals[r] = T.float32(0)
                    for c in range(d):
                        y[bi, h * group + (begin + r) // t, (begin + r) % t, c] = T.float32(0)
                for block in range((seen + BLOCK - 1) // BLOCK):
                    at: T.let = block * BLOCK
                    for v, e in T.grid(BLOCK, -(-d // SHARING)):
                        for c in range(T.min(SHARING, d - e * SHARING)):
                            turned[e * SHARING + c, v] = element(
                                keys, (bi, h, T.min(at + v, seen - 1)), e * SHARING, c, d, dtype, isa
                            )
                    for part in range(rows // tile):
                        head: T.let = h * group + (begin + part * tile) // t
                        i: T.let = (begin + part * tile) % t
                        count: T.let = T.min(filled_rows(position[0], i + tile - 1, s) - at, BLOCK)
                        if count > 0:
                            for r in T.unroll(tile):
                                for v in T.vectorized(BLOCK):
                                    weights[r * BLOCK + v] = T.float32(0)
                            for c in range(d):
                                for r in T.unroll(tile):
                                    for v in T.vectorized(BLOCK):
                                        weights[r * BLOCK + v] += q[bi, head, i + r, c] * turned[c, v]
                            for r in T.unroll(tile):
                                for v in T.vectorized(BLOCK):
                                    weights[r * BLOCK + v] = T.Select(
                                        at + v < filled_rows(position[0], i + r, s),
                                        weights[r * BLOCK + v] * T.float32(scale),
                                        T.float32(LOWEST),
                                    )
                                top[r] = T.max(
                                    T.call_llvm_pure_intrin(
                                        "float32", "llvm.vector.reduce.fmax", weights[T.ramp(r * BLOCK, 1, BLOCK)]
                                    ),
                                    tops[part * tile + r],
                                )
                                kept[r] = exp_not_positive(tops[part * tile + r] - top[r])
                                tops[part * tile + r] = top[r]
                                total[r] = totals[part * tile + r] * kept[r]
                                for v in T.vectorized(BLOCK):
                                    weights[r * BLOCK + v] = exp_not_positive(weights[r * BLOCK + v] - top[r])
                            for v in range(count):
                                for r in T.unroll(tile):
                                    total[r] += weights[r * BLOCK + v]
                            for r in T.unroll(tile):
                                totals[part * tile + r] = total[r]
                            for piece in range(d // width):
                                for r in T.unroll(tile):
                                    for c in T.vectorized(width):
                                        acc[r * width + c] = y[bi, head, i + r, piece * width + c] * kept[r]
                                for v in range(count):
                                    for r in T.unroll(tile):
                                        for c in T.vectorized(width):
                                            acc[r * width + c] += weights[r * BLOCK + v] * element(
                                                values, (bi, h, at + v), piece * width, c, d, dtype, isa
                                            )
                                for r in T.unroll(tile):
                                    for c in T.vectorized(width):
                                        y[bi, head, i + r, piece * width + c] = acc[r * width + c]
                for r in range(rows):
                    for c in range(d):
                        y[bi, h * group + (begin + r) // t, (begin + r) % t, c] /= totals[r]

    return attend_chunk
