"""Converters for a GPU: each makes of one call of one operator the Relax calls of its kernels."""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch._ops import OpOverload
from torch.fx.node import Target
from tvm import relax, te, tirx

from fastcar_compile.codegen.tvm.converters import CONVERTERS, all_of, select
from fastcar_compile.codegen.tvm.fusion import QUANTIZED_LINEARS
from fastcar_compile.codegen.tvm.gpu import kernels, states
from fastcar_compile.codegen.tvm.gpu.shaders import BINDINGS, STORED
from fastcar_compile.codegen.tvm.importer import FRESH, Converter, OperatorCall, SegmentImporter, Value
from fastcar_compile.codegen.tvm.isa import PORTABLE
from fastcar_compile.codegen.tvm.kernels import OPAQUE
from fastcar_compile.codegen.tvm.kernels.gate import GateRules
from fastcar_compile.codegen.tvm.relax_api import dtype_of, shape_of
from fastcar_compile.errors import CompileError
from fastcar_compile.ir.ops.linear import factor_table

aten, fastcar = torch.ops.aten, torch.ops.fastcar

FUSABLE = 4
"""Relax's kOutEWiseFusable: elementwise operators behind the kernel become its epilogue."""

_OWN: dict[Target, Converter] = {}


def gpu(*operators: OpOverload) -> Callable[[Converter], Converter]:
    """Register a function as the GPU's converter of these operators."""

    def register(converter: Converter) -> Converter:
        _OWN.update(dict.fromkeys(operators, converter))
        return converter

    return register


def _stored(call: OperatorCall, name: str) -> torch.Tensor:
    """Return the type of an argument as the program has it."""
    return call.node(name).meta[STORED]


def _kind(call: OperatorCall, name: str) -> str:
    return dtype_of(_stored(call, name))


def _emit(
    call: OperatorCall,
    name: str,
    define: Callable[..., Any],
    args: Sequence[relax.Expr],
    pattern: int,
    shape: Sequence[int] | None = None,
) -> Any:
    """Emit a definition as a kernel of one result; pattern: how Relax may fuse it. shape: of a matrix, to be fused."""
    inputs = [te.placeholder(shape_of(a), str(a.ty.dtype), f"in{i}") for i, a in enumerate(args)]
    result = define(*inputs)
    if shape is not None:
        result = kernels.shaped(result, shape)
    made = te.create_prim_func([*inputs, result], "int64")  # as the shapes of TVM's own kernels, which it may join
    kernel: Any = made.without_attr("global_symbol").with_attr("op_pattern", pattern)
    kernel.__name__ = name
    return call.kernel(kernel, args, tuple(int(d) for d in result.shape), str(result.dtype))


def _rows(call: OperatorCall, name: str) -> relax.Expr:
    """Return an argument [..., K] as a matrix."""
    value = call.tensor(name).value
    shape = shape_of(value)
    return call.reshape(value, (math.prod(shape[:-1]), shape[-1]))


def _biased(call: OperatorCall, y: relax.Expr) -> Value:
    bias = call.optional("bias")
    return y if bias is None else call.emit(relax.op.add(y, bias.value))


def _float_linear(rows: str, call: OperatorCall) -> Value:
    kind, k = _kind(call, "weight"), _stored(call, "weight").shape[1]
    if kind != "float32" and k % 2:
        what = f"a shader multiplies {kind} weights in pairs, and a row has {k}"
        raise CompileError(what, where="quant", hint="choose quant='none', 'w8a8' or 'w4a8'")
    args = [_rows(call, rows), call.tensor("weight").value]
    return _biased(call, _emit(call, f"linear_{kind}", kernels.float_linear(kind), args, FUSABLE, call.shape))


@gpu(fastcar.integer_linear.default)
def _integer_linear(call: OperatorCall) -> Value:
    rows, weight, scale = _rows(call, "rows"), *call.values("qweight", "wscale")
    if _kind(call, "qweight") == "int8":
        return _biased(
            call, _emit(call, "linear_w8a8", kernels.linear_w8a8, [rows, weight, scale], FUSABLE, call.shape)
        )
    acc = _emit(call, "groups_w4a8", kernels.groups_w4a8, [rows, weight], FUSABLE)
    return _biased(call, _emit(call, "total_w4a8", kernels.total_w4a8, [acc, rows, scale], 1, call.shape))


