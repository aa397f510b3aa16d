"""Attention over the whole cache and over a window, and the temporal attention scores."""

from __future__ import annotations

import numpy as np
import torch
from tvm import relax

from fastcar_compile.codegen.tvm.call import Call, Value
from fastcar_compile.codegen.tvm.converters.registry import converts

fastcar = torch.ops.fastcar


def _softcap(call: Call) -> tuple[float, ...]:
    """Return the soft-cap as the kernels' last option; nothing without one."""
    return () if call.is_none("softcap") else (call.number("softcap"),)


@converts(fastcar.attention.default)
def _attention(call: Call) -> Value:
    query, keys = call.tensor("query"), call.tensor("key_cache")
    kind = "attention" if query.shape[2] == 1 else "attention_chunk"
    kernel = call.dispatch(kind, query.shape, keys.shape, call.number("scale"), keys.dtype, *_softcap(call))
    return call.kernel(kernel, call.values("query", "key_cache", "value_cache", "position"))


@converts(fastcar.window_attention.default)
def _window_attention(call: Call) -> Value:
    query, keys = call.tensor("query"), call.tensor("key_cache")
    options = (call.number("scale"), call.integer("sinks"), call.integer("window"), keys.dtype, *_softcap(call))
    kernel = call.dispatch("window_attention", query.shape, keys.shape, *options)
    sink_query = call.optional("sink_query") or query
    return call.kernel(kernel, [*call.values("query", "key_cache", "value_cache", "position"), sink_query.value])


@converts(fastcar.context_attention.default)
def _context_attention(call: Call) -> Value:
    """Emit products and a softmax of TVM's own: a context is short beside the weights of a layer."""
    query, keys = call.tensor("query"), call.tensor("keys")
    (batch, heads, steps, dim), kv_heads = query.shape, keys.shape[1]
    scaled = call.emit(relax.op.multiply(query.value, _float(call.number("scale"))))
    grouped = call.reshape(scaled, (batch, kv_heads, heads // kv_heads * steps, dim))
    turned = call.emit(relax.op.permute_dims(keys.value, [0, 1, 3, 2]))
    logits = call.emit(relax.op.matmul(grouped, turned))
    for limit in _softcap(call):
        inner = call.emit(relax.op.tanh(call.emit(relax.op.divide(logits, _float(limit)))))
        logits = call.emit(relax.op.multiply(inner, _float(limit)))
    if (mask := call.optional("mask")) is not None:
        logits = call.emit(relax.op.add(logits, mask.value))
    weights = call.emit(relax.op.nn.softmax(logits, axis=-1))
    return call.reshape(call.emit(relax.op.matmul(weights, call.tensor("values").value)), call.shape)


def _float(value: float) -> relax.Expr:
    return relax.const(value, "float32")


@converts(fastcar.tas.default)
def _tas(call: Call) -> Value:
    query, keys = call.tensor("query"), call.tensor("key_cache")
    kernel = call.dispatch("tas", query.shape, keys.shape, call.integer("stride"), call.number("scale"), keys.dtype)
    return call.kernel(kernel, call.values("query", "key_cache", "position"))


@converts(fastcar.tas_heads.default)
def _tas_heads(call: Call) -> Value:
    query, keys = call.tensor("query"), call.tensor("key_cache")
    factors = np.zeros(query.shape[1], np.float32)
    factors[call.numbers("heads")] = call.numbers("weights")
    options = (call.integer("stride"), call.number("scale"), keys.dtype)
    kernel = call.dispatch("tas_heads", query.shape, keys.shape, *options)
    return call.kernel(kernel, [*call.values("query", "key_cache", "position"), call.constant(factors)])
