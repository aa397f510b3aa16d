"""Calls of the accelerator, as packed functions that the runtime registers."""

from __future__ import annotations

import torch
from tvm import relax
from tvm.tirx import IntImm

from fastcar_compile.artifact.offload import GATE_FUNCTION, LINEAR_FUNCTION, MLP_FUNCTION
from fastcar_compile.codegen.tvm.call import Call, Value
from fastcar_compile.codegen.tvm.converters.registry import converts

fastcar = torch.ops.fastcar


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
