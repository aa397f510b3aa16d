"""Activations as plain arithmetic: near float64's, and without a call of libm."""

import re
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pytest
import torch
import tvm
from torch import Tensor, fx, nn
from torch.nn import functional as F
from tvm import relax, te

from fastcar_compile.codegen.tvm.importer import SegmentImporter
from fastcar_compile.codegen.tvm.isa import host_instruction_set
from fastcar_compile.codegen.tvm.kernels import vectors as functions
from fastcar_compile.codegen.tvm.pipeline import tvm_passes
from fastcar_compile.codegen.tvm.target import host_target

from .kernel_runs import run

Function = Callable[[Tensor], Tensor]


def _computed(function: Callable[[Any], Any], x: Tensor) -> Tensor:
    shape = tuple(x.shape)
    given: Any = te.placeholder(shape, name="x")
    result: Any = te.compute(shape, lambda *at: function(given(*at)))
    kernel: Any = te.create_prim_func([given, result])
    return run(kernel, x, torch.zeros_like(x))[-1]


def _arguments() -> Tensor:
    sizes = torch.logspace(-30, 2, 20_001)
    return torch.cat([torch.linspace(-100, 100, 100_001), sizes, -sizes])


@pytest.mark.parametrize(
    ("name", "reference", "bound"),
    [
        ("exp_not_positive", torch.exp, 2.0),
        ("sigmoid", torch.sigmoid, 4.0),
        ("tanh", torch.tanh, 2.0),
        ("erf", torch.erf, 6.0),
    ],
)
def test_functions_are_near_float64(name: str, reference: Function, bound: float) -> None:
    """In units in the last place, of results from 2e-38 on: smaller ones stay at exp(-87)."""
    x = _arguments()
    x = x[x <= 0] if name == "exp_not_positive" else x
    expected = reference(x.double()).numpy()
    unit = np.spacing(np.maximum(np.abs(expected), 2e-38).astype(np.float32))
    difference = np.abs(_computed(getattr(functions, name), x).numpy() - expected)
    assert (np.maximum(difference - 2e-38, 0) / unit).max() < bound


@pytest.mark.parametrize("name", ["exp_not_positive", "sigmoid", "tanh", "erf"])
def test_nan_stays_and_infinity_is_a_limit(name: str) -> None:
    limits = {"exp_not_positive": [0.0], "sigmoid": [0.0, 1.0], "tanh": [-1.0, 1.0], "erf": [-1.0, 1.0]}[name]
    x = torch.tensor([float("nan"), float("-inf"), float("inf")])[: 1 + len(limits)]
    y = _computed(getattr(functions, name), x)
    assert torch.isnan(y[0])
    torch.testing.assert_close(y[1:], torch.tensor(limits), atol=2e-38, rtol=0)


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


@pytest.mark.parametrize(
    ("function", "rows"), [(F.silu, 512), (F.gelu, 512), (_gelu_tanh, 1), (torch.sigmoid, 512), (torch.tanh, 1)]
)
def test_activations_of_a_graph_call_no_libm(function: Function, rows: int) -> None:
    """Small, and large enough for several threads; fused with the operators around them."""

    class Gated(nn.Module):
        def forward(self, x: Tensor, up: Tensor) -> Tensor:
            return function(x) * up

    torch.manual_seed(0)
    x, up = 4 * torch.randn(rows, 352), torch.randn(rows, 352)
    exported = torch.export.export(Gated(), (x, up))
    builder = relax.BlockBuilder()
    SegmentImporter(builder, host_instruction_set()).add_function(cast("fx.GraphModule", exported.module()), "main", 0)
    target = host_target(host_instruction_set())
    module = tvm.transform.Sequential(tvm_passes(target)[:-1])(builder.finalize())
    assert not re.search(r"T\.(exp|sigmoid|tanh|erf)\(", module.script())
    built = tvm.compile(builder.finalize(), target=target, relax_pipeline=tvm.transform.Sequential(tvm_passes(target)))
    machine: Any = relax.VirtualMachine(built, cast("Any", tvm.cpu()))
    y = torch.from_dlpack(machine["main"](*(tvm.runtime.tensor(v.numpy()) for v in (x, up))))
    # x / 2 times the error of erf, at most 4e-7, times up.
    torch.testing.assert_close(y, function(x) * up, atol=1e-5 if function is F.gelu else 1e-6, rtol=2e-6)
