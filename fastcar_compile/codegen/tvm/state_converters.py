"""Converters of attention, caches, replay and the accelerator's calls."""

from typing import Any

import numpy as np
import torch
from tvm import relax
from tvm.tirx import IntImm

import fastcar_compile.codegen.tvm.fusion  # noqa: F401  (registers the fused operators, which have converters too)
from fastcar_compile.artifact.layout import GATE_FUNCTION, LINEAR_FUNCTION, MLP_FUNCTION
from fastcar_compile.codegen.tvm.importer import FRESH, OperatorCall, Value, converts
from fastcar_compile.codegen.tvm.kernels import cache, draft, gate, learned_score
from fastcar_compile.codegen.tvm.kernels.attention import decode
from fastcar_compile.codegen.tvm.kernels.attention.context import context_attention
from fastcar_compile.ir.exact import EXP_TABLE

fastcar = torch.ops.fastcar


def _softcap(call: OperatorCall) -> tuple[float, ...]:
    """Return the soft-cap as an option of a kernel; nothing without one."""
    return (float(call["softcap"]),) if call.has("softcap") else ()


def positions(call: OperatorCall, *before: Any) -> tuple[Any, ...]:
    """Return the number of positions as the last option, behind `before`; nothing where all rows share one."""
    count = call.tensor("position").shape[0]
    return (*before, count) if count > 1 else ()


def _softcap_and_positions(call: OperatorCall) -> tuple[Any, ...]:
    softcap = _softcap(call)
    return (*softcap, *positions(call, *(() if softcap else (None,))))


def _shared(call: OperatorCall) -> tuple[bool, int | None]:
    """Return whether rows of a video share its cache, which has a kernel of its own, and the window that they see."""
    window = int(call["window"]) if call.has("window") else None
    sinks = window is not None and call["sinks"] > 0
    return call.tensor("query").shape[0] > call.tensor("key_cache").shape[0] and not sinks, window


@converts(fastcar.attention.default, fastcar.window_attention.default)
def _attention(call: OperatorCall) -> Value:
    query, keys, (shared, window) = call.tensor("query"), call.tensor("key_cache"), _shared(call)
    given = call.values("query", "key_cache", "value_cache", "position")
    if shared:
        kind, last = "rows_attention", (keys.dtype, *(_softcap(call) or (None,)), window)
    elif window is not None:
        kind, last = "window_attention", (call["sinks"], window, keys.dtype, *_softcap_and_positions(call))
        given.append((call.optional("sink_query") or query).value)
    elif query.shape[2] == 1:
        kind, last = "attention", (keys.dtype, *_softcap_and_positions(call))
    else:  # one row reads each key once; a chunk is tiled, so that keys are reused by its rows
        kind, last = "attention_chunk", (keys.dtype, *_softcap(call))
    return call.kernel(call.dispatch(kind, query.shape, keys.shape, float(call["scale"]), *last), given)


@converts(fastcar.exact_attention.default, fastcar.exact_window_attention.default)
def _exact_attention(call: OperatorCall) -> Value:
    query, keys, (shared, window) = call.tensor("query"), call.tensor("key_cache"), _shared(call)
    if shared:
        kind, last = "exact_rows_attention", (window,)
    else:
        kind, last = "exact_attention", (None if window is None else (call["sinks"], window), *positions(call))
    kernel = call.dispatch(kind, query.shape, keys.shape, float(call["scale"]), *last)
    # Powers of two between whole exponents come from a table, because libraries round `exp2` in different ways.
    table = call.constant(EXP_TABLE.astype(np.int32))
    return call.kernel(kernel, [*call.values("query", "key_cache", "value_cache", "position"), table])


@converts(fastcar.context_attention.default)
def _context_attention(call: OperatorCall) -> Value:
    """Emit the kernel; without a mask one of zeros."""
    query, values, mask = call.tensor("query"), call.tensor("values"), call.optional("mask")
    rows = 1 if mask is None else mask.shape[0]
    added = call.constant(np.zeros((1, 1, 1, values.shape[2]), np.float32)) if mask is None else mask.value
    kernel = context_attention(query.shape, values.shape, rows, float(call["scale"]), *_softcap(call))
    return call.kernel(kernel, [*call.values("query", "keys", "values"), added])


@converts(fastcar.tas.default, fastcar.tas_heads.default)
def _tas(call: OperatorCall) -> Value:
    query, keys, kind = call.tensor("query"), call.tensor("key_cache"), "tas"
    arguments = call.values("query", "key_cache", "position")
    if call.has("heads"):
        # Heads and weights are data and not options: one kernel serves all layers.
        kind, factors = "tas_heads", np.zeros(query.shape[1], np.float32)
        factors[list(call["heads"])] = list(call["weights"])
        arguments.append(call.constant(factors))
    options = (call["stride"], float(call["scale"]), keys.dtype, *positions(call))
    return call.kernel(call.dispatch(kind, query.shape, keys.shape, *options), arguments)


