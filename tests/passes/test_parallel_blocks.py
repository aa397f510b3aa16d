"""Attention and MLP in parallel: every order and association of the sum, one norm or two, the MLP first or last."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from conftest import first_often
from torch import Tensor

from fastcar_compile.ir.layers import Role, role_nodes
from fastcar_compile.ir.query import branches_of, is_op, node_arg
from fastcar_compile.passes.canonicalize import Canonicalize
from fastcar_compile.passes.find_sites import FindSites
from fastcar_compile.passes.insert_replay import InsertReplay
from fastcar_compile.passes.normalize_state import NormalizeState
from fastcar_compile.passes.parallel_blocks import ParallelBlocks
from fastcar_compile.passes.pipeline import analysis_pipeline

from .laws import check_left_alone
from .tiny import TinyBlock, after, logits, prefill_logits

BEFORE = (NormalizeState(), Canonicalize())
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
