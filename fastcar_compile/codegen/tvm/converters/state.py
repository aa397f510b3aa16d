"""Attention over the whole cache and over a window, and the temporal attention scores."""

from __future__ import annotations

import numpy as np
import torch
from tvm import relax
from tvm.tirx import IntImm

from fastcar_compile.artifact.offload import GATE_FUNCTION, LINEAR_FUNCTION, MLP_FUNCTION
from fastcar_compile.codegen.tvm.call import FRESH, Call, Value
from fastcar_compile.codegen.tvm.converters.numeric import converts
from fastcar_compile.codegen.tvm.kernels.attention.decode import context_attention, ring_row
from fastcar_compile.codegen.tvm.kernels.cache import chain_read, chain_write, slot_read, slot_write, slots_write
from fastcar_compile.codegen.tvm.kernels.gate import gate, gate_and_count, input_delta, random_score
from fastcar_compile.codegen.tvm.kernels.learned_score import learned_score
from fastcar_compile.codegen.tvm.relax_api import Shape
from fastcar_compile.ir.exact import EXP_TABLE

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


# Key and value caches, ring caches, and the slots that hold one frame.


@converts(fastcar.cache_write.default)
def _cache_write(call: Call) -> Value:
    kernel = call.dispatch("cache_write", *_appended(call), call.dtype)
    return call.in_place(kernel, call.values("cache", "value", "position"))


@converts(fastcar.ring_write.default)
def _ring_write(call: Call) -> Value:
    kernel = call.dispatch("ring_write", *_appended(call), call.integer("sinks"), call.dtype)
    return call.in_place(kernel, call.values("cache", "value", "position"))


def _appended(call: Call) -> tuple[Shape, int]:
    """Return the cache's shape [B, Hkv, S, D], D that of a head, and how many rows it gets."""
    value = call.tensor("value").shape
    return (*call.shape[:3], value[3]), value[2]


@converts(fastcar.ring_row.default)
def _ring_row(call: Call) -> Value:
    kernel = ring_row(call.integer("back"), call.integer("sinks"), call.integer("ring"))
    return call.kernel(kernel, call.values("position"))


@converts(fastcar.limit.default)
def _limit(call: Call) -> Value:
    return call.emit(relax.op.minimum(call.tensor("positions").value, relax.const(call.integer("most"), "int64")))


@converts(fastcar.slot_read.default)
def _slot_read(call: Call) -> Value:
    slots, batch, *width = call.tensor("cache").shape
    kernel = slot_read((slots, batch, width[0])) if width else chain_read(slots, batch)
    return call.kernel(kernel, call.values("cache", "step"))


@converts(fastcar.slot_write.default)
def _slot_write(call: Call) -> Value:
    slots, batch, *width = call.shape
    # A chain counter [F, B] has no width, and a kernel of its own.
    kernel = slot_write((slots, batch, width[0])) if width else chain_write(slots, batch)
    return call.in_place(kernel, call.values("cache", "value", "step"))


@converts(fastcar.keep_frame.default)
def _keep_frame(call: Call) -> Value:
    slots, batch, width = call.tensor("cache").shape
    # Both caches are written in place: results 0 and 1 are arguments 0 and 1.
    kernel = slots_write((slots, batch, width))
    return call.partly_in_place(kernel, call.values("cache", "inputs", "y", "x", "replay", "step"), (0, 1))


# The gate, and the scores that are no attention.


@converts(fastcar.gate.default)
def _gate(call: Call) -> Value:
    return call.kernel(gate(*_gate_options(call)), call.values("score", "threshold", "step", "chain"))


@converts(fastcar.gate_and_count.default)
def _gate_and_count(call: Call) -> Value:
    # The decision is a new tensor; the counters are written in place.
    arguments = call.values("chain", "score", "threshold", "step")
    return call.partly_in_place(gate_and_count(*_gate_options(call)), arguments, (FRESH, 0))


def _gate_options(call: Call) -> tuple[int, int, int, int, bool, int, bool]:
    """Return the options of `gate`, in their order."""
    slots, batch = call.tensor("chain").shape
    limits = (call.integer("stride"), call.integer("max_chain"))
    rules = (bool(call.integer("couple_cfg")), call.integer("refresh_every"), bool(call.integer("at_most")))
    return (batch, slots, *limits, *rules)


@converts(fastcar.input_delta.default)
def _input_delta(call: Call) -> Value:
    return call.kernel(input_delta(*call.tensor("x").rows), call.values("x", "cached"))


@converts(fastcar.output_bound.default)
def _output_bound(call: Call) -> Value:
    query, keys = call.tensor("query"), call.tensor("key_cache")
    # The change of the input is a score of its own, and here one term of the bound.
    change = call.kernel(input_delta(*call.tensor("x").rows), call.values("x", "cached"))
    options = (call.integer("stride"), call.number("weight"), keys.dtype)
    kernel = call.dispatch("output_bound", query.shape, keys.shape, *options)
    return call.kernel(kernel, [change, *call.values("query", "key_cache", "position")])


@converts(fastcar.learned_score.default)
def _learned_score(call: Call) -> Value:
    kernel = learned_score(*call.tensor("x").rows, call.tensor("w1").shape[0])
    return call.kernel(kernel, call.values("x", "cached", "w1", "b1", "w2", "b2"))


@converts(fastcar.constant_score.default)
def _constant_score(call: Call) -> Value:
    return call.emit(call.constant(np.full(call.shape, call.number("value"), np.float32)))


@converts(fastcar.random_score.default)
def _random_score(call: Call) -> Value:
    return call.kernel(random_score(call.integer("rows"), call.integer("layer")), call.values("step"))


# Calls of the accelerator, as packed functions that the runtime registers.


@converts(fastcar.offloaded_mlp.default)
def _offloaded_mlp(call: Call) -> Value:
    return call.packed(MLP_FUNCTION, [*call.values("x", "replay", "cached"), call.literal("layer")])


@converts(fastcar.offloaded_linear.default)
def _offloaded_linear(call: Call) -> Value:
    return call.packed(LINEAR_FUNCTION, [*call.values("x"), call.literal("name")])


@converts(fastcar.offloaded_gate.default)
def _offloaded_gate(call: Call) -> Value:
    """Emit the call; what the gate does not read is the integer 0."""
    given = [call.optional(name) for name in ("query", "key_cache", "x", "cached")]
    operands = [IntImm("int64", 0) if operand is None else operand.value for operand in given]
    tensors: list[relax.Expr] = [*operands, *call.values("chain", "position", "step")]
    return call.packed(GATE_FUNCTION, [*tensors, IntImm("int64", call.integer("stride")), call.literal("layer")])
