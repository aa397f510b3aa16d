"""Attention and MLP of every layer, as models write them: find-sites, parallel-blocks, activations and linears."""

import dataclasses
import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from conftest import first_often
from torch import Tensor
from torch.nn import functional as F

from fastcar_compile.errors import CompileError
from fastcar_compile.ir.layers import Role, role_nodes
from fastcar_compile.ir.query import branches_of, is_op, node_arg
from fastcar_compile.passes.canonicalize import Canonicalize
from fastcar_compile.passes.find_sites import FindSites
from fastcar_compile.passes.fuse_activations import FuseActivations
from fastcar_compile.passes.insert_replay import InsertReplay
from fastcar_compile.passes.normalize_state import NormalizeState
from fastcar_compile.passes.parallel_blocks import ParallelBlocks
from fastcar_compile.passes.pipeline import analysis_pipeline

from .laws import check_left_alone, nodes_of, program_text
from .tiny import WIDTH, Fused, Products, TinyBlock, after, logits, prefill_logits

# find-sites: attention and MLP of every layer, from the structure of the graph alone.


BEFORE = (NormalizeState(), Canonicalize())


def test_sites_do_not_depend_on_metadata_or_names() -> None:
    expected = after(*BEFORE, FindSites()).sites[0]
    program = after(*BEFORE)
    for node in program.graph_module.graph.nodes:
        node.meta = {"val": node.meta["val"]} if "val" in node.meta else {}
    FindSites().apply(program)
    assert program.sites == [dataclasses.replace(expected, module_path="", source="")]


class Residuals(TinyBlock):
    """The closing add has the MLP on its left."""

    def forward(self, h: Tensor, position: Tensor) -> Tensor:
        h = self.out(self.attend(self.norm_1(h), position)) + h
        return self.mlp(self.norm_2(h)) + h


class Plain(TinyBlock):
    """linear -> ReLU -> linear."""

    def feed(self, x: Tensor) -> Tensor:
        return self.mlp.down(torch.relu(self.mlp.up(x)))


@pytest.mark.parametrize(
    ("block", "activation", "gated", "count"), [(Residuals, "silu", True, 3), (Plain, "relu", False, 2)]
)
def test_other_shapes_that_match(block: type[TinyBlock], activation: str, gated: bool, count: int) -> None:
    (site,) = after(*BEFORE, FindSites(), blocks=(block,)).sites
    assert (site.mlp.activation, site.mlp.gated, len(site.mlp.linears)) == (activation, gated, count)
    assert (site.mlp.hidden, site.mlp.intermediate) == (WIDTH, 12)
    assert (site.attention.num_heads, site.attention.num_kv_heads) == (2, 1)


class TwoActivations(TinyBlock):
    def forward(self, h: Tensor, position: Tensor) -> Tensor:
        h = h + self.out(self.attend(self.norm_1(h), position))
        return h + self.mlp.down(torch.relu(F.gelu(self.mlp.up(self.norm_2(h)))))


class NoResidual(TinyBlock):
    def forward(self, h: Tensor, position: Tensor) -> Tensor:
        return self.out(self.attend(self.norm_1(h), position))


class NotClosed(TinyBlock):
    def forward(self, h: Tensor, position: Tensor) -> Tensor:
        h = h + self.out(self.attend(self.norm_1(h), position))
        return self.mlp(self.norm_2(h))


class TwoExits(TinyBlock):
    def forward(self, h: Tensor, position: Tensor) -> Tensor:
        h = h + self.out(self.attend(self.norm_1(h), position))
        inner = self.norm_2(h)
        return (h + self.mlp(inner)) * inner


class TwoEntries(TinyBlock):
    def forward(self, h: Tensor, position: Tensor) -> Tensor:
        before = h
        h = h + self.out(self.attend(self.norm_1(h), position))
        return h + self.mlp(self.norm_2(h) + before)


@pytest.mark.parametrize(
    ("block", "found", "expected"),
    [
        (TwoActivations, "layer_norm -> linear -> gelu -> relu -> linear", "expected linear -> nonlinearity"),
        (NoResidual, "its output joins no residual add", "expected a residual add after attention"),
        (NotClosed, "the residual stream is used by [aten.layer_norm.default]", "none of which closes an MLP"),
        (TwoExits, "layer_norm_1 inside the MLP is also used by mul_1", "expected one exit"),
        (TwoEntries, "add_1 inside the MLP also reads embedding", "expected one entry"),
    ],
)
def test_what_cannot_be_matched(block: type[TinyBlock], found: str, expected: str) -> None:
    program = after(*BEFORE, blocks=(block,))
    before = program_text(program)
    with pytest.raises(CompileError) as error:
        FindSites().apply(program)
    text = str(error.value)
    assert text.startswith("layer 0: the MLP cannot be matched: ")
    assert found in text
    assert expected in text
    assert "where: blocks.0" in text
    assert "passes/t" in text
    assert program_text(program) == before
    assert program.sites == []


