"""skip-rows: rows that replay are zero in the compute branch."""

from __future__ import annotations

import numpy as np
import torch
from torch import fx

from fastcar_compile.ir import DecoderProgram
from fastcar_compile.passes.base import run_pipeline
from fastcar_compile.passes.insert_replay import InsertReplay
from fastcar_compile.passes.pipeline import analysis_pipeline
from fastcar_compile.passes.skip_rows import SkipRows

from .golden import check_golden, check_origins, everything, module_text
from .tiny import BATCH, WIDTH, after, captured, decode


def replaying(couple_cfg: bool = False) -> DecoderProgram:
    return after(*analysis_pipeline(), InsertReplay((0.0,), couple_cfg=couple_cfg))


def branch_of(program: DecoderProgram) -> fx.GraphModule:
    branch = program.graph_module.compute_branch_0
    assert isinstance(branch, fx.GraphModule)
    return branch


def test_golden() -> None:
    program = replaying()
    before = module_text(branch_of(program))
    assert SkipRows().apply(program) is True
    check_golden("skip-rows", before, module_text(branch_of(program)))
    assert check_origins(program, "skip-rows") == 3


def test_results_stay_as_they_are() -> None:
    """Every output of every forward, where some rows of a forward replay and others do not."""
    plain, zeroed = replaying(), after(*analysis_pipeline(), InsertReplay((0.0,)), SkipRows())
    scores = np.concatenate([r.scores.ravel() for r in decode(plain)])
    threshold = float(np.median(scores))
    expected, found = decode(plain, threshold), decode(zeroed, threshold)
    assert any(r.decisions[0].any() and not r.decisions[0].all() for r in expected)
    for left, right in zip(expected, found, strict=True):
        np.testing.assert_array_equal(left.logits, right.logits)
        np.testing.assert_array_equal(left.decisions, right.decisions)


def test_the_last_linear_sees_zeros_in_rows_that_replay() -> None:
    program = after(*analysis_pipeline(), InsertReplay((0.0,)), SkipRows())
    branch, seen = branch_of(program), {}

    class Watch(fx.Interpreter):
        def call_function(self, target: object, args: tuple, kwargs: dict) -> object:  # type: ignore[override,type-arg]
            if target is torch.ops.aten.linear.default:
                seen["x"] = args[0]
            return super().call_function(target, args, kwargs)  # type: ignore[arg-type]

    values = [n.meta["val"] for n in branch.graph.nodes if n.op == "placeholder"]
    torch.manual_seed(0)
    inputs = [torch.randn(v.shape) for v in values]
    inputs[1] = torch.tensor([True, False])
    Watch(branch).run(*inputs)
    rows = seen["x"].reshape(BATCH, -1)
    assert rows.shape[1] > WIDTH
    assert not rows[0].any()
    assert rows[1].any()


def test_nothing_to_do() -> None:
    """One row, one coupled pair, no replay, and a second application."""
    single = run_pipeline(captured(batch=1), [*analysis_pipeline(), InsertReplay((0.0,))])
    never = after(*analysis_pipeline(), InsertReplay((None,)))
    done = after(*analysis_pipeline(), InsertReplay((0.0,)), SkipRows())
    for program, item in (
        (single, SkipRows()),
        (replaying(couple_cfg=True), SkipRows(couple_cfg=True)),
        (never, SkipRows()),
        (done, SkipRows()),
    ):
        before = everything(program)
        assert item.apply(program) is False
        assert everything(program) == before
