"""fx operator -> Relax call of a scheduled TIR kernel, for TVM's ExportedProgram importer."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from torch import fx
from tvm import relax
from tvm.tirx import IntImm

from fastcar_compile.codegen.tvm import patterns
from fastcar_compile.codegen.tvm.emitter import Emitter, dtype_of, shape_of
from fastcar_compile.codegen.tvm.kernels.attention import window
from fastcar_compile.codegen.tvm.kernels.cache.concat import MAX_ROWS, concat_rows, split_rows
from fastcar_compile.codegen.tvm.kernels.cache.frame_slot import chain_read, chain_write, slot_read, slot_write
from fastcar_compile.codegen.tvm.kernels.gate import scores
from fastcar_compile.codegen.tvm.kernels.gate.learned_score import learned_score
from fastcar_compile.codegen.tvm.kernels.gate.replay_gate import gate
from fastcar_compile.codegen.tvm.kernels.linear.activate_quantize import activate_quantize
from fastcar_compile.codegen.tvm.kernels.linear.activation_factor import activation_factor
from fastcar_compile.codegen.tvm.kernels.linear.quantize_rows import quantize_rows
from fastcar_compile.codegen.tvm.kernels.norm.norm import layer_norm, layer_norm_quantize, rms_norm, rms_norm_quantize
from fastcar_compile.codegen.tvm.kernels.norm.rotary import rotary
from fastcar_compile.ops.activations import factor_table

Converter = Callable[[fx.Node, Any], relax.Var]
OFFLOAD_FUNCTION = "fastcar.offloaded_mlp"
"""Packed function (x [B, H], replay [B], cached [B, H], layer, out [B, H]) that the runtime registers."""

OFFLOAD_LINEAR_FUNCTION = "fastcar.offloaded_linear"
"""Packed function (x [B, K], name, out [B, N]) that the runtime registers."""
GATE_FUNCTION = "fastcar.offloaded_gate"
"""Packed function (query [B, Hq, 1, D], key cache [B, Hkv, S, D], chain [B], position [1], step [1], stride, layer,
replay [B], score [B], new chain [B]) that the runtime registers; the last three are its results."""


def _linear(node: fx.Node, importer: Any) -> relax.Var:
    e = Emitter(node, importer)
    x, weight = node.args[0], node.args[1]
    n, k = shape_of(weight)  # type: ignore[arg-type]
    m = math.prod(shape_of(x)) // k  # type: ignore[arg-type]
    kernel = e.chosen(f"linear_{dtype_of(weight)}", m, n, k)  # type: ignore[arg-type]
    y = e.kernel(kernel, [e.reshape(e.args[0], (m, k)), e.args[1]], (m, n), "float32")
    return _biased(e, y, e.args[2] if len(e.args) > 2 else None)


def _quantized_rows(e: Emitter, x: fx.Node, m: int, k: int) -> tuple[relax.Var, relax.Var]:
    """int8 rows of x and their scales. A norm before them, or the product of a gated MLP, is in the same kernel; equal
    calls of linears that share x are merged later."""
    outs = [((m, k), "int8"), ((m,), "float32")]
    if (product := patterns.gated_product(x)) is not None:
        gate, up, activation = product
        rows = [e.reshape(e.importer.env[n], (m, k)) for n in (gate, up)]
        table = relax.const(factor_table(activation).numpy(), "int32")
        pair = e.kernels(activate_quantize(m, k, activation), [*rows, table], outs)
    elif (norm := patterns.rms_norm(x)) is not None:
        before, weight, epsilon = norm
        rows = [e.reshape(e.importer.env[before], (m, k)), e.importer.env[weight]]
        pair = e.kernels(rms_norm_quantize(m, k, epsilon), rows, outs)
    elif (centered := patterns.layer_norm(x)) is not None:
        rows = [e.reshape(e.importer.env[centered.x], (m, k)), *_affine(e, centered, k)]
        pair = e.kernels(layer_norm_quantize(m, k, centered.epsilon), rows, outs)
    else:
        pair = e.kernels(quantize_rows(m, k), [e.reshape(e.args[0], (m, k))], outs)
    return e.builder.emit(pair[0]), e.builder.emit(pair[1])


def _affine(e: Emitter, norm: patterns.LayerNorm, k: int) -> list[relax.Expr]:
    """Weight and bias of a layer norm, ones and zeros where it has none."""
    pairs = ((norm.weight, np.ones), (norm.bias, np.zeros))
    return [e.importer.env[n] if n is not None else relax.const(fill(k, np.float32), "float32") for n, fill in pairs]


def _layer_norm(node: fx.Node, importer: Any) -> relax.Var:
    found = patterns.layer_norm(node)
    if found is None:
        return importer.own_converters["layer_norm.default"](node)
    e = Emitter(node, importer)
    k = shape_of(node)[-1]
    m = math.prod(shape_of(node)) // k
    rows = [e.reshape(e.args[0], (m, k)), *_affine(e, found, k)]
    return e.reshape(e.kernel(layer_norm(m, k, found.epsilon), rows, (m, k), "float32"), shape_of(node))


def _quantized_linear(node: fx.Node, importer: Any) -> relax.Var:
    e = Emitter(node, importer)
    n = shape_of(node.args[1])[0]  # type: ignore[arg-type]
    *rows, k = shape_of(node.args[0])  # type: ignore[arg-type]
    m = math.prod(rows)
    q, s = _quantized_rows(e, node.args[0], m, k)  # type: ignore[arg-type]
    kind = "linear_w8a8" if dtype_of(node.args[1]) == "int8" else "linear_w4a8"  # type: ignore[arg-type]
    y = e.kernel(e.chosen(kind, m, n, k), [q, s, e.args[1], e.args[2]], (m, n), "float32")
    return _biased(e, y, e.args[3])


def _biased(e: Emitter, y: relax.Var, bias: relax.Expr | None) -> relax.Var:
    """The bias is an operator of its own, so that the product before it keeps its own rounding."""
    if bias is not None:
        y = e.builder.emit(relax.op.add(y, bias))
    return e.reshape(y, shape_of(e.node))


def _activation_factor(node: fx.Node, importer: Any) -> relax.Var:
    e = Emitter(node, importer)
    activation, size = str(node.args[1]), math.prod(shape_of(node))
    table = relax.const(factor_table(activation).numpy(), "int32")
    y = e.kernel(activation_factor(size, activation), [e.reshape(e.args[0], (size,)), table], (size,), "float32")
    return e.reshape(y, shape_of(node))


def _attention(node: fx.Node, importer: Any) -> relax.Var:
    e = Emitter(node, importer)
    query, cache = shape_of(node.args[0]), shape_of(node.args[1])  # type: ignore[arg-type]
    kind = "attention" if query[2] == 1 else "attention_chunk"
    kernel = e.chosen(kind, query, cache, float(node.args[4]), dtype_of(node.args[1]))  # type: ignore[arg-type]
    return e.kernel(kernel, e.args[:4], shape_of(node), "float32")


def _tas(node: fx.Node, importer: Any) -> relax.Var:
    e = Emitter(node, importer)
    stride, scale = int(node.args[3]), float(node.args[4])  # type: ignore[arg-type]
    query, cache = node.args[:2]
    kernel = e.chosen("tas", shape_of(query), shape_of(cache), stride, scale, dtype_of(cache))  # type: ignore[arg-type]
    return e.kernel(kernel, e.args[:3], shape_of(node), "float32")


def _appended(node: fx.Node) -> tuple[tuple[int, ...], int]:
    """Shape [B, Hkv, S, D] of the cache that is written, D that of a head, and the rows that it gets."""
    value = shape_of(node.args[1])  # type: ignore[arg-type]
    return (*shape_of(node)[:3], value[3]), value[2]


def _cache_write(node: fx.Node, importer: Any) -> relax.Var:
    e = Emitter(node, importer)
    cache, rows = _appended(node)
    return e.in_place(e.chosen("cache_write", cache, rows, dtype_of(node)), e.args)


def _ring_row(node: fx.Node, importer: Any) -> relax.Var:
    e = Emitter(node, importer)
    kernel = window.ring_row(*(int(value) for value in node.args[1:4]))  # type: ignore[arg-type]
    return e.kernel(kernel, e.args[:1], shape_of(node), "int64")


def _limit(node: fx.Node, importer: Any) -> relax.Var:
    e = Emitter(node, importer)
    return e.builder.emit(relax.op.minimum(e.args[0], relax.const(int(node.args[1]), "int64")))  # type: ignore[arg-type]


def _ring_write(node: fx.Node, importer: Any) -> relax.Var:
    e = Emitter(node, importer)
    cache, rows = _appended(node)
    kernel = e.chosen("ring_write", cache, rows, int(node.args[3]), dtype_of(node))  # type: ignore[arg-type]
    return e.in_place(kernel, e.args[:3])


def _window_attention(node: fx.Node, importer: Any) -> relax.Var:
    e = Emitter(node, importer)
    scale, sinks, width = float(node.args[4]), int(node.args[5]), int(node.args[6])  # type: ignore[arg-type]
    query, cache = shape_of(node.args[0]), shape_of(node.args[1])  # type: ignore[arg-type]
    dtype = dtype_of(node.args[1])  # type: ignore[arg-type]
    kernel = e.chosen("window_attention", query, cache, scale, sinks, width, dtype)
    sink_query = e.args[7] if len(e.args) > 7 and e.args[7] is not None else e.args[0]
    return e.kernel(kernel, [*e.args[:4], sink_query], shape_of(node), "float32")


def _gate(node: fx.Node, importer: Any) -> relax.Var:
    e = Emitter(node, importer)
    slots, batch = shape_of(node.args[3])  # type: ignore[arg-type]
    stride, max_chain, couple = node.args[4:7]
    refresh_every, at_most = (*node.args[7:], 0, False)[:2] if len(node.args) < 9 else node.args[7:9]
    options = (int(stride), int(max_chain), bool(couple), int(refresh_every), bool(at_most))  # type: ignore[arg-type]
    return e.kernel(gate(batch, slots, *options), e.args[:4], (batch,), "bool")


def _tas_heads(node: fx.Node, importer: Any) -> relax.Var:
    e = Emitter(node, importer)
    query, cache = shape_of(node.args[0]), shape_of(node.args[1])  # type: ignore[arg-type]
    stride, scale, heads, weights = node.args[3:7]
    factors = np.zeros(query[1], np.float32)
    factors[list(heads)] = weights  # type: ignore[arg-type]
    options = (int(stride), float(scale), dtype_of(node.args[1]))  # type: ignore[arg-type]
    kernel = e.chosen("tas_heads", query, cache, *options)
    return e.kernel(kernel, [*e.args[:3], relax.const(factors, "float32")], shape_of(node), "float32")


def _input_delta(node: fx.Node, importer: Any) -> relax.Var:
    e = Emitter(node, importer)
    return e.kernel(scores.input_delta(*shape_of(node.args[0])), e.args, shape_of(node), "float32")  # type: ignore[arg-type]


def _output_bound(node: fx.Node, importer: Any) -> relax.Var:
    e = Emitter(node, importer)
    stride, weight = int(node.args[5]), float(node.args[6])  # type: ignore[arg-type]
    change = e.kernel(scores.input_delta(*shape_of(node.args[0])), e.args[:2], shape_of(node), "float32")  # type: ignore[arg-type]
    query, cache = node.args[2:4]
    kernel = e.chosen("cosine_distance", shape_of(query), shape_of(cache), stride, dtype_of(cache))  # type: ignore[arg-type]
    distance = e.kernel(kernel, e.args[2:5], shape_of(node), "float32")
    weighted = e.builder.emit(relax.op.multiply(distance, relax.const(weight, "float32")))
    return e.builder.emit(relax.op.add(change, weighted))


def _learned_score(node: fx.Node, importer: Any) -> relax.Var:
    e = Emitter(node, importer)
    kernel = learned_score(*shape_of(node.args[0]), shape_of(node.args[2])[0])  # type: ignore[arg-type]
    return e.kernel(kernel, e.args, shape_of(node), "float32")


def _constant_score(node: fx.Node, importer: Any) -> relax.Var:
    e = Emitter(node, importer)
    value = np.full(shape_of(node), float(node.args[2]), np.float32)  # type: ignore[arg-type]
    return e.builder.emit(relax.const(value, "float32"))


def _random_score(node: fx.Node, importer: Any) -> relax.Var:
    e = Emitter(node, importer)
    rows, layer = int(node.args[1]), int(node.args[2])  # type: ignore[arg-type]
    return e.kernel(scores.random_score(rows, layer), e.args[:1], shape_of(node), "float32")


def _slot_read(node: fx.Node, importer: Any) -> relax.Var:
    e = Emitter(node, importer)
    shape = shape_of(node.args[0])  # type: ignore[arg-type]
    kernel = chain_read(*shape) if len(shape) == 2 else slot_read(shape)
    return e.kernel(kernel, e.args, shape_of(node), dtype_of(node))


def _slot_write(node: fx.Node, importer: Any) -> relax.Var:
    e = Emitter(node, importer)
    shape = shape_of(node)
    return e.in_place(chain_write(*shape) if len(shape) == 2 else slot_write(shape), e.args)


def _offloaded_mlp(node: fx.Node, importer: Any) -> relax.Var:
    e = Emitter(node, importer)
    arguments = [*e.args[:3], importer.literals[int(node.args[3])]]  # type: ignore[arg-type]
    call = relax.call_dps_packed(OFFLOAD_FUNCTION, arguments, relax.TensorType(shape_of(node), "float32"))
    return e.builder.emit(call)


def _offloaded_linear(node: fx.Node, importer: Any) -> relax.Var:
    e = Emitter(node, importer)
    arguments = [e.args[0], importer.literals[int(node.args[1])]]  # type: ignore[arg-type]
    call = relax.call_dps_packed(OFFLOAD_LINEAR_FUNCTION, arguments, relax.TensorType(shape_of(node), "float32"))
    return e.builder.emit(call)


def _offloaded_gate(node: fx.Node, importer: Any) -> relax.Var:
    e = Emitter(node, importer)
    stride, layer = IntImm("int64", int(node.args[5])), importer.literals[int(node.args[6])]  # type: ignore[arg-type]
    results = [relax.TensorType(tuple(v.shape), str(v.dtype).removeprefix("torch.")) for v in node.meta["val"]]
    return e.builder.emit(relax.call_dps_packed(GATE_FUNCTION, [*e.args[:5], stride, layer], results))


def _all(node: fx.Node, importer: Any) -> relax.Var:
    """`all` of a bool vector: min over int8, since the importer has no converter for it."""
    e = Emitter(node, importer)
    smallest = relax.op.min(relax.op.astype(e.args[0], "int8"))
    return e.builder.emit(relax.op.astype(e.builder.emit(smallest), "bool"))


def _add(node: fx.Node, importer: Any) -> relax.Var:
    """A rotary embedding is one kernel; any other sum is TVM's own."""
    found = patterns.rotary(node)
    if found is None:
        return importer.own_converters["add.Tensor"](node)
    e = Emitter(node, importer)
    x, cos, sin = found
    kernel = rotary(shape_of(x), shape_of(cos)[0])  # type: ignore[arg-type]
    tables = [e.reshape(importer.env[n], shape_of(n)) for n in (cos, sin)]
    return e.kernel(kernel, [importer.env[x], *tables], shape_of(node), "float32")


