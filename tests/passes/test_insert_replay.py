"""insert-replay: TAS, gate, cond and the MLP cache around every MLP that has a threshold."""

import pytest
import torch
from gates.networks import networks

from fastcar_compile.errors import CompileError
from fastcar_compile.ir.pass_manager import run_pipeline
from fastcar_compile.ir.program import DecoderProgram
from fastcar_compile.passes.insert_replay import InsertReplay
from fastcar_compile.passes.pipeline import analysis_pipeline

from .laws import everything, module_text
from .tiny import WIDTH, TinyBlock, after, captured


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
