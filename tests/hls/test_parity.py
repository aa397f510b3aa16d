"""Three levels, equal bit for bit in sums and outputs: PyTorch operators, TVM kernels and HLS C simulation."""

from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
import tvm
from torch import Tensor
from tvm.tirx import PrimFunc

import fastcar_compile.ir.ops  # noqa: F401  (registers the operators)
from fastcar_compile.codegen.hls.design.spec import MlpSpec
from fastcar_compile.codegen.hls.packing import LinearWeights, pack_mlp
from fastcar_compile.codegen.tvm.kernels.linear.activations import activation_factor, quantize_rows
from fastcar_compile.codegen.tvm.kernels.linear.w4a8 import linear_w4a8
from fastcar_compile.codegen.tvm.kernels.linear.w8a8 import linear_w8a8
from fastcar_compile.codegen.tvm.target import host_target
from fastcar_compile.ir.ops import linear as quant
from fastcar_compile.ir.ops.linear import factor_table
from hls.library import DESIGNS, assert_same_bits, random_layer
from hls.simulation import Simulation

EXACT_IN_FLOAT32 = 1 << 24
fastcar = torch.ops.fastcar


class Level(NamedTuple):
    """What one level computes for rows of x: exact sums of each linear (of all its groups), and the MLP's outputs."""

    sums: list[Tensor]
    y: Tensor


def tensors(linear: LinearWeights) -> tuple[Tensor, Tensor, Tensor | None]:
    """Weights as the operators take them, scales and bias."""
    values, scales = torch.from_numpy(linear.values), torch.from_numpy(linear.scales)
    bias = None if linear.bias is None else torch.from_numpy(linear.bias)
    return (quant.pack_int4(values) if scales.dtype == torch.float16 else values), scales, bias


def eager_linear(x: Tensor, linear: LinearWeights) -> tuple[Tensor, Tensor]:
    """The operators of fastcar_compile.ir.ops.linear."""
    weight, scale, bias = tensors(linear)
    q = quant.quantize_rows(x)[0]
    if weight.dtype == torch.int8:
        return quant.accumulate(q, weight), fastcar.linear_w8a8(x, weight, scale, bias)
    return quant.accumulate_groups(q, weight).sum(0, dtype=torch.int32), fastcar.linear_w4a8(x, weight, scale, bias)


@cache
def built(kernel: PrimFunc) -> Callable[..., None]:
    """One TVM kernel as a function. Two calls give the same kernel for the same sizes."""
    module = tvm.IRModule({"main": kernel.with_attr("global_symbol", "main")})
    return tvm.compile(module, target=host_target())["main"]


def call(kernel: PrimFunc, *arguments: Tensor) -> list[Tensor]:
    """Calls one TVM kernel; every argument as it is afterwards."""
    arrays = [tvm.runtime.tensor(a.numpy()) for a in arguments]
    built(kernel)(*arrays)
    return [torch.from_numpy(np.array(a.numpy())) for a in arrays]


def tvm_linear(x: Tensor, linear: LinearWeights) -> tuple[Tensor, Tensor]:
    """The TVM kernels. With scales of one the output is the sum, if float32 holds it exactly."""
    weight, scale, bias = tensors(linear)
    (m, k), n = x.shape, len(weight)
    assert 127 * 127 * k < EXACT_IN_FLOAT32
    _, q, row_scale = call(quantize_rows(m, k), x, torch.zeros(m, k, dtype=torch.int8), torch.zeros(m))
    kernel = (linear_w8a8 if weight.dtype == torch.int8 else linear_w4a8)(m, n, k)
    sums = call(kernel, q, torch.ones(m), weight, torch.ones_like(scale), torch.zeros(m, n))[-1]
    y = call(kernel, q, row_scale, weight, scale, torch.zeros(m, n))[-1]
    return sums.to(torch.int32), y if bias is None else y + bias


def tvm_factor(x: Tensor, activation: str) -> Tensor:
    """The TVM kernel of the table."""
    kernel = activation_factor(x.numel(), activation)
    return call(kernel, x.reshape(-1), factor_table(activation), torch.zeros(x.numel()))[-1].reshape(x.shape)


def level(x: Tensor, layer: Sequence[LinearWeights], spec: MlpSpec, compiled: bool) -> Level:
    """The MLP from single linears and factors; the products between them are single float32 roundings."""
    linear = tvm_linear if compiled else eager_linear
    factor = tvm_factor if compiled else fastcar.activation_factor
    *first, down = layer
    results = [linear(x, weights) for weights in first]
    a = results[0][1] * factor(results[0][1], spec.activation)
    results.append(linear(a * results[1][1] if spec.gated else a, down))
    return Level([sums for sums, _ in results], results[-1][1])


def simulated(x: Tensor, layer: Sequence[LinearWeights], library: Simulation, design_name: str) -> Level:
    """The HLS kernel in C simulation, every row computing."""
    stream, rows = pack_mlp(layer, DESIGNS[design_name]), x.numpy()
    sums = [torch.from_numpy(a) for a in library.mlp_sums(rows, stream)]
    sums = [s if s.dim() == 2 else s.sum(2, dtype=torch.int32) for s in sums]
    return Level(sums, torch.from_numpy(library.mlp(rows, 0xFFFFFFFF, np.zeros_like(rows), stream)))


def test_three_levels_are_equal(library: Simulation, design_name: str) -> None:
    rng, spec = np.random.default_rng(11), DESIGNS[design_name].mlp
    layer = random_layer(spec, rng)
    x = torch.from_numpy(rng.normal(size=(library.batch, library.hidden)).astype(np.float32))
    want = level(x, layer, spec, compiled=False)
    for got in (level(x, layer, spec, compiled=True), simulated(x, layer, library, design_name)):
        for sums, expected in zip(got.sums, want.sums, strict=True):
            assert sums.dtype == torch.int32
            assert torch.equal(sums, expected)
        assert_same_bits(got.y.numpy(), want.y.numpy())
    assert all(bool((sums != 0).any()) for sums in want.sums)
