"""MLPs as models write them: transformers' GPT-2, Gemma and Phi-3, activations written out, up before gate."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fastcar_compile.ir.query import is_op, node_arg
from fastcar_compile.passes.canonicalize import Canonicalize
from fastcar_compile.passes.fuse_activations import FuseActivations
from fastcar_compile.passes.normalize_state import NormalizeState
from fastcar_compile.passes.pipeline import analysis_pipeline

from .laws import nodes_of
from .tiny import Fused, Products, TinyBlock, after, logits, prefill_logits

aten = torch.ops.aten
BEFORE = (NormalizeState(), Canonicalize())


def gelu_new(x: Tensor) -> Tensor:
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


def gelu_fast(x: Tensor) -> Tensor:
    return 0.5 * x * (1.0 + torch.tanh(x * 0.7978845608 * (1.0 + 0.044715 * x * x)))


def gelu_erf(x: Tensor) -> Tensor:
    return x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0)))


def silu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(x)


def gelu_wrong(x: Tensor) -> Tensor:
    return 0.5 * x * (1.0 + torch.tanh(0.8 * (x + 0.044715 * torch.pow(x, 3.0))))


def block_with(activation: Callable[[Tensor], Tensor]) -> type[TinyBlock]:
    """linear -> activation -> linear."""

    class Block(TinyBlock):
        def feed(self, x: Tensor) -> Tensor:
            return self.mlp.down(activation(self.mlp.up(x)))

    return Block


@pytest.mark.parametrize(
    ("activation", "name"), [(gelu_new, "gelu_tanh"), (gelu_fast, "gelu_tanh"), (gelu_erf, "gelu"), (silu, "silu")]
)
def test_written_out_activations_are_fused(activation: Callable[[Tensor], Tensor], name: str) -> None:
    block = block_with(activation)
    before = after(*BEFORE, blocks=(block,))
    program = after(*analysis_pipeline(), blocks=(block,))
    assert (program.sites[0].mlp.activation, program.sites[0].mlp.gated) == (name, False)
    assert not [n for n in nodes_of(program) if is_op(n, aten.tanh, aten.erf, aten.sigmoid, aten.pow)]
    np.testing.assert_allclose(logits(program), logits(before), atol=1e-5)
    np.testing.assert_allclose(prefill_logits(program), prefill_logits(before), atol=1e-5)


def test_another_function_is_left_alone() -> None:
    program = after(*BEFORE, blocks=(block_with(gelu_wrong),))
    assert FuseActivations().apply(program) is False
    (site,) = after(*analysis_pipeline(), blocks=(block_with(gelu_wrong),)).sites
    assert site.mlp.activation == "tanh, not directly between two linears"


class UpFirst(TinyBlock):
    """up(x) * act(gate(x)): the graph has up before gate."""

    def feed(self, x: Tensor) -> Tensor:
        up = self.mlp.up(x)
        return self.mlp.down(up * F.gelu(self.mlp.gate(x)))


def test_gate_and_up_are_told_apart_by_what_is_activated() -> None:
    (site,) = after(*analysis_pipeline(), blocks=(UpFirst,)).sites
    assert (site.mlp.activation, site.mlp.gated) == ("gelu", True)
    assert [w.removeprefix("blocks.0.mlp.") for w in site.mlp.weights] == ["gate.weight", "up.weight", "down.weight"]
    assert site.mlp.biases == (None, None, "blocks.0.mlp.down.bias")


class Squared(TinyBlock):
    """The square of a ReLU in a plain MLP."""

    def feed(self, x: Tensor) -> Tensor:
        return self.mlp.down(torch.relu(self.mlp.up(x)).square())


class SquaredGate(TinyBlock):
    """A gated MLP whose gate is squared."""

    def feed(self, x: Tensor) -> Tensor:
        return self.mlp.down(self.mlp.up(x) * torch.relu(self.mlp.gate(x)) ** 2)


@pytest.mark.parametrize(("block", "gated"), [(Squared, False), (SquaredGate, True)])
def test_a_squared_relu_is_a_product_and_one_activation(block: type[TinyBlock], gated: bool) -> None:
    program = after(*analysis_pipeline(), blocks=(block,))
    assert not [n for n in nodes_of(program) if is_op(n, aten.square, aten.pow) and is_op(node_arg(n, 0), aten.relu)]
    (site,) = program.sites
    assert (site.mlp.activation, site.mlp.gated) == ("relu2", gated)
    np.testing.assert_array_equal(logits(program), logits(after(*BEFORE, blocks=(block,))))


class Transposed(TinyBlock):
    """`x @ w.T + b` of a parameter [outputs, inputs], as transformers' Falcon writes its linears."""

    def feed(self, x: Tensor) -> Tensor:
        up = x @ self.mlp.up.weight.T
        return F.linear(torch.relu(up), self.mlp.down.weight) + self.mlp.down.bias


class FusedWithBiases(Fused):
    biased = True


@pytest.mark.parametrize(
    ("block", "weights", "biases"),
    [
        (Products, ["w_up_transposed", "w_down_transposed"], ["b_up", None]),
        (Transposed, ["mlp.up.weight", "mlp.down.weight"], [None, "mlp.down.bias"]),
        (
            FusedWithBiases,
            ["gate_up.weight_second", "gate_up.weight_first", "mlp.down.weight"],
            ["gate_up.bias_second", "gate_up.bias_first", "mlp.down.bias"],
        ),
    ],
)
def test_products_and_fused_linears_become_linears(
    block: type[TinyBlock], weights: list[str], biases: list[str | None]
) -> None:
    before, program = after(*BEFORE, blocks=(block,)), after(*analysis_pipeline(), blocks=(block,))
    assert not [n for n in nodes_of(program) if is_op(n, aten.addmm, aten.matmul, aten.mm)]
    np.testing.assert_allclose(logits(program), logits(before), atol=1e-5)
    np.testing.assert_allclose(prefill_logits(program), prefill_logits(before), atol=1e-5)
    (site,) = program.sites
    assert site.mlp.weights == tuple(f"blocks.0.{name}" for name in weights)
    assert site.mlp.biases == tuple(name and f"blocks.0.{name}" for name in biases)
    queries_keys_values = [n for n in nodes_of(program) if is_op(n, aten.split_with_sizes)]
    assert len(queries_keys_values) == 2