def _mul(node: fx.Node, importer: Any) -> relax.Var:
    """A root-mean-square norm is one kernel; any other product is TVM's own."""
    found = patterns.rms_norm(node)
    if found is None:
        return importer.own_converters["mul.Tensor"](node)
    e = Emitter(node, importer)
    x, weight, epsilon = found
    k = shape_of(weight)[0]
    m = math.prod(shape_of(x)) // k
    y = e.kernel(rms_norm(m, k, epsilon), [e.reshape(importer.env[x], (m, k)), importer.env[weight]], (m, k), "float32")
    return e.reshape(y, shape_of(node))


def _transpose(node: fx.Node, importer: Any) -> relax.Var:
    """Of two axes with at most one longer than 1 between the first and the last of them: no element moves."""
    e = Emitter(node, importer)
    before = shape_of(node.args[0])  # type: ignore[arg-type]
    first, last = sorted(int(a) % len(before) for a in node.args[1:3])  # type: ignore[arg-type]
    if sum(n > 1 for n in before[first : last + 1]) <= 1:
        return e.reshape(e.args[0], shape_of(node))
    axes = list(range(len(before)))
    axes[first], axes[last] = last, first
    return e.builder.emit(relax.op.permute_dims(e.args[0], axes))


def _embedding(node: fx.Node, importer: Any) -> relax.Var:
    """TVM's own converter reads out of bounds for an id outside the vocabulary; this one clips it."""
    e = Emitter(node, importer)
    return e.builder.emit(relax.op.take(e.args[0], e.args[1], axis=0, mode="clip"))


