"""The gate, and the scores that are no attention."""

from __future__ import annotations

import numpy as np
import torch

from fastcar_compile.codegen.tvm.call import FRESH, Call, Value
from fastcar_compile.codegen.tvm.converters.registry import converts
from fastcar_compile.codegen.tvm.kernels.gate.learned_score import learned_score
from fastcar_compile.codegen.tvm.kernels.gate.replay_gate import gate, gate_and_count
from fastcar_compile.codegen.tvm.kernels.gate.scores import input_delta, random_score

fastcar = torch.ops.fastcar


@converts(fastcar.gate.default)
def _gate(call: Call) -> Value:
    slots, batch = call.tensor("chain").shape
    limits = (call.integer("stride"), call.integer("max_chain"))
    rules = (bool(call.integer("couple_cfg")), call.integer("refresh_every"), bool(call.integer("at_most")))
    return call.kernel(gate(batch, slots, *limits, *rules), call.values("score", "threshold", "step", "chain"))


@converts(fastcar.gate_and_count.default)
def _gate_and_count(call: Call) -> Value:
    slots, batch = call.tensor("chain").shape
    limits = (call.integer("stride"), call.integer("max_chain"))
    rules = (bool(call.integer("couple_cfg")), call.integer("refresh_every"), bool(call.integer("at_most")))
    # The decision is a new tensor; the counters are written in place.
    kernel = gate_and_count(batch, slots, *limits, *rules)
    return call.partly_in_place(kernel, call.values("chain", "score", "threshold", "step"), (FRESH, 0))


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