def _quantized(call: OperatorCall, name: str, define: Callable[..., Any], args: Sequence[relax.Expr]) -> Value:
    """Emit rows with their scales behind them: one value stands for both results."""
    rows = _emit(call, name, define, args, OPAQUE)
    return rows, rows


@gpu(fastcar.quantize_rows.default)
def _quantize_rows(call: OperatorCall) -> Value:
    return _quantized(call, "quantize_rows", kernels.quantize_rows, [_rows(call, "x")])


@gpu(fastcar.gated_quantize.default)
def _gated_quantize(call: OperatorCall) -> Value:
    table = call.constant(factor_table(call["activation"]).numpy())
    return _quantized(
        call, "gated_quantize", kernels.gated(call["activation"]), [_rows(call, "gate"), _rows(call, "up"), table]
    )


@gpu(fastcar.activation_factor.default)
def _activation_factor(call: OperatorCall) -> Value:
    x = call.tensor("x")
    args = [call.reshape(x.value, (math.prod(x.shape),)), call.constant(factor_table(call["activation"]).numpy())]
    made = _emit(call, "activation_factor", kernels.activation_factor(call["activation"]), args, 1)
    return call.reshape(made, x.shape)


def _norm(name: str, quantizes: bool, call: OperatorCall) -> Value:
    args, size = [_rows(call, "x")], call.tensor("x").shape[-1]
    if call.has("weight"):
        args.append(call.tensor("weight").value)
    elif name.startswith("layer"):
        args.append(call.constant(np.ones(size, np.float32)))
    if name.startswith("layer"):
        bias = call.optional("bias")
        args.append(call.constant(np.zeros(size, np.float32)) if bias is None else bias.value)
    define = kernels.norm(float(call["epsilon"]), quantizes=quantizes)
    if quantizes:
        return _quantized(call, name, define, args)
    return call.reshape(_emit(call, name, define, args, OPAQUE), call.tensor("x").shape)


@gpu(fastcar.rotary.default)
def _rotary(call: OperatorCall) -> Value:
    """Emit the rotation, with the norm of the heads before it where there is one and no axis of a row moves."""
    turned: Any = call.node("x")
    normed = turned.args[0] if turned.target is aten.transpose.int else turned
    if normed.target is fastcar.rms_norm.default and math.prod(call.shape) == call.shape[1] * call.shape[3]:
        norm = call.of(normed)
        args = [_rows(norm, "x"), norm.tensor("weight").value, *call.values("cos", "sin")]
        made = _emit(call, "norm_rotary", kernels.norm_rotary(float(norm["epsilon"])), args, OPAQUE)
        return call.reshape(made, call.shape)
    return _emit(call, "rotary", kernels.rotary, call.values("x", "cos", "sin"), 2)


@gpu(fastcar.cache_write.default, fastcar.ring_write.default)
def _cache_write(call: OperatorCall) -> Value:
    batch, _, rows, dim = call.tensor("value").shape
    videos, heads, length, _ = call.tensor("cache").shape
    sinks = call["sinks"] if call.has("sinks") else None
    count = call.tensor("position").shape[0]
    kernel = states.cache_write((videos, heads, length, dim), batch, rows, _kind(call, "cache"), count, sinks)
    return call.in_place(kernel, call.values("cache", "value", "position"))


@gpu(fastcar.attention.default, fastcar.window_attention.default)
def _attention(call: OperatorCall) -> Value:
    query, keys = call.tensor("query"), call.tensor("key_cache")
    window = (call["sinks"], call["window"]) if call.has("window") else None
    softcap = float(call["softcap"]) if call.has("softcap") else None
    count, args = call.tensor("position").shape[0], call.values("query", "key_cache", "value_cache", "position")
    options = (float(call["scale"]), _kind(call, "key_cache"), count, window, softcap)
    kernel = states.attention(query.shape, keys.shape, *options)
    return call.kernel(kernel, args)


