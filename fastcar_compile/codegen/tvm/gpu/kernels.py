"""Kernels as definitions: te expressions without a schedule, which dlight gives threads. Own schedules say why.

Small types are words (`packed`), and functions of WGSL that `PRELUDE` defines read them.
"""

from collections.abc import Callable, Sequence
from typing import Any

from tvm import te, tirx

from fastcar_compile.config.formats import GROUP
from fastcar_compile.ir.ops.linear import FACTORS, FRACTION_BITS, INPUT_STEPS, KNOTS
from fastcar_compile.ir.ops.operator import BLOCK

PRELUDE = """
fn byte_at(word: u32, at: i32) -> i32 { return bitcast<i32>(word << u32(24 - 8 * at)) >> 24u; }
fn float16_at(word: u32, at: i32) -> f32 { let both = unpack2x16float(word); return select(both.x, both.y, at == 1); }
fn bfloat16_at(word: u32, at: i32) -> f32 { return bitcast<f32>(select(word << 16u, word & 0xffff0000u, at == 1)); }
fn bytes_of(a: i32, b: i32, c: i32, d: i32) -> u32 {
  return u32(a & 255) | (u32(b & 255) << 8u) | (u32(c & 255) << 16u) | (u32(d & 255) << 24u);
}
fn limited(a: f32) -> f32 { return clamp(a, -65504.0, 65504.0); }
fn float16s_of(a: f32, b: f32) -> u32 { return pack2x16float(vec2<f32>(limited(a), limited(b))); }
fn bfloat16_of(a: f32) -> u32 {
  let bits = bitcast<u32>(a);
  return select((bits + 0x7fffu + ((bits >> 16u) & 1u)) >> 16u, 0x7fc0u, (bits & 0x7fffffffu) > 0x7f800000u);
}
fn bfloat16s_of(a: f32, b: f32) -> u32 { return bfloat16_of(a) | (bfloat16_of(b) << 16u); }
fn rounded(value: f32, factor: f32) -> i32 { return i32(clamp(round(value * factor), -127.0, 127.0)); }
fn nearest(value: f32) -> i32 { return i32(round(value)); }
fn low_nibbles(word: u32) -> u32 { let x = word & 0x0f0f0f0fu; return x | ((x & 0x08080808u) * 30u); }
fn high_nibbles(word: u32) -> u32 { return low_nibbles(word >> 4u); }
fn product(a: f32, b: f32) -> f32 { return a * b; }
fn bits_of(value: f32) -> u32 { return bitcast<u32>(value); }
fn float_of(bits: u32) -> f32 { return bitcast<f32>(bits); }
fn power_of_two(exponent: i32) -> f32 { return bitcast<f32>((exponent + 127) << 23u); }
fn exponent_of(top: f32) -> i32 { return max((bitcast<i32>(min(top, 3.3762e38)) + 0x10000) >> 23u, 13) - 133; }
"""
"""Functions of every shader: what WGSL has no operator for."""

Expr = Any
Definition = Callable[..., Expr]

_TINY, _INV_127 = 1e-30, float.fromhex("0x1.020408p-7")


def call(dtype: str, name: str, *arguments: Expr) -> Expr:
    """Return a call of a function of WGSL."""
    return tirx.call_pure_extern(dtype, name, *arguments)


