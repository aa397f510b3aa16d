"""find-sites: attention and MLP of every layer, from the structure of the graph alone."""

import dataclasses

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fastcar_compile.errors import CompileError
from fastcar_compile.passes.canonicalize import Canonicalize
from fastcar_compile.passes.find_sites import FindSites
from fastcar_compile.passes.normalize_state import NormalizeState

from .laws import program_text
from .tiny import WIDTH, TinyBlock, after

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
    assert text.count("test_find_sites.py:") == 2
    assert program.sites == []


def test_no_attention_at_all() -> None:
    program = after(*BEFORE)
    for node in list(program.graph_module.graph.nodes):
        if node.name == "attention_default":
            node.replace_all_uses_with(node.args[0])
            program.graph_module.graph.erase_node(node)
    with pytest.raises(CompileError, match="no attention over a written cache was found"):
        FindSites().apply(program)
