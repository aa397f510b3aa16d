"""canonicalize: asserts, no-op casts and inactive dropout go; everything else stays."""

import numpy as np
import pytest
import torch
from torch import Tensor, fx
from torch._subclasses import FakeTensorMode
from torch.fx.node import Argument

from fastcar_compile.ir.program import DecoderProgram
from fastcar_compile.ir.query import is_op, node_arg
from fastcar_compile.ir.types import DecoderConfig
from fastcar_compile.passes.canonicalize import Canonicalize
from fastcar_compile.passes.normalize_state import NormalizeState

from .laws import check_truthful
from .tiny import TinyBlock, after, logits

aten = torch.ops.aten


KEPT, DROPPED = True, False


@pytest.mark.parametrize(
    ("target", "arguments", "kept"),
    [
        (aten.to.dtype, (torch.float32,), DROPPED),
        (aten.to.dtype, (torch.float64,), KEPT),
        (aten._to_copy.default, (), DROPPED),
        (aten.contiguous.default, (), DROPPED),
        (aten.alias.default, (), DROPPED),
        (aten.detach.default, (), DROPPED),
        (aten.dropout.default, (0.5, False), DROPPED),
        (aten.dropout.default, (0.5, True), KEPT),
        (aten.relu.default, (), KEPT),
    ],
)
def test_one_node(target: torch._ops.OpOverload, arguments: tuple[Argument, ...], kept: bool) -> None:
    program = program_of(target, arguments)
    assert Canonicalize().apply(program) is not kept
    left = [n.target for n in program.graph_module.graph.nodes if n.op == "call_function"]
    assert left == ([target] if kept else []) + [aten.neg.default]


def program_of(target: torch._ops.OpOverload, arguments: tuple[Argument, ...]) -> DecoderProgram:
    """return -target(x, *arguments)"""
    graph = fx.Graph()
    x = graph.placeholder("tokens")
    node = graph.call_function(target, (x, *arguments))
    last = graph.call_function(aten.neg.default, (node,))
    with FakeTensorMode():
        x.meta["val"] = torch.empty(2, 3)
        node.meta["val"] = target(x.meta["val"], *arguments)
        last.meta["val"] = aten.neg.default(node.meta["val"])
    graph.output((last,))
    config = DecoderConfig(2, 9, 3, 0, 3, None, True, 0)
    return DecoderProgram(fx.GraphModule(torch.nn.Module(), graph), None, config, outputs=["logits"])


class Picked(TinyBlock):
    """Columns by numbers: neighbours from the end, as transformers' Falcon takes keys and values, and others."""

    def forward(self, h: Tensor, position: Tensor) -> Tensor:
        a = self.out(self.attend(self.norm_1(h), position))
        a = a.repeat_interleave(2, -1)[..., :8]
        a = torch.cat([a[:, :, [-2, -1]], a[..., [5, -8]], a[..., [-1, 2, 3, 1]]], -1)
        h = h + a
        return h + self.mlp(self.norm_2(h))


def test_rows_by_known_numbers_are_counted_from_the_front() -> None:
    before, program = after(NormalizeState(), blocks=(Picked,)), after(NormalizeState(), blocks=(Picked,))
    check_truthful(program, Canonicalize())
    np.testing.assert_array_equal(logits(program), logits(before))
    nodes = list(program.graph_module.graph.nodes)
    assert not [n for n in nodes if is_op(n, aten.index, aten.repeat_interleave)]
    picked = [program.params[str(node_arg(n, 2).target)].tolist() for n in nodes if is_op(n, aten.index_select)]
    assert picked == [[5, 0], [7, 2, 3, 1]]
    assert (2, 6, 8) in [n.args[1:] for n in nodes if is_op(n, aten.slice)]