def float_at(row: Callable[[Expr], Expr], kind: str, k: Expr) -> Expr:
    """Return element k of a row of words, as float32; kind: the type that the words hold."""
    if kind == "float32":
        return row(k)
    return call("float32", f"{kind}_at", row(k // 2), tirx.Cast("int32", k % 2))


# Linears: the sum is a reduction, what comes behind it is elementwise.


def float_linear(kind: str) -> Definition:
    """Return the definition y [M, N] of x float32 [M, K] and weight [N, K]."""

    def linear(x: Expr, weight: Expr) -> Expr:
        (m, k), n = x.shape, weight.shape[0]
        if kind == "float32":
            axis = te.reduce_axis((0, k), "k")
            return te.compute((m, n), lambda i, j: te.sum(x[i, axis] * weight[j, axis], axis), "y")
        axis = te.reduce_axis((0, k // 2), "k")

        def both(i: Expr, j: Expr) -> Expr:
            word = weight[j, axis]
            return x[i, axis * 2] * call("float32", f"{kind}_at", word, 0) + x[i, axis * 2 + 1] * call(
                "float32", f"{kind}_at", word, 1
            )

        return te.compute((m, n), lambda i, j: te.sum(both(i, j), axis), "y")

    return linear


def shaped(matrix: Expr, shape: Sequence[int]) -> Expr:
    """Return a matrix in another shape of rows, for what is fused behind it."""

    def value(*at: Expr) -> Expr:
        row: Expr = 0
        for place, side in zip(at[:-1], shape[:-1], strict=True):
            row = row * side + place
        return matrix[row, at[-1]]

    return te.compute(shape, value, "shaped")


def linear_w8a8(rows: Expr, weight: Expr, scale: Expr) -> Expr:
    """Return y float32 [M, N] of rows with their scales u32 [M, K / 4 + 1] and weight u32 [N, K / 4]."""
    m, (n, k) = rows.shape[0], weight.shape
    axis = te.reduce_axis((0, k), "k")
    acc = te.compute(
        (m, n), lambda i, j: te.sum(call("int32", "dot4I8Packed", rows[i, axis], weight[j, axis]), axis), "acc"
    )
    return te.compute(
        (m, n),
        lambda i, j: (
            tirx.Cast("float32", acc[i, j])
            * call("float32", "product", call("float32", "float_of", rows[i, k]), scale[j])
        ),
        "y",
    )


def groups_w4a8(rows: Expr, weight: Expr) -> Expr:
    """Return the exact sums int32 [M, N * G] of the groups, of rows u32 [M, K / 4 + 1] and nibbles u32 [N, 16 * G]."""
    (m, k), (n, words) = rows.shape, weight.shape
    k, per = int(k) - 1, GROUP // 8
    groups = int(words) // per
    axis = te.reduce_axis((0, per), "k")

    def at(i: Expr, place: Expr) -> Expr:  # the last group may be longer than the row
        inside = rows[i, tirx.min(place, k - 1)]
        return tirx.if_then_else(place < k, inside, tirx.const(0, "uint32")) if groups * 2 * per > k else rows[i, place]

    def both(i: Expr, j: Expr) -> Expr:
        word, first = weight[j // groups, j % groups * per + axis], j % groups * (2 * per) + axis
        low = call("int32", "dot4I8Packed", at(i, first), call("uint32", "low_nibbles", word))
        return low + call("int32", "dot4I8Packed", at(i, first + per), call("uint32", "high_nibbles", word))

    return te.compute((m, n * groups), lambda i, j: te.sum(both(i, j), axis), "acc")


def total_w4a8(acc: Expr, rows: Expr, scale: Expr) -> Expr:
    """Return y float32 [M, N] of the groups' sums, added in ascending order; scale: two float16 a word [N, G / 2]."""
    m, n = acc.shape[0], scale.shape[0]
    groups, last = int(acc.shape[1]) // int(n), int(rows.shape[1]) - 1
    return te.compute(
        (m, n),
        lambda i, j: (
            _ordered(
                [
                    call(
                        "float32",
                        "product",
                        tirx.Cast("float32", acc[i, j * groups + g]),
                        call("float32", "float16_at", scale[j, g // 2], g % 2),
                    )
                    for g in range(groups)
                ]
            )
            * call("float32", "float_of", rows[i, last])
        ),
        "y",
    )


def _ordered(parts: Sequence[Expr]) -> Expr:
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


# Rows: one workgroup reduces a row. The result of a quantisation is the row's words and behind them the scale's bits.


def quantized(value: Callable[[Expr, Expr], Expr], m: int, k: int) -> Expr:
    """Return u32 [M, ceil(K / 4) + 1] of the rows of value(i, j)."""
    axis, words = te.reduce_axis((0, k), "r"), -(-k // 4)
    top = te.compute((m,), lambda i: te.max(te.abs(value(i, axis)), axis), "top")

    def word(i: Expr, j: Expr) -> Expr:
        largest = tirx.max(top[i], tirx.const(_TINY, "float32"))
        inverse = tirx.const(127.0, "float32") / largest

        def byte(at: Expr) -> Expr:
            return call("int32", "rounded", value(i, tirx.min(at, k - 1)), inverse)

        four = [byte(j * 4 + b) for b in range(4)]
        if k % 4:
            four = [tirx.if_then_else(j * 4 + b < k, one, 0) for b, one in enumerate(four)]
        scale = call("uint32", "bits_of", largest * tirx.const(_INV_127, "float32"))
        return tirx.if_then_else(j < words, call("uint32", "bytes_of", *four), scale)

    return te.compute((m, words + 1), word, "rows")


def quantize_rows(x: Expr) -> Expr:
    """Return the quantised rows of x float32 [M, K]."""
    return quantized(lambda i, j: x[i, j], *map(int, x.shape))


def _rms(x: Expr, weight: Expr, epsilon: float) -> Callable[[Expr, Expr], Expr]:
    m, k = map(int, x.shape)
    axis = te.reduce_axis((0, k), "s")
    total = te.compute((m,), lambda i: te.sum(x[i, axis] * x[i, axis], axis), "total")
    scaled = te.compute(
        (m, k),
        lambda i, j: x[i, j] * te.rsqrt(total[i] / float(k) + tirx.const(epsilon, "float32")) * weight[j],
        "scaled",
    )
    return lambda i, j: scaled[i, j]


def _layer(x: Expr, weight: Expr, bias: Expr, epsilon: float) -> Callable[[Expr, Expr], Expr]:
    m, k = map(int, x.shape)
    first, second = te.reduce_axis((0, k), "s"), te.reduce_axis((0, k), "t")
    total = te.compute((m,), lambda i: te.sum(x[i, first], first), "total")
    centred = te.compute((m, k), lambda i, j: x[i, j] - total[i] / float(k), "centred")
    square = te.compute((m,), lambda i: te.sum(centred[i, second] * centred[i, second], second), "square")
    scaled = te.compute(
        (m, k),
        lambda i, j: (
            centred[i, j] * te.rsqrt(square[i] / float(k) + tirx.const(epsilon, "float32")) * weight[j] + bias[j]
        ),
        "scaled",
    )
    return lambda i, j: scaled[i, j]


def norm(epsilon: float, *, quantizes: bool) -> Definition:
    """Return the definition of `rms_norm` of x and weight, or of `layer_norm` of x, weight and bias."""

    def define(x: Expr, *parameters: Expr) -> Expr:
        value = (_rms if len(parameters) == 1 else _layer)(x, *parameters, epsilon)
        m, k = map(int, x.shape)
        return quantized(value, m, k) if quantizes else te.compute((m, k), value, "y")

    return define


def factor(x: Expr, table: Expr, activation: str) -> Expr:
    """Return the table's factor of one value, as `activation_factor` defines it."""
    limit, scale = FACTORS[activation].limit, FACTORS[activation].input_scale
    bounded = tirx.max(tirx.min(x, tirx.const(limit, "float32")), tirx.const(-limit, "float32"))
    fixed = call("int32", "nearest", bounded * tirx.const(scale, "float32")) + INPUT_STEPS
    index = tirx.min(fixed >> 6, KNOTS - 2)
    fraction = fixed - (index << 6)
    blend = table[index] * (64 - fraction) + table[index + 1] * fraction + 32
    return tirx.Cast("float32", blend >> 6) * tirx.const(2.0**-FRACTION_BITS, "float32")


def activation_factor(activation: str) -> Definition:
    """Return the definition of `activation_factor` of x [N] and the table's knots."""
    return lambda x, table: te.compute(x.shape, lambda i: factor(x[i], table, activation), "factor")


def gated(activation: str) -> Definition:
    """Return the definition of the quantised rows of activation(gate) * up, of gate, up [M, K] and the knots."""

    def define(gate: Expr, up: Expr, table: Expr) -> Expr:
        m, k = map(int, gate.shape)
        inner = te.compute((m, k), lambda i, j: gate[i, j] * factor(gate[i, j], table, activation) * up[i, j], "inner")
        return quantized(lambda i, j: inner[i, j], m, k)

    return define


def rotary(x: Expr, cos: Expr, sin: Expr) -> Expr:
    """Return x [B, H, T, D] rotated; cos and sin [1 or B, 1, T, D]."""
    half, own = int(x.shape[3]) // 2, int(cos.shape[0]) > 1

    def value(b: Expr, h: Expr, t: Expr, d: Expr) -> Expr:
        other = tirx.if_then_else(
            d < half, -x[b, h, t, tirx.min(d + half, 2 * half - 1)], x[b, h, t, tirx.max(d - half, 0)]
        )
        row = b if own else 0
        return x[b, h, t, d] * cos[row, 0, t, d] + other * sin[row, 0, t, d]

    return te.compute(x.shape, value, "rotated")


def norm_rotary(epsilon: float) -> Definition:
    """Return the definition of `rotary` behind `rms_norm` of heads x [H, D] at one position."""

    def define(x: Expr, weight: Expr, cos: Expr, sin: Expr) -> Expr:
        value, (heads, dim) = _rms(x, weight, epsilon), map(int, x.shape)
        half = dim // 2

        def rotated(h: Expr, d: Expr) -> Expr:
            other = tirx.if_then_else(d < half, -value(h, tirx.min(d + half, dim - 1)), value(h, tirx.max(d - half, 0)))
            return value(h, d) * cos[0, 0, 0, d] + other * sin[0, 0, 0, d]

        return te.compute((heads, dim), rotated, "rotated")

    return define


# Scores of the gates, in float32: a GPU has no integers of 64 bits, so a tie may be decided in another way.


def cached(cache: Expr, kind: str, dim: int) -> Callable[..., Expr]:
    """Return element (video, head, row, d) of a cache of `kind` as float32; see `KvType`."""

    def element(v: Expr, h: Expr, row: Expr, d: Expr) -> Expr:
        if kind != "int8":
            return float_at(lambda word: cache[v, h, row, word], kind, d)

        def byte(at: Expr) -> Expr:
            return call("int32", "byte_at", cache[v, h, row, at // 4], tirx.Cast("int32", at % 4))

        return tirx.Cast("float32", byte(d)) * call("float32", "power_of_two", byte(dim + d // BLOCK))

    return element


def tas(stride: int, scale: float, kind: str) -> Definition:
    """Return the definition of `tas` of query, key cache and position, and for `tas_heads` the factors of all heads."""

    def define(query: Expr, cache: Expr, position: Expr, *factors: Expr) -> Expr:
        batch, count, _, dim = map(int, query.shape)
        share, group = batch // int(cache.shape[0]), count // int(cache.shape[1])
        axis, own = te.reduce_axis((0, count * dim), "hd"), int(position.shape[0]) > 1
        element = cached(cache, kind, dim)

        def both(b: Expr) -> Expr:
            h, d = axis // dim, axis % dim
            row = tirx.max(position[b if own else 0] - stride, 0)
            value = query[b, h, 0, d] * factors[0][h] if factors else query[b, h, 0, d]
            return value * element(b // share, h // group, row, d)

        total = te.compute((batch,), lambda b: te.sum(both(b), axis), "total")
        return te.compute((batch,), lambda b: total[b] * tirx.const(scale, "float32"), "score")

    return define


def input_delta(x: Expr, kept: Expr) -> Expr:
    """Return `input_delta` of float32 [B, H]."""
    m, k = x.shape
    first, second = te.reduce_axis((0, k), "s"), te.reduce_axis((0, k), "t")
    change = te.compute((m,), lambda i: te.sum(te.abs(x[i, first] - kept[i, first]), first), "change")
    size = te.compute((m,), lambda i: te.sum(te.abs(x[i, second]), second), "size")
    return te.compute((m,), lambda i: change[i] / tirx.max(size[i], tirx.const(2.0**-24, "float32")), "score")


def change_features(x: Expr, kept: Expr) -> Expr:
    """Return [x ; |x - kept|] float32 [B, 2 H]: what a learned gate reads."""
    m, k = map(int, x.shape)

    def feature(i: Expr, j: Expr) -> Expr:
        at = tirx.max(j - k, 0)
        return tirx.if_then_else(j < k, x[i, tirx.min(j, k - 1)], te.abs(x[i, at] - kept[i, at]))

    return te.compute((m, 2 * k), feature, "features")


def learned_score(sums: Expr, b1: Expr, w2: Expr, b2: Expr) -> Expr:
    """Return w2 . relu(sums + b1) + b2 of sums float32 [B, units]."""
    m, units = sums.shape
    axis, none = te.reduce_axis((0, units), "u"), tirx.const(0.0, "float32")
    total = te.compute((m,), lambda i: te.sum(tirx.max(sums[i, axis] + b1[axis], none) * w2[axis], axis), "total")
    return te.compute((m,), lambda i: total[i] + b2[0], "score")


# What a draft's gain leaves. No product is contracted with a sum.


def draft_gain(change: Expr, edges: Expr, gains: Expr) -> Expr:
    """Return gains[i] where i of the edges are at most the change [B], which is not negative; 0 where it is NaN."""

    def gain(i: Expr) -> Expr:
        above = [tirx.Cast("int32", change[i] >= edges[e]) for e in range(int(edges.shape[0]))]
        place = sum(above, tirx.const(0, "int32"))
        return tirx.if_then_else(change[i] >= 0.0, gains[place], tirx.const(0.0, "float32"))

    return te.compute(change.shape, gain, "gain")


def draft_difference(both: Expr, gain: Expr) -> Expr:
    """Return both[:B] - gain * both[B:] of both float32 [2 B, K]."""
    m, k = gain.shape[0], both.shape[1]
    return te.compute((m, k), lambda i, j: both[i, j] - call("float32", "product", gain[i], both[m + i, j]), "left")


def draft_sum(left: Expr, kept: Expr, bias: Expr, gain: Expr) -> Expr:
    """Return bias + gain * (kept - bias) + left, float32 [B, H]."""

    def output(i: Expr, j: Expr) -> Expr:
        return bias[j] + call("float32", "product", gain[i], kept[i, j] - bias[j]) + left[i, j]

    return te.compute(left.shape, output, "output")


def draft_features(activation: str) -> Definition:
    """Return the definition of the quantised rows of `draft_difference` of features [activation(gate) * up ; inner]."""

    def define(gate: Expr, up: Expr, inner: Expr, gain: Expr, table: Expr) -> Expr:
        m, n, rank = int(gain.shape[0]), int(gate.shape[1]), int(inner.shape[1])

        def feature(i: Expr, j: Expr) -> Expr:
            own, other = tirx.min(j, n - 1), tirx.max(j - n, 0)
            product = gate[i, own] * factor(gate[i, own], table, activation) * up[i, own]
            return tirx.if_then_else(j < n, product, inner[i, other])

        both = te.compute((2 * m, n + rank), feature, "features")
        left = draft_difference(both, gain)
        return quantized(lambda i, j: left[i, j], m, n + rank)

    return define


def ring_row(back: int, sinks: int, ring: int) -> Definition:
    """Return the definition of `ring_row` of positions."""

    def row(position: Expr) -> Expr:
        at = tirx.max(position - back, 0)
        return tirx.if_then_else(at < sinks, at, sinks + tirx.floormod(at - sinks, ring))

    return lambda position: te.compute(position.shape, lambda i: row(position[i]), "row")


def slot_read(cache: Expr, step: Expr) -> Expr:
    """Return `slot_read` of a cache [F, V, ...]."""
    slots, videos, *rest = cache.shape
    batch, own = max(int(videos), int(step.shape[0])), int(step.shape[0]) > 1
    share = batch // int(videos)
    return te.compute(
        (batch, *rest),
        lambda b, *at: cache[(tirx.floormod(step[b if own else 0] + slots, slots), b // share, *at)],
        "slot",
    )
