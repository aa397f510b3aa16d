"""Kernels that write states in place, and attention, which has a schedule of its own: the row's length is data."""

from math import prod
from typing import Any

from tvm.script import tirx as T
from tvm.tirx import PrimFunc

from fastcar_compile.codegen.tvm.gpu.kernels import cached, call
from fastcar_compile.codegen.tvm.kernels import HeadShape, script
from fastcar_compile.codegen.tvm.kernels.cache import number_of, slot_of
from fastcar_compile.codegen.tvm.kernels.gate import GateRules
from fastcar_compile.config.formats import kv_type
from fastcar_compile.ir.ops.operator import BLOCK
from fastcar_compile.ir.types import INACTIVE

THREADS = 64
"""Threads of a workgroup of attention, and the keys of a tile."""

NEVER = 3e38  # with few digits, of which TVM writes seven
"""Threshold of a layer that never replays, whichever way its gate compares: shaders may take it that none is NaN."""


def _words(dim: int, kind: str) -> int:
    return -(-kv_type(kind).row_bytes(dim) // 4)


def _storage(kind: str) -> str:
    return "float32" if kind == "float32" else "uint32"


@script.kernel
def cache_write(cache: HeadShape, batch: int, rows: int, kind: str, positions: int, sinks: int | None) -> PrimFunc:
    """Write value float32 [B, H, rows, D] into the cache [V, H, S, words] from row `position` on, in place.

    cache: [V, H, S, D]. kind: the KV type. sinks: of a ring cache; None: it is no ring.
    """
    videos, h, s, d = cache
    share, width, per = batch // videos, _words(d, kind), {"float32": 1, "int8": 4}.get(kind, 2)
    first, ring = sinks or 0, s - (sinks or 0)
    blocks = -(-d // BLOCK)

    def word_of(value: Any, i: Any, j: Any, r: Any, c: Any, tops: Any) -> Any:
        at = [T.min(c * per + e, d - 1) for e in range(per)]
        if kind == "float32":
            return value[i, j, r, c]
        if kind != "int8":
            return call("uint32", f"{kind}s_of", *(value[i, j, r, a] for a in at))

        def byte(e: int) -> Any:
            place = c * 4 + e
            block = T.min(place // BLOCK, blocks - 1)
            exponent = call("int32", "exponent_of", tops[block])
            inverse = call("float32", "power_of_two", -exponent)
            mantissa = call("int32", "rounded", value[i, j, r, at[e]], inverse)
            behind = call("int32", "exponent_of", tops[T.max(T.min(place - d, blocks - 1), 0)])
            return T.if_then_else(place < d, mantissa, T.if_then_else(place < d + blocks, behind, 0))

        return call("uint32", "bytes_of", *(byte(e) for e in range(4)))

    def top_of(value: Any, i: Any, j: Any, r: Any, e: Any, c: Any) -> Any:
        return T.abs(value[i, j, r, T.min(e * BLOCK + c, d - 1)])

    has_blocks = kind == "int8"

    @script.prim_func(private=True, s_tir=True)
    def append(
        keys: T.Buffer((videos, h, s, width), _storage(kind)),
        value: T.Buffer((batch, h, rows, d), "float32"),
        position: T.Buffer((positions,), "int32"),
    ):
        for b, head, row in T.grid(batch, h, rows):
            with T.sblock("row"):
                i, j, r = T.axis.remap("SSS", [b, head, row])
                T.reads(value[i, j, r, 0:d], position[0:positions])
                T.writes(keys[i // share, j, 0:s, 0:width])
                tops = T.alloc_buffer((blocks,), scope="local")
                p: T.let = number_of(position, i) + r
                at: T.let = p if sinks is None else T.if_then_else(p < first, p, first + T.floormod(p - first, ring))
                if p >= 0 and at < s:
                    if has_blocks:
                        for e in range(blocks):
                            tops[e] = T.float32(0)
                            for c in range(BLOCK):
                                tops[e] = T.max(tops[e], top_of(value, i, j, r, e, c))
                    for c in range(width):
                        keys[i // share, j, at, c] = word_of(value, i, j, r, c, tops)

    return append


@script.kernel
def slot_write(shape: tuple[int, ...], dtype: str, steps: int) -> PrimFunc:
    """Write value [B, H] to the slot of `step` of a cache [F, V, H], in place."""
    slots, videos, *rest = shape
    rows, width = max(videos, steps), prod(rest)
    share = rows // videos

    def element(*at: Any) -> tuple[Any, ...]:
        return at if rest else at[:-1]

    @script.prim_func(private=True, s_tir=True)
    def write_slot(
        cache: T.Buffer(shape, dtype), value: T.Buffer((rows, *rest), dtype), step: T.Buffer((steps,), "int32")
    ):
        for b, e in T.grid(rows, width):
            with T.sblock("copy"):
                i, c = T.axis.remap("SS", [b, e])
                script.access([value, step], [cache])
                now: T.let = number_of(step, i)
                if steps == 1 or now >= 0:
                    cache[element(T.floormod(now + slots, slots), i // share, c)] = value[element(i, c)]

    return write_slot


@script.kernel
def keep_frame(shape: tuple[int, int, int], steps: int) -> PrimFunc:
    """Write y and x [B, H] of the rows that do not replay to the slot of `step` of two caches [F, V, H], in place."""
    slots, videos, width = shape
    rows = max(videos, steps)
    share = rows // videos

    @script.prim_func(private=True, s_tir=True)
    def write_slots(
        cache: T.Buffer(shape, "float32"),
        inputs: T.Buffer(shape, "float32"),
        y: T.Buffer((rows, width), "float32"),
        x: T.Buffer((rows, width), "float32"),
        replay: T.Buffer((rows,), "bool"),
        step: T.Buffer((steps,), "int32"),
    ):
        for b, e in T.grid(rows, width):
            with T.sblock("copy"):
                i, c = T.axis.remap("SS", [b, e])
                script.access([y, x, replay, step], [cache, inputs])
                now: T.let = number_of(step, i)
                if (steps == 1 or now >= 0) and not replay[i]:
                    cache[T.floormod(now + slots, slots), i // share, c] = y[i, c]
                    inputs[T.floormod(now + slots, slots), i // share, c] = x[i, c]

    return write_slots


@script.kernel
def gate(batch: int, slots: int, videos: int, count: int, rules: GateRules, counts: bool) -> PrimFunc:
    """Return bool [B]: `gate`, in one thread. counts: write the chain counters of this step, in place, too."""
    share = batch // videos

    @script.prim_func(private=True, s_tir=True)
    def decide(
        chain: T.Buffer((slots, videos), "int32"),
        score: T.Buffer((batch,), "float32"),
        threshold: T.Buffer((count,), "float32"),
        step: T.Buffer((count,), "int32"),
        y: T.Buffer((batch,), "bool"),
    ):
        for one in range(1):
            with T.sblock("rows"):
                T.axis.spatial(1, one)
                T.reads(score[0:batch], threshold[0:count], step[0:count])  # of chain its own writes alone
                T.writes(y[0:batch], chain[0:slots, 0:videos])
                for i in range(batch):
                    now: T.let = number_of(step, i)
                    pair: T.let = rules.pair(i, batch)
                    least: T.let = rules.signed(number_of(threshold, i))
                    other: T.let = rules.signed(number_of(threshold, pair))
                    own, its = T.meta_var((slot_of(slots, share, step, (i,)), slot_of(slots, share, step, (pair,))))
                    y[i] = (count > 1 and now == INACTIVE) or (
                        T.max(T.abs(least), T.abs(other)) != T.float32(NEVER)
                        and rules.hold(now, (score[i], score[pair]), (least, other), (chain[own], chain[its]))
                    )
                if counts:
                    for i in range(batch):
                        if count == 1 or number_of(step, i) >= 0:
                            at = T.meta_var(slot_of(slots, share, step, (i,)))
                            chain[at] = T.if_then_else(y[i], chain[at] + 1, 0)

    return decide


@script.kernel
def attention(
    query: HeadShape,
    cache: HeadShape,
    scale: float,
    kind: str,
    positions: int,
    window: tuple[int, int] | None,
    softcap: float | None,
) -> PrimFunc:
    """Return causal attention float32 [B, Hq, T, D], a workgroup for each query row.

    window: sinks and window, or None.

    A tile is 64 keys. Each thread multiplies the query by one key; then each sums the weighted values of a few elements
    (m, l, acc: running maximum, normaliser and accumulator of FlashAttention). Threads agree at two barriers a tile.
    """
    b, heads, rows, d = query
    videos, kv_heads, s, _ = cache
    share, group, own = b // videos, heads // kv_heads, -(-d // THREADS)
    sinks, seen = window or (0, s)
    ring, width = s - sinks, _words(d, kind)

    def parts(p: Any) -> tuple[Any, Any, Any]:
        """Return how many sinks a row at p sees, and begin and length of the window that it sees."""
        begin = T.max(sinks, p - seen + 1)
        return T.min(sinks, p + 1), begin, T.max(p + 1 - begin, 0)

    def column(p: Any, c: Any) -> Any:
        """Return the cached row of the c-th key that a row at p sees."""
        first, begin, _ = parts(p)
        at = begin + c - first
        return T.if_then_else(c < first, c, sinks + T.floormod(at - sinks, ring))

    def visible(p: Any) -> Any:
        first, _, length = parts(p)
        return first + length

    def capped(value: Any) -> Any:
        return value if softcap is None else T.float32(softcap) * T.tanh(value / T.float32(softcap))

    def element(buffer: Any, v: Any, h: Any, row: Any, c: Any) -> Any:
        return cached(buffer, kind, d)(v, h, row, c)

    @script.prim_func(private=True, s_tir=True)
    def attend(
        q: T.Buffer((b, heads, rows, d), "float32"),
        keys: T.Buffer((videos, kv_heads, s, width), _storage(kind)),
        values: T.Buffer((videos, kv_heads, s, width), _storage(kind)),
        position: T.Buffer((positions,), "int32"),
        y: T.Buffer((b, heads, rows, d), "float32"),
    ):
        T.func_attr({"tirx.is_scheduled": True})
        for row in T.thread_binding(b * heads * rows, thread="blockIdx.x"):
            for t in T.thread_binding(THREADS, thread="threadIdx.x"):
                with T.sblock("row"):
                    script.access([q, keys, values, position], [y])
                    own_query = T.alloc_buffer((d,), scope="shared")
                    logits = T.alloc_buffer((THREADS,), scope="shared")
                    weights = T.alloc_buffer((THREADS,), scope="shared")
                    places = T.alloc_buffer((THREADS,), "int32", scope="shared")
                    acc = T.alloc_buffer((own,), scope="local")
                    most = T.alloc_buffer((3,), scope="local")
                    i: T.let = row // (heads * rows)
                    h: T.let = row // rows % heads
                    p: T.let = T.max(number_of(position, i), -1) + row % rows
                    count: T.let = T.if_then_else(number_of(position, i) < 0, 0, visible(p))
                    for c in range(own):
                        acc[c] = T.float32(0)
                        if c * THREADS + t < d:
                            own_query[c * THREADS + t] = q[i, h, row % rows, c * THREADS + t]
                    most[0] = T.float32(-3e38)
                    most[1] = T.float32(0)
                    for tile in range((count + THREADS - 1) // THREADS):
                        logits[t] = T.float32(-3e38)
                        if tile * THREADS + t < count:
                            places[t] = column(p, tile * THREADS + t)
                            most[2] = T.float32(0)
                            for c in range(d):
                                most[2] = most[2] + own_query[c] * element(keys, i // share, h // group, places[t], c)
                            logits[t] = capped(most[2] * T.float32(scale))
                        most[2] = most[0]
                        for j in range(THREADS):
                            most[0] = T.max(most[0], logits[j])
                        weights[t] = T.exp(logits[t] - most[0])
                        most[2] = T.exp(most[2] - most[0])
                        most[1] = most[1] * most[2]
                        for c in range(own):
                            acc[c] = acc[c] * most[2]
                        for j in range(T.min(count - tile * THREADS, THREADS)):
                            most[1] = most[1] + weights[j]
                            for c in range(own):
                                if c * THREADS + t < d:
                                    acc[c] = acc[c] + weights[j] * element(
                                        values, i // share, h // group, places[j], c * THREADS + t
                                    )
                    for c in range(own):
                        if c * THREADS + t < d:
                            y[i, h, row % rows, c * THREADS + t] = T.if_then_else(
                                count > 0, acc[c] / T.max(most[1], T.float32(1e-30)), T.float32(0)
                            )

    return attend