def _select(node: fx.Node, importer: Any) -> relax.Var:
    """As for the embedding: TVM's own converter does not check the index."""
    e = Emitter(node, importer)
    axis, index = int(node.args[1]), int(node.args[2])  # type: ignore[arg-type]
    return e.builder.emit(relax.op.take(e.args[0], relax.const(index, "int64"), axis=axis, mode="clip"))


def _cat(node: fx.Node, importer: Any) -> relax.Var:
    """Many vectors, such as the decisions of all layers, in several steps."""
    values, dtype = list(node.args[0]), dtype_of(node)  # type: ignore[arg-type]
    if len(values) <= MAX_ROWS or len(shape_of(node)) != 1 or any(dtype_of(v) != dtype for v in values):
        return importer.own_converters["cat.default"](node)
    e = Emitter(node, importer)
    rows = [(value, shape_of(v)[0]) for v, value in zip(values, e.args[0], strict=True)]
    while len(rows) > 1:
        groups = [rows[i : i + MAX_ROWS] for i in range(0, len(rows), MAX_ROWS)]
        sizes = [tuple(size for _, size in group) for group in groups]
        rows = [
            (e.kernel(concat_rows(of, dtype), [row for row, _ in group], (sum(of),), dtype), sum(of))
            for group, of in zip(groups, sizes, strict=True)
        ]
    return rows[0][0]


