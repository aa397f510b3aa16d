"""Attention over the whole cache and over a window, and the temporal attention scores."""

from __future__ import annotations

import numpy as np
import torch

from fastcar_compile.codegen.tvm.call import Call, Value
from fastcar_compile.codegen.tvm.converters.registry import converts
from fastcar_compile.codegen.tvm.kernels.attention.context import context_attention
from fastcar_compile.exact import EXP_TABLE

fastcar = torch.ops.fastcar


def _softcap(call: Call) -> tuple[float, ...]:
    """Return the soft-cap as the kernels' last option; nothing without one."""
    return () if call.is_none("softcap") else (call.number("softcap"),)


@converts(fastcar.attention.default)
def _attention(call: Call) -> Value:
    query, keys = call.tensor("query"), call.tensor("key_cache")
    # One row reads each key once; a chunk is tiled, so that keys are reused by its rows.
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


@converts(fastcar.exact_attention.default)
def _exact_attention(call: Call) -> Value:
    return _exact(call, ())


@converts(fastcar.exact_window_attention.default)
def _exact_window_attention(call: Call) -> Value:
    return _exact(call, ((call.integer("sinks"), call.integer("window")),))


def _exact(call: Call, window: tuple[tuple[int, int], ...]) -> Value:
    query, keys = call.tensor("query"), call.tensor("key_cache")
    kernel = call.dispatch("exact_attention", query.shape, keys.shape, call.number("scale"), *window)
    # Powers of two between whole exponents come from a table, because libraries round `exp2` in different ways.
    table = call.constant(EXP_TABLE.astype(np.int32))
    return call.kernel(kernel, [*call.values("query", "key_cache", "value_cache", "position"), table])


@converts(fastcar.context_attention.default)
def _context_attention(call: Call) -> Value:
    """Emit the kernel; without a mask one of zeros."""
    query, values, mask = call.tensor("query"), call.tensor("values"), call.optional("mask")
    rows = 1 if mask is None else mask.shape[0]
    added = call.constant(np.zeros((1, 1, 1, values.shape[2]), np.float32)) if mask is None else mask.value
    kernel = context_attention(query.shape, values.shape, rows, call.number("scale"), *_softcap(call))
    return call.kernel(kernel, [*call.values("query", "keys", "values"), added])


@converts(fastcar.tas.default)
def _tas(call: Call) -> Value:
    query, keys = call.tensor("query"), call.tensor("key_cache")
    kernel = call.dispatch("tas", query.shape, keys.shape, call.integer("stride"), call.number("scale"), keys.dtype)
    return call.kernel(kernel, call.values("query", "key_cache", "position"))


@converts(fastcar.tas_heads.default)
def _tas_heads(call: Call) -> Value:
    query, keys = call.tensor("query"), call.tensor("key_cache")
    # Heads and weights are data and not options: one kernel serves all layers.
    factors = np.zeros(query.shape[1], np.float32)
    factors[call.numbers("heads")] = call.numbers("weights")
    options = (call.integer("stride"), call.number("scale"), keys.dtype)
    kernel = call.dispatch("tas_heads", query.shape, keys.shape, *options)
    return call.kernel(kernel, [*call.values("query", "key_cache", "position"), call.constant(factors)])
