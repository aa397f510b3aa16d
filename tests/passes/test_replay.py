"""insert-replay, insert-drafts and skip-rows: what they refuse, and what they leave alone."""

import numpy as np
import pytest
import torch
from gates.drafts import layer_of_draft, random_draft
from gates.networks import networks
from torch import fx, nn

from fastcar_compile.errors import CompileError
from fastcar_compile.gates.draft import Draft, DraftSize
from fastcar_compile.ir.pass_manager import run_pipeline
from fastcar_compile.ir.program import DecoderProgram
from fastcar_compile.passes.insert_drafts import InsertDrafts
from fastcar_compile.passes.insert_replay import InsertReplay
from fastcar_compile.passes.pipeline import analysis_pipeline
from fastcar_compile.passes.quantize import QuantizeW8A8
from fastcar_compile.passes.skip_rows import SkipRows

from .laws import check_left_alone, everything, module_text
from .tiny import BATCH, WIDTH, TinyBlock, after, captured, decode

# insert-replay: TAS, gate, cond and the MLP cache around every MLP that has a threshold.


def replaying(*thresholds: float | None, **options: object) -> DecoderProgram:
    """The tiny decoder with one layer per threshold."""
    item = InsertReplay(thresholds, **options)  # pyright: ignore[reportArgumentType]
    return after(*analysis_pipeline(), item, blocks=(TinyBlock,) * len(thresholds))


def test_a_gate_s_weights_become_parameters_of_layers_that_may_replay() -> None:
    weights = networks(WIDTH, 3, 2)
    program = replaying(None, 0.5, gate="learned", gate_weights=weights)
    params = {name: t for name, t in program.params.items() if name.startswith("gate_")}
    assert sorted(params) == ["gate_b1_1", "gate_b2_1", "gate_w1_1", "gate_w2_1"]
    assert all(torch.equal(params[f"gate_{name}_1"], t) for name, t in weights.layer(1).params().items())
    assert [s.replay and s.replay.gate_units for s in program.sites] == [None, 2]


def test_prefill_is_left_alone() -> None:
    before, program = after(*analysis_pipeline()), replaying(0.0)
    assert module_text(program.prefill) == module_text(before.prefill)  # pyright: ignore[reportArgumentType]


def test_second_application_is_refused_without_a_threshold_too() -> None:
    program = replaying(None)
    before = everything(program)
    with pytest.raises(CompileError, match="insert-replay ran already"):
        InsertReplay((None,)).apply(program)
    assert everything(program) == before


def test_coupling_wants_pairs() -> None:
    odd = run_pipeline(captured(batch=3), analysis_pipeline())
    before = everything(odd)
    with pytest.raises(CompileError, match="row b with row b \\+ B / 2, but batch_size is 3"):
        InsertReplay((1.0,), couple_cfg=True).apply(odd)
    assert everything(odd) == before
    assert InsertReplay((1.0,), couple_cfg=True).apply(after(*analysis_pipeline())) is True


# insert-drafts: what it refuses, and what it leaves alone.


@pytest.mark.parametrize(
    ("draft", "thresholds", "text"),
    [
        (Draft("00" * 32), (0.5,), "the layers of the draft are known only by their digest, sha256:00"),
        (random_draft(WIDTH), (0.5,), "the draft has a layer 1, but the decoder has 1 layer"),
        (random_draft(6), (0.5, 0.5), "layer 0 of the draft is for a hidden size of 6, but the decoder's is 8"),
        (Draft.of({1: layer_of_draft(WIDTH)}), (0.5, None), "no layer with a draft has a gate"),
    ],
)
def test_what_is_refused_changes_nothing(draft: Draft, thresholds: tuple[float | None, ...], text: str) -> None:
    program = replaying(*thresholds, gate="input_delta")
    before = everything(program)
    with pytest.raises(CompileError, match=text):
        InsertDrafts(draft).apply(program)
    assert everything(program) == before
    assert InsertDrafts().apply(program) is False


def test_a_layer_without_a_draft_or_without_a_gate_stays() -> None:
    before, program = (replaying(None, 0.5, 0.5, gate="input_delta") for _ in range(2))
    InsertDrafts(Draft.of({i: layer_of_draft(WIDTH, 3, 2) for i in (0, 1)})).apply(program)
    assert [s.replay and s.replay.draft for s in program.sites] == [None, DraftSize(3, 2), None]
    assert {n.rpartition("_")[2] for n in program.params if n.startswith("draft_")} == {"1"}
    assert program.state == before.state
    assert module_text(program.prefill) == module_text(before.prefill)  # pyright: ignore[reportArgumentType]


# skip-rows: rows that replay are zero in the compute branch.


WHERE = torch.ops.aten.where.self


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
        (replaying(0.0, couple_cfg=True), SkipRows(couple_cfg=True)),
        (never, SkipRows()),
        (done, SkipRows()),
    ):
        check_left_alone(program, item)