@gpu(fastcar.tas.default, fastcar.tas_heads.default)
def _tas(call: OperatorCall) -> Value:
    query, args = call.tensor("query"), call.values("query", "key_cache", "position")
    scale, count = float(call["scale"]), query.shape[1]
    if call.has("heads"):
        factors, count = np.zeros(query.shape[1], np.float32), 1
        factors[list(call["heads"])] = list(call["weights"])
        args.append(call.constant(factors))
    define = kernels.tas(call["stride"], scale / count, _kind(call, "key_cache"))
    return _emit(call, "tas", define, args, OPAQUE)


@gpu(fastcar.input_delta.default)
def _input_delta(call: OperatorCall) -> Value:
    """Emit the score, which reads the slot of the frame before by itself."""
    cached = call.node("cached")
    if cached.target is not fastcar.slot_read.default:
        return _emit(call, "input_delta", kernels.input_delta, call.values("x", "cached"), OPAQUE)
    args = [call.tensor("x").value, *call.of(cached).values("cache", "step")]
    return _emit(call, "input_delta", lambda x, *slot: kernels.input_delta(x, kernels.slot_read(*slot)), args, OPAQUE)


@gpu(fastcar.learned_score.default)
def _learned_score(call: OperatorCall) -> Value:
    features = _emit(call, "change_features", kernels.change_features, call.values("x", "cached"), OPAQUE)
    args = [features, call.tensor("w1").value]
    sums = _emit(call, "linear_bfloat16", kernels.float_linear("bfloat16"), args, FUSABLE)
    return _emit(call, "learned_score", kernels.learned_score, [sums, *call.values("b1", "w2", "b2")], OPAQUE)


@gpu(fastcar.draft_gain.default)
def _draft_gain(call: OperatorCall) -> Value:
    change = _emit(call, "input_delta", kernels.input_delta, call.values("x", "cached"), OPAQUE)
    return _emit(call, "draft_gain", kernels.draft_gain, [change, *call.values("edges", "gains")], OPAQUE)


@gpu(fastcar.draft_difference.default)
def _draft_difference(call: OperatorCall) -> Value:
    return _emit(call, "draft_difference", kernels.draft_difference, call.values("both", "gain"), OPAQUE)


@gpu(fastcar.draft_sum.default)
def _draft_sum(call: OperatorCall) -> Value:
    return _emit(call, "draft_sum", kernels.draft_sum, call.values("left", "cached", "bias", "gain"), OPAQUE)


@gpu(fastcar.draft_features_quantize.default)
def _draft_features_quantize(call: OperatorCall) -> Value:
    args = [_rows(call, "gate"), _rows(call, "up"), *call.values("inner", "gain")]
    args.append(call.constant(factor_table(call["activation"]).numpy()))
    return _quantized(call, "draft_features", kernels.draft_features(call["activation"]), args)


@gpu(fastcar.ring_row.default)
def _ring_row(call: OperatorCall) -> Value:
    define = kernels.ring_row(call["back"], call["sinks"], call["ring"])
    return _emit(call, "ring_row", define, call.values("position"), OPAQUE)


@gpu(fastcar.limit.default)
def _limit(call: OperatorCall) -> Value:
    return call.emit(relax.op.minimum(call.tensor("positions").value, relax.const(call["most"], "int32")))


@gpu(fastcar.slot_read.default)
def _slot_read(call: OperatorCall) -> Value:
    return _emit(call, "slot_read", kernels.slot_read, call.values("cache", "step"), OPAQUE)


@gpu(fastcar.slot_write.default)
def _slot_write(call: OperatorCall) -> Value:
    cache, step = call.tensor("cache"), call.tensor("step")
    kernel = states.slot_write(cache.shape, cache.dtype, step.shape[0])
    return call.in_place(kernel, call.values("cache", "value", "step"))


@gpu(fastcar.keep_frame.default)
def _keep_frame(call: OperatorCall) -> Value:
    kernel = states.keep_frame(call.tensor("cache").shape, call.tensor("step").shape[0])
    return call.in_place(kernel, call.values("cache", "inputs", "y", "x", "replay", "step"), (0, 1))