def _split(node: fx.Node, importer: Any) -> relax.Var:
    """A vector in many equal parts, such as the thresholds of all layers, in several steps."""
    e, parts = Emitter(node, importer), [v.shape for v in node.meta["val"]]
    if len(parts) <= MAX_ROWS or any(shape != parts[0] or len(shape) != 1 for shape in parts):
        return importer.own_converters["split.Tensor"](node)
    found = _parted(e, e.args[0], len(parts), int(parts[0][0]), str(node.meta["val"][0].dtype).removeprefix("torch."))
    return e.builder.emit(relax.Tuple(found))


def _parted(e: Emitter, whole: relax.Var, count: int, size: int, dtype: str) -> list[relax.Expr]:
    if count == 1:
        return [whole]
    inner = next((n for n in range(min(MAX_ROWS, count - 1), 0, -1) if count % n == 0), 1) if count > MAX_ROWS else 1
    outer = count // inner
    parts = e.kernels(split_rows(outer, inner * size, dtype), [whole], [((inner * size,), dtype)] * outer)
    rows = [e.builder.emit(relax.TupleGetItem(parts, i)) for i in range(outer)]
    return [part for row in rows for part in _parted(e, row, inner, size, dtype)]


CONVERTERS: dict[str, Converter] = {
    "cat.default": _cat,
    "split.Tensor": _split,
    "select.int": _select,
    "transpose.int": _transpose,
    "add.Tensor": _add,
    "mul.Tensor": _mul,
    "embedding.default": _embedding,
    "layer_norm.default": _layer_norm,
    "linear.default": _linear,
    "all.default": _all,
    "linear_bf16.default": _linear,
    "linear_w8a8.default": _quantized_linear,
    "linear_w4a8.default": _quantized_linear,
    "activation_factor.default": _activation_factor,
    "attention.default": _attention,
    "tas.default": _tas,
    "cache_write.default": _cache_write,
    "ring_row.default": _ring_row,
    "limit.default": _limit,
    "ring_write.default": _ring_write,
    "window_attention.default": _window_attention,
    "gate.default": _gate,
    "tas_heads.default": _tas_heads,
    "input_delta.default": _input_delta,
    "output_bound.default": _output_bound,
    "learned_score.default": _learned_score,
    "constant_score.default": _constant_score,
    "random_score.default": _random_score,
    "slot_read.default": _slot_read,
    "slot_write.default": _slot_write,
    "offloaded_mlp.default": _offloaded_mlp,
    "offloaded_linear.default": _offloaded_linear,
    "offloaded_gate.default": _offloaded_gate,
}