@converts(fastcar.cache_write.default, fastcar.ring_write.default)
def _cache_write(call: OperatorCall) -> Value:
    batch, _, rows, d = call.tensor("value").shape
    count = call.tensor("position").shape[0]
    last = ((batch, count),) if count > 1 else ()
    kind, sinks = ("ring_write", (call["sinks"],)) if call.has("sinks") else ("cache_write", ())
    # The kernels take the cache's shape with D of a head, whatever bytes a cached row has.
    kernel = call.dispatch(kind, (*call.shape[:3], d), rows, *sinks, call.dtype, *last)
    return call.in_place(kernel, call.values("cache", "value", "position"))


@converts(fastcar.ring_row.default)
def _ring_row(call: OperatorCall) -> Value:
    kernel = decode.ring_row(call["back"], call["sinks"], call["ring"], *positions(call))
    return call.kernel(kernel, call.values("position"))


@converts(fastcar.limit.default)
def _limit(call: OperatorCall) -> Value:
    return call.emit(relax.op.minimum(call.tensor("positions").value, relax.const(call["most"], "int64")))


@converts(fastcar.slot_read.default)
def _slot_read(call: OperatorCall) -> Value:
    kernel = cache.slot_read(call.tensor("cache").shape, call.dtype, *_steps(call))
    return call.kernel(kernel, call.values("cache", "step"))


def _steps(call: OperatorCall) -> tuple[int, ...]:
    """Return the number of steps as a kernel's last option; nothing where all rows share one."""
    count = call.tensor("step").shape[0]
    return (count,) if count > 1 else ()


@converts(fastcar.slot_write.default)
def _slot_write(call: OperatorCall) -> Value:
    return call.in_place(cache.slot_write(call.shape, call.dtype, *_steps(call)), call.values("cache", "value", "step"))


@converts(fastcar.keep_frame.default)
def _keep_frame(call: OperatorCall) -> Value:
    # Both caches are written in place: results 0 and 1 are arguments 0 and 1.
    kernel = cache.slots_write(call.tensor("cache").shape, *_steps(call))
    return call.in_place(kernel, call.values("cache", "inputs", "y", "x", "replay", "step"), (0, 1))


@converts(fastcar.gate.default, fastcar.gate_and_count.default)
def _gate(call: OperatorCall) -> Value:
    slots, videos = call.tensor("chain").shape
    (batch,) = call.tensor("score").shape
    steps = next(((videos, count) for count in _steps(call)), None)
    rules = gate.GateRules.of(call)
    counts = call.target is fastcar.gate_and_count.default
    kernel = gate.gate(batch, slots, rules, steps, counts)
    arguments = call.values("chain", "score", "threshold", "step")
    # The decision is a new tensor; the counters are written in place.
    return call.in_place(kernel, arguments, (FRESH, 0)) if counts else call.kernel(kernel, arguments)


@converts(fastcar.input_delta.default)
def _input_delta(call: OperatorCall) -> Value:
    return call.kernel(gate.input_delta(*call.tensor("x").rows), call.values("x", "cached"))


@converts(fastcar.learned_score.default)
def _learned_score(call: OperatorCall) -> Value:
    kernel = learned_score.learned_score(*call.tensor("x").rows, call.tensor("w1").shape[0])
    return call.kernel(kernel, call.values("x", "cached", "w1", "b1", "w2", "b2"))


@converts(fastcar.draft_gain.default)
def _draft_gain(call: OperatorCall) -> Value:
    rows, width = call.tensor("x").rows
    change = call.kernel(gate.input_delta(rows, width), call.values("x", "cached"), (rows,))
    kernel = draft.draft_gain(rows, call.tensor("gains").shape[0])
    return call.kernel(kernel, [change, *call.values("edges", "gains")])


@converts(fastcar.draft_difference.default)
def _draft_difference(call: OperatorCall) -> Value:
    rows, width = call.shape
    return call.kernel(draft.draft_difference(rows, width), call.values("both", "gain"))


@converts(fastcar.draft_sum.default)
def _draft_sum(call: OperatorCall) -> Value:
    rows, width = call.shape
    return call.kernel(draft.draft_sum(rows, width), call.values("left", "cached", "bias", "gain"))


@converts(fastcar.constant_score.default)
def _constant_score(call: OperatorCall) -> Value:
    return call.emit(call.constant(np.full(call.shape, float(call["value"]), np.float32)))


@converts(fastcar.random_score.default)
def _random_score(call: OperatorCall) -> Value:
    kernel = gate.random_score(call.shape[0], call["layer"], call["share"])
    return call.kernel(kernel, call.values("step"))


@converts(fastcar.offloaded_mlp.default)
def _offloaded_mlp(call: OperatorCall) -> Value:
    return call.packed(MLP_FUNCTION, [*call.values("x", "replay", "cached"), call.literal("layer")])


@converts(fastcar.offloaded_linear.default)
def _offloaded_linear(call: OperatorCall) -> Value:
    return call.packed(LINEAR_FUNCTION, [*call.values("x"), call.literal("name")])


@converts(fastcar.offloaded_gate.default)
def _offloaded_gate(call: OperatorCall) -> Value:
    """Emit the call; what the gate does not read is the integer 0."""
    given = [call.optional(name) for name in ("query", "key_cache", "x", "cached")]
    operands = [IntImm("int64", 0) if operand is None else operand.value for operand in given]
    tensors: list[relax.Expr] = [*operands, *call.values("chain", "position", "step")]
    return call.packed(GATE_FUNCTION, [*tensors, IntImm("int64", call["stride"]), call.literal("layer")])
