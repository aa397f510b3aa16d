"""Decode attention over the filled part of the cache, the temporal attention score, and the cache append."""

from __future__ import annotations

from tvm.script import tirx as T
from tvm.tirx import PrimFunc

Shape = tuple[int, int, int, int]
_LOWEST = -3.0e38


def attention(query: Shape, cache: Shape, scale: float) -> PrimFunc:
    """Causal grouped-query attention; query [B, Hq, T, D] row i sees cache [B, Hkv, S, D] rows 0 .. position + i.

    Only filled rows are read, so time grows with the position and not with S.
    """
    b, hq, t, d = query
    hkv, s = cache[1], cache[2]
    group = hq // hkv

    @T.prim_func(private=True, s_tir=True)
    def attend(
        q: T.Buffer((b, hq, t, d), "float32"),
        keys: T.Buffer((b, hkv, s, d), "float32"),
        values: T.Buffer((b, hkv, s, d), "float32"),
        position: T.Buffer((1,), "int64"),
        y: T.Buffer((b, hq, t, d), "float32"),
    ):
        T.func_attr({"tir.noalias": True})
        for fused in T.parallel(b * hq * t):
            with T.sblock("head"):
                T.reads(q[0:b, 0:hq, 0:t, 0:d], keys[0:b, 0:hkv, 0:s, 0:d], values[0:b, 0:hkv, 0:s, 0:d], position[0:1])
                T.writes(y[0:b, 0:hq, 0:t, 0:d])
                weights = T.alloc_buffer((s,), "float32")
                acc = T.alloc_buffer((d,), "float32", scope="local")
                stat = T.alloc_buffer((2,), "float32", scope="local")
                bi: T.int32 = fused // (hq * t)
                h: T.int32 = fused // t % hq
                i: T.int32 = fused % t
                filled: T.int32 = T.min(T.Cast("int32", position[0]) + i + 1, s)
                stat[0] = T.float32(_LOWEST)
                for r in range(filled):
                    weights[r] = T.float32(0)
                    for c in range(d):
                        weights[r] += q[bi, h, i, c] * keys[bi, h // group, r, c]
                    weights[r] = weights[r] * T.float32(scale)
                    stat[0] = T.max(stat[0], weights[r])
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


def tas(query: Shape, cache: Shape, stride: int, scale: float) -> PrimFunc:
    """Mean over heads of scale * <query, key at position - stride>: float32 [B]."""
    b, hq, t, d = query
    hkv, s = cache[1], cache[2]
    group = hq // hkv

    @T.prim_func(private=True, s_tir=True)
    def temporal_score(
        q: T.Buffer((b, hq, t, d), "float32"),
        keys: T.Buffer((b, hkv, s, d), "float32"),
        position: T.Buffer((1,), "int64"),
        y: T.Buffer((b,), "float32"),
    ):
        T.func_attr({"tir.noalias": True})
        for i in range(b):
            with T.sblock("row"):
                T.reads(q[0:b, 0:hq, 0:t, 0:d], keys[0:b, 0:hkv, 0:s, 0:d], position[0:1])
                T.writes(y[0:b])
                acc = T.alloc_buffer((1,), "float32", scope="local")
                before: T.int32 = T.max(T.Cast("int32", position[0]) - stride, 0)
                acc[0] = T.float32(0)
                for h, c in T.grid(hq, d):
                    acc[0] += q[i, h, 0, c] * keys[i, h // group, before, c]
                y[i] = acc[0] * T.float32(scale / hq)

    return temporal_score


def cache_write(cache: Shape, rows: int) -> PrimFunc:
    """In place: cache [B, H, S, D] gets value [B, H, rows, D] from row `position` on; rows beyond S are dropped."""
    b, h, s, d = cache

    @T.prim_func(private=True, s_tir=True)
    def append(
        keys: T.Buffer((b, h, s, d), "float32"),
        value: T.Buffer((b, h, rows, d), "float32"),
        position: T.Buffer((1,), "int64"),
    ):
        for i, j, r in T.grid(b, h, rows):
            with T.sblock("row"):
                T.reads(value[0:b, 0:h, 0:rows, 0:d], position[0:1])
                T.writes(keys[0:b, 0:h, 0:s, 0:d])
                at: T.int32 = T.Cast("int32", position[0]) + r
                if at < s:
                    for c in T.vectorized(d):
                        keys[i, j, at, c] = value[i, j, r, c]

    return append