def test_every_layer_is_reported_at_once() -> None:
    program = after(*BEFORE, blocks=(TwoActivations, TinyBlock, TwoEntries))
    with pytest.raises(CompileError) as error:
        FindSites().apply(program)
    text = str(error.value)
    assert text.startswith("2 problems were found:\n[1] layer 0: the MLP")
    assert "[2] layer 2: the MLP" in text
    assert "where: blocks.0.mlp.down, " in text
    assert "where: blocks.2, " in text
    assert text.count("test_sites.py:") == 2
    assert program.sites == []


def test_no_attention_at_all() -> None:
    program = after(*BEFORE)
    for node in list(program.graph_module.graph.nodes):
        if node.name == "attention_default":
            node.replace_all_uses_with(node.args[0])
            program.graph_module.graph.erase_node(node)
    with pytest.raises(CompileError, match="no attention over a written cache was found"):
        FindSites().apply(program)


# Attention and MLP in parallel: every order and association of the sum, one norm or two, the MLP first or last.


Sum = Callable[[Tensor, Tensor, Tensor], Tensor]
SUMS: dict[str, Sum] = {
    "phi": lambda h, a, m: a + m + h,
    "gpt-neox": lambda h, a, m: m + a + h,
    "cohere": lambda h, a, m: h + a + m,
    "falcon": lambda h, a, m: h + (m + a),
    "mlp-first": lambda h, a, m: a + (h + m),
}


def parallel(total: Sum, norms: int) -> type[TinyBlock]:
    """A parallel block. With one norm, the MLP is computed in front of the attention."""

    class SharedNorm(TinyBlock):
        def forward(self, h: Tensor, position: Tensor) -> Tensor:
            x = self.norm_1(h)
            m = self.mlp(x)
            return total(h, self.out(self.attend(x, position)), m)

    class OwnNorm(TinyBlock):
        def forward(self, h: Tensor, position: Tensor) -> Tensor:
            a = self.out(self.attend(self.norm_1(h), position))
            return total(h, a, self.mlp(self.norm_2(h)))

    return SharedNorm if norms == 1 else OwnNorm


@pytest.mark.parametrize(("name", "norms"), first_often(zip(SUMS, (1, 2, 1, 2, 1), strict=True), 3))
def test_every_sum_becomes_one_form(name: str, norms: int) -> None:
    block = parallel(SUMS[name], norms)
    before, program = after(*BEFORE, blocks=(block, block)), after(*analysis_pipeline(), blocks=(block, block))
    assert [site.parallel for site in program.sites] == [True, True]
    for module in program.graphs():
        entry = next(n for n in module.graph.nodes if is_op(n, torch.ops.aten.embedding))
        for nodes in role_nodes(module).values():
            residual, leave = nodes[Role.RESIDUAL], nodes[Role.EXIT]
            assert node_arg(residual, 0) is entry
            assert leave.args == (residual, nodes[Role.DOWN_PROJ])
            assert nodes[Role.ATTENTION] < nodes[Role.UP_PROJ]
            entry = leave
    np.testing.assert_allclose(logits(program), logits(before), atol=2e-6)
    np.testing.assert_allclose(prefill_logits(program), prefill_logits(before), atol=2e-6)


def test_it_says_whether_it_changed_something() -> None:
    """Not where the sum has the one form and the MLP stands behind attention, nor in a sequential block."""
    for block in (parallel(SUMS["cohere"], 2), TinyBlock):
        program = after(*BEFORE, blocks=(block,))
        check_left_alone(program, ParallelBlocks())
    assert [site.parallel for site in after(*BEFORE, FindSites()).sites] == [False]


@pytest.mark.parametrize(("norms", "gate"), [(1, "tas"), (2, "tas"), (2, "input_delta")])
def test_replay_holds_the_mlp_and_what_it_alone_reads(norms: int, gate: str) -> None:
    """A norm that attention reads too stays outside of the compute branch, and so does one that the gate reads."""
    block = parallel(SUMS["phi"], norms)
    replay = InsertReplay((0.0, 0.0), gate=gate)
    program = after(*analysis_pipeline(), replay, blocks=(block, block))
    norm = [
        is_op(n, torch.ops.aten.layer_norm) for n in branches_of(program.graph_module)["compute_branch_0"].graph.nodes
    ]
    assert sum(norm) == (1 if norms == 2 and gate == "tas" else 0)
    assert [site.parallel for site in program.sites] == [True, True]
    dense = after(*analysis_pipeline(), blocks=(block, block))
    never = -np.inf if gate == "input_delta" else np.inf
    np.testing.assert_allclose(logits(program, never), logits(dense), atol=1e-6)


# MLPs as models write them: transformers' GPT-2, Gemma and Phi-3, activations written out, up before gate.


aten = torch.ops.aten


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
