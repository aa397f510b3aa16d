"""w8a8 on three levels: PyTorch operators, TVM kernels and HLS C simulation, sums and outputs equal bit for bit."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
import tvm
from torch import Tensor
from tvm.tirx import PrimFunc

import fastcar_compile.ops  # noqa: F401  (registers the operators)
from fastcar_compile.codegen.hls.csim import CsimLibrary
from fastcar_compile.codegen.hls.weights import pack_mlp
from fastcar_compile.lowering.kernels.activation_factor import activation_factor
from fastcar_compile.lowering.kernels.linear_w8a8 import linear_w8a8
from fastcar_compile.lowering.kernels.quantize_rows import quantize_rows
from fastcar_compile.lowering.target import host_target
from fastcar_compile.ops import quant
from fastcar_compile.ops.activations import factor_table
from hls.library import DESIGNS, Layer, assert_same_bits

EXACT_IN_FLOAT32 = 1 << 24


class Level(NamedTuple):
    """What one level computes for rows of x: exact sums, and the MLP's outputs."""

    gate: Tensor
    up: Tensor
    down: Tensor
    y: Tensor


def eager(x: Tensor, layer: Layer) -> Level:
    """The reference: the operators of fastcar_compile.ops.quant."""
    gate_q, gate_s, up_q, up_s, down_q, down_s = (torch.from_numpy(a) for a in layer.arguments)
    linear, sigmoid = torch.ops.fastcar.linear_w8a8, torch.ops.fastcar.activation_factor
    g, u = linear(x, gate_q, gate_s, None), linear(x, up_q, up_s, None)
    a = (g * sigmoid(g, "silu")) * u
    q, q_a = quant.quantize_rows(x)[0], quant.quantize_rows(a)[0]
    return Level(
        quant.accumulate(q, gate_q),
        quant.accumulate(q, up_q),
        quant.accumulate(q_a, down_q),
        linear(a, down_q, down_s, None),
    )


def call(kernel: PrimFunc, *arguments: Tensor) -> list[Tensor]:
    """Compiles one TVM kernel and calls it; every argument as it is afterwards."""
    module = tvm.IRModule({"main": kernel.with_attr("global_symbol", "main")})
    tensors = [tvm.runtime.tensor(a.numpy()) for a in arguments]
    tvm.compile(module, target=host_target())["main"](*tensors)
    return [torch.from_numpy(np.array(t.numpy())) for t in tensors]


def tvm_linear(q: Tensor, scale: Tensor, weight: Tensor, wscale: Tensor) -> tuple[Tensor, Tensor]:
    """The TVM kernel's (int32 sums, outputs). With scales of one its output is its sum, if float32 holds it exactly."""
    (m, k), n = q.shape, len(weight)
    assert 127 * 127 * k < EXACT_IN_FLOAT32
    kernel, out = linear_w8a8(m, n, k), torch.zeros(m, n)
    sums = call(kernel, q, torch.ones(m), weight, torch.ones(n), out)[-1]
    return sums.to(torch.int32), call(kernel, q, scale, weight, wscale, out)[-1]


def tvm_quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """The TVM kernel's int8 rows and their scales."""
    _, q, scale = call(quantize_rows(*x.shape), x, torch.zeros(x.shape, dtype=torch.int8), torch.zeros(len(x)))
    return q, scale


def compiled(x: Tensor, layer: Layer) -> Level:
    """The TVM kernels, each called by itself; the two products of SwiGLU are single float32 roundings."""
    gate_q, gate_s, up_q, up_s, down_q, down_s = (torch.from_numpy(a) for a in layer.arguments)
    q, scale = tvm_quantize(x)
    gate, g = tvm_linear(q, scale, gate_q, gate_s)
    up, u = tvm_linear(q, scale, up_q, up_s)
    table = factor_table("silu")
    sigmoid = call(activation_factor(g.numel(), "silu"), g.reshape(-1), table, torch.zeros(g.numel()))[-1]
    down, y = tvm_linear(*tvm_quantize((g * sigmoid.reshape(g.shape)) * u), down_q, down_s)
    return Level(gate, up, down, y)


def simulated(x: Tensor, layer: Layer, library: CsimLibrary, design_name: str) -> Level:
    """The HLS kernel in C simulation, every row computing."""
    stream = pack_mlp(*layer.arguments, DESIGNS[design_name])
    rows = x.numpy()
    sums = (torch.from_numpy(a) for a in library.mlp_accumulators(rows, stream))
    return Level(*sums, torch.from_numpy(library.mlp(rows, 0xFFFFFFFF, np.zeros_like(rows), stream)))


def test_three_levels_are_equal(library: CsimLibrary, design_name: str) -> None:
    rng = np.random.default_rng(11)
    layer = Layer.random(library.hidden, library.intermediate, rng)
    x = torch.from_numpy(rng.normal(size=(library.batch, library.hidden)).astype(np.float32))
    want = eager(x, layer)
    for level in (compiled(x, layer), simulated(x, layer, library, design_name)):
        for got, expected in zip(level[:3], want[:3], strict=True):
            assert got.dtype == torch.int32
            assert torch.equal(got, expected)
        assert_same_bits(level.y.numpy(), want.y.numpy())
    assert all(bool((sums != 0).any()) for sums in want[:3])
