"""Calls of the accelerator, as packed functions that the runtime registers."""

from __future__ import annotations

import torch
from tvm import relax
from tvm.tirx import IntImm

from fastcar_compile.codegen.tvm.call import Call, Value
from fastcar_compile.codegen.tvm.converters.registry import converts

fastcar = torch.ops.fastcar

OFFLOAD_FUNCTION = "fastcar.offloaded_mlp"
"""Packed function (x [B, H], replay [B], cached [B, H], layer, out [B, H])."""

OFFLOAD_LINEAR_FUNCTION = "fastcar.offloaded_linear"
"""Packed function (x [B, K], name, out [B, N])."""

GATE_FUNCTION = "fastcar.offloaded_gate"
"""Packed function (query [B, Hq, 1, D], key cache [B, Hkv, S, D], chain [B], position [1], step [1], stride, layer,
replay [B], score [B], new chain [B]). The last three are its results."""


@converts(fastcar.offloaded_mlp.default)
def _offloaded_mlp(call: Call) -> Value:
    return call.packed(OFFLOAD_FUNCTION, [*call.values("x", "replay", "cached"), call.literal("layer")])


@converts(fastcar.offloaded_linear.default)
def _offloaded_linear(call: Call) -> Value:
    return call.packed(OFFLOAD_LINEAR_FUNCTION, [*call.values("x"), call.literal("name")])


@converts(fastcar.offloaded_gate.default)
def _offloaded_gate(call: Call) -> Value:
    tensors: list[relax.Expr] = call.values("query", "key_cache", "chain", "position", "step")
    return call.packed(GATE_FUNCTION, [*tensors, IntImm("int64", call.integer("stride")), call.literal("layer")])
