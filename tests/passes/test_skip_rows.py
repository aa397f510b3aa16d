"""skip-rows: rows that replay are zero in the compute branch."""

import numpy as np
import pytest
import torch
from torch import fx, nn

from fastcar_compile.ir.pass_manager import run_pipeline
from fastcar_compile.ir.program import DecoderProgram
from fastcar_compile.passes.insert_replay import InsertReplay
from fastcar_compile.passes.pipeline import analysis_pipeline
from fastcar_compile.passes.quantize import QuantizeW8A8
from fastcar_compile.passes.skip_rows import SkipRows

from .laws import check_left_alone
from .tiny import BATCH, WIDTH, TinyBlock, after, captured, decode

WHERE = torch.ops.aten.where.self


def replaying(couple_cfg: bool = False) -> DecoderProgram:
    return after(*analysis_pipeline(), InsertReplay((0.0,), couple_cfg=couple_cfg))


def branch_of(program: DecoderProgram) -> fx.GraphModule:
    branch = program.graph_module.compute_branch_0
    assert isinstance(branch, fx.GraphModule)
    return branch


class BiasedBlock(TinyBlock):
    """Every norm and linear has a bias."""

    def __init__(self, batch: int = BATCH) -> None:
        super().__init__(batch)
        self.norm_2 = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 12), nn.GELU(), nn.Linear(12, WIDTH))
        nn.init.normal_(self.norm_2.bias)


@pytest.mark.parametrize("block", [TinyBlock, BiasedBlock])
def test_results_stay_as_they_are(block: type[TinyBlock]) -> None:
    """Every output of every forward, where some rows of a forward replay and others do not."""
    blocks = [block]
    plain = after(*analysis_pipeline(), InsertReplay((0.0,)), blocks=blocks)
    zeroed = after(*analysis_pipeline(), InsertReplay((0.0,)), SkipRows(), blocks=blocks)
    scores = np.concatenate([r.scores.ravel() for r in decode(plain)])
    threshold = float(np.median(scores))
    expected, found = decode(plain, threshold), decode(zeroed, threshold)
    assert any(r.decisions[0].any() and not r.decisions[0].all() for r in expected)
    for left, right in zip(expected, found, strict=True):
        np.testing.assert_array_equal(left.logits, right.logits)
        np.testing.assert_array_equal(left.decisions, right.decisions)


@pytest.mark.parametrize(("block", "linears"), [(TinyBlock, 3), (BiasedBlock, 2)])
@pytest.mark.parametrize("quant", ["none", "w8a8"])
def test_every_linear_sees_zeros_in_rows_that_replay(block: type[TinyBlock], linears: int, quant: str) -> None:
    quantize = [QuantizeW8A8()] if quant == "w8a8" else []
    program = after(*analysis_pipeline(), *quantize, InsertReplay((0.0,)), SkipRows(), blocks=[block])
    branch, seen = branch_of(program), []

    class Watch(fx.Interpreter):
        def call_function(self, target: object, args: tuple, kwargs: dict) -> object:
            if target in (torch.ops.aten.linear.default, torch.ops.fastcar.linear_w8a8.default):
                seen.append(args[0].reshape(BATCH, -1))
            return super().call_function(target, args, kwargs)  # pyright: ignore[reportArgumentType]

    values = [n.meta["val"] for n in branch.graph.nodes if n.op == "placeholder"]
    torch.manual_seed(0)
    inputs = [torch.randn(v.shape).to(v.dtype) for v in values]
    inputs[1] = torch.tensor([True, False])
    Watch(branch).run(*inputs)
    assert len(seen) == linears
    assert all(not rows[0].any() and rows[1].any() for rows in seen)
    kept = [n for n in branch.graph.nodes if n.meta.get("made_by") == "skip-rows" and n.target is WHERE]
    assert len(kept) == (1 if block is TinyBlock else 3)


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
        check_left_alone(program, item)
