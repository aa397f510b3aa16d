"""Decode and chunk attention over the filled part of the cache."""

from __future__ import annotations

from tvm.script import tirx as T
from tvm.tirx import PrimFunc

from fastcar_compile.lowering.kernels import OPAQUE

Shape = tuple[int, int, int, int]
KEYS = 4
"""Keys whose dot products run together: independent sums that hide the multiply-add latency."""
PARALLEL_ELEMENTS = 1 << 19
_LOWEST = -3.0e38


def attention(query: Shape, cache: Shape, scale: float) -> PrimFunc:
    """Causal grouped-query attention; query [B, Hq, T, D] row i sees cache [B, Hkv, S, D] rows 0 .. position + i.

    Two passes over the filled rows, whose number is rounded up to KEYS with weight zero; time grows with the
    position and not with S. Parallel over heads and rows where S * D is large enough.
    """
    b, hq, t, d = query
    hkv, s = cache[1], cache[2]
    group = hq // hkv
    lanes = next(v for v in (16, 8, 4, 2, 1) if d % v == 0)
    padded = (s + KEYS - 1) // KEYS * KEYS
    loop = T.parallel if b * hq * t * s * d >= PARALLEL_ELEMENTS else T.serial

    @T.prim_func(private=True, s_tir=True)
    def attend(
        q: T.Buffer((b, hq, t, d), "float32"),
        keys: T.Buffer((b, hkv, s, d), "float32"),
        values: T.Buffer((b, hkv, s, d), "float32"),
        position: T.Buffer((1,), "int64"),
        y: T.Buffer((b, hq, t, d), "float32"),
    ):
        T.func_attr({"tir.noalias": True, "op_pattern": OPAQUE})
        for fused in loop(b * hq * t):
            with T.sblock("head"):
                T.reads(q[0:b, 0:hq, 0:t, 0:d], keys[0:b, 0:hkv, 0:s, 0:d], values[0:b, 0:hkv, 0:s, 0:d], position[0:1])
                T.writes(y[0:b, 0:hq, 0:t, 0:d])
                weights = T.alloc_buffer((padded,), "float32")
                dot = T.alloc_buffer((KEYS * lanes,), "float32", scope="local")
                acc = T.alloc_buffer((d,), "float32", scope="local")
                stat = T.alloc_buffer((2,), "float32", scope="local")
                bi: T.int32 = fused // (hq * t)
                h: T.int32 = fused // t % hq
                i: T.int32 = fused % t
                filled: T.int32 = T.min(T.Cast("int32", position[0]) + i + 1, s)
                stat[0] = T.float32(_LOWEST)
                for block in range((filled + KEYS - 1) // KEYS):
                    for r in T.unroll(KEYS):
                        for v in T.vectorized(lanes):
                            dot[r * lanes + v] = T.float32(0)
                    for c in T.unroll(d // lanes):
                        for r in T.unroll(KEYS):
                            for v in T.vectorized(lanes):
                                dot[r * lanes + v] += (
                                    q[bi, h, i, c * lanes + v]
                                    * keys[bi, h // group, T.min(block * KEYS + r, s - 1), c * lanes + v]
                                )
                    for r in T.unroll(KEYS):
                        if lanes >= 16:
                            for v in T.vectorized(8):
                                dot[r * lanes + v] += dot[r * lanes + v + 8]
                        if lanes >= 8:
                            for v in T.vectorized(4):
                                dot[r * lanes + v] += dot[r * lanes + v + 4]
                        for v in T.unroll(min(lanes, 4) - 1):
                            dot[r * lanes] += dot[r * lanes + v + 1]
                        weights[block * KEYS + r] = T.if_then_else(
                            block * KEYS + r < filled, dot[r * lanes] * T.float32(scale), T.float32(_LOWEST)
                        )
                        stat[0] = T.max(stat[0], weights[block * KEYS + r])
                stat[1] = T.float32(0)
                for r in range(filled):
                    weights[r] = T.exp(weights[r] - stat[0])
                    stat[1] += weights[r]
                for c in T.vectorized(d):
                    acc[c] = T.float32(0)
                for r in range(filled):
                    for c in T.vectorized(d):
                        acc[c] += weights[r] * values[bi, h // group, r, c]
                for c in T.vectorized(d):
                    y[bi, h, i, c] = acc[c] / stat[1]

    return attend