@gpu(fastcar.gate.default, fastcar.gate_and_count.default)
def _gate(call: OperatorCall) -> Value:
    slots, videos = call.tensor("chain").shape
    (batch,), (count,) = call.tensor("score").shape, call.tensor("step").shape
    counts = call.target is fastcar.gate_and_count.default
    kernel = states.gate(batch, slots, videos, count, GateRules.of(call), counts)
    args = call.values("chain", "score", "threshold", "step")
    return call.in_place(kernel, args, (FRESH, 0)) if counts else call.kernel(kernel, args)


@gpu(aten.embedding.default)
def _embedding(call: OperatorCall) -> Value:
    """Emit the rows as float32, whatever type the table has."""
    kind, (weight, indices) = _kind(call, "weight"), call.values("weight", "indices")
    shape, width = shape_of(indices), _stored(call, "weight").shape[-1]

    def rows(table: Any, ids: Any) -> Any:
        last = table.shape[0] - 1

        def value(*at: Any) -> Any:
            row = tirx.max(tirx.min(ids[at[:-1]], last), 0)
            return kernels.float_at(lambda word: table[row, word], kind, at[-1])

        return te.compute((*shape, width), value, "rows")

    return _emit(call, "embedding", rows, [weight, indices], 2)


@gpu(aten.cat.default)
def _cat(call: OperatorCall) -> Value:
    """Emit a tree of joins: a shader binds few buffers."""
    parts, most = [part.value for part in call.tensors("tensors")], BINDINGS - 1
    axis = call["dim"] if call.has("dim") else 0
    while len(parts) > 1:
        groups = [parts[i : i + most] for i in range(0, len(parts), most)]
        parts = [call.emit(relax.op.concat(g, axis)) if len(g) > 1 else g[0] for g in groups]
    return parts[0]


@gpu(aten.split.Tensor)
def _split(call: OperatorCall) -> Value:
    """Emit a slice for each part: one kernel for all would bind too many buffers."""
    whole, size = call.tensor("self"), int(call["split_size"])
    axis = call["dim"] if call.has("dim") else 0
    return tuple(
        call.emit(relax.op.strided_slice(whole.value, [axis], [i * size], [min((i + 1) * size, whole.shape[axis])]))
        for i in range(len(call.results))
    )


_SHARED = (
    *(aten.transpose.int, aten.full.default, aten.masked_fill.Scalar, aten.clamp.default, aten.index.Tensor),
    fastcar.constant_score.default,
)
_STOCK = (aten.sigmoid.default, aten.tanh.default, aten.silu.default, aten.gelu.default)

_OWN |= {
    aten.linear.default: partial(_float_linear, "input"),
    aten.all.default: partial(all_of, number="int32"),
    aten.select.int: partial(select, number="int32"),
    fastcar.linear_half.default: partial(_float_linear, "x"),
    fastcar.rms_norm.default: partial(_norm, "rms_norm", False),
    fastcar.rms_norm_quantize.default: partial(_norm, "rms_norm_quantize", True),
    fastcar.layer_norm.default: partial(_norm, "layer_norm", False),
    fastcar.layer_norm_quantize.default: partial(_norm, "layer_norm_quantize", True),
    **{operator: CONVERTERS[operator] for operator in _SHARED},
    **{operator: OperatorCall.stock for operator in _STOCK},
}


SHADERLESS = {
    "exact_": "compile with numerics='native', or for the target cpu or wasm32",
    "random_score": "choose another gate, or the target cpu",
    "context_attention": "a decoder with cross-attention needs the target cpu",
}
"""Part of an operator's name -> what to do where it has no shader."""


class GpuImporter(SegmentImporter):
    """Imports graphs that `narrow` has given a GPU's types."""

    converters: Mapping[Target, Converter] = _OWN

    @classmethod
    def for_questions(cls) -> "GpuImporter":
        """Return one that is asked what it knows."""
        return cls(relax.BlockBuilder(), PORTABLE)

    def knows(self, target: Target) -> bool:
        """Whether an operator has a shader: those of this package need one of their own."""
        own = getattr(target, "namespace", "") == "fastcar"
        return target in _OWN or target in QUANTIZED_LINEARS if own else super().knows(target)
