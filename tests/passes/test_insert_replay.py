"""insert-replay: TAS, gate, cond and the MLP cache around every MLP that has a threshold."""

import numpy as np
import pytest
import torch
from gates.networks import networks

from fastcar_compile.errors import CompileError
from fastcar_compile.gates import GateWeights
from fastcar_compile.ir.pass_manager import run_pipeline
from fastcar_compile.ir.program import DecoderProgram
from fastcar_compile.passes.insert_replay import InsertReplay
from fastcar_compile.passes.pipeline import analysis_pipeline
from fastcar_compile.passes.quantize import QuantizeW8A8

from .laws import everything, module_text
from .tiny import BATCH, FRAME, ROWS, WIDTH, TinyBlock, after, captured, decode, logits, token_ids

INF = float("inf")


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


def test_a_gate_s_weights_must_be_there_and_fit() -> None:
    program = after(*analysis_pipeline())
    before = everything(program)
    with pytest.raises(CompileError, match="gate 'learned' needs its weights"):
        InsertReplay((0.5,), gate="learned").apply(program)
    with pytest.raises(CompileError, match=r"w1 is \[3, 12\], but the decoder's hidden size is 8"):
        InsertReplay((0.5,), gate="learned", gate_weights=networks(6, 3)).apply(program)
    with pytest.raises(CompileError, match="known only by their digest, sha256:00"):
        InsertReplay((0.5,), gate="learned", gate_weights=GateWeights("00" * 32)).apply(program)
    assert everything(program) == before


def test_prefill_is_left_alone() -> None:
    before, program = after(*analysis_pipeline()), replaying(0.0)
    assert module_text(program.prefill) == module_text(before.prefill)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("thresholds", [(1.5,), (None,)])
def test_second_application_is_refused_and_changes_nothing(thresholds: tuple[float | None, ...]) -> None:
    program = replaying(*thresholds)
    before = everything(program)
    with pytest.raises(CompileError, match="insert-replay ran already"):
        InsertReplay(thresholds).apply(program)
    assert everything(program) == before


def test_every_node_of_the_mlp_moves_into_the_compute_branch() -> None:
    before = after(*analysis_pipeline())
    program = replaying(1.5)
    site = before.sites[0]
    branch = {n.name for n in program.graph_module.compute_branch_0.graph.nodes}  # pyright: ignore[reportAttributeAccessIssue, reportGeneralTypeIssues]
    outer = {n.name for n in program.graph_module.graph.nodes}
    moved = {*site.mlp.linears, site.mlp.input, "silu", "mul"}
    assert moved <= branch
    assert not moved & outer


def test_the_replay_branch_reads_no_weight() -> None:
    branch = replaying(1.5).graph_module.replay_branch_0
    used = [n.name for n in branch.graph.nodes if n.op == "placeholder" and n.users]  # pyright: ignore[reportAttributeAccessIssue, reportGeneralTypeIssues]
    assert used == ["cached"]


@pytest.mark.parametrize("thresholds", [(1.5,), (0.0, None), (None,)])
def test_closed_gate_keeps_the_logits(thresholds: tuple[float | None, ...]) -> None:
    expected = logits(after(*analysis_pipeline(), blocks=(TinyBlock,) * len(thresholds)))
    np.testing.assert_array_equal(logits(replaying(*thresholds), INF), expected)


def test_closed_gate_keeps_the_logits_of_w8a8() -> None:
    expected = logits(after(*analysis_pipeline(), QuantizeW8A8()))
    program = after(*analysis_pipeline(), QuantizeW8A8(), InsertReplay((1.5,)))
    np.testing.assert_array_equal(logits(program, INF), expected)


def test_scores_are_the_attention_logits_one_frame_back() -> None:
    """An independent TAS from the weights: q(t) . k(t - F) / sqrt(D), mean over the two query heads."""
    program = replaying(0.0)
    results = decode(program, INF)
    q, k = queries_and_keys(program)
    for t in range(FRAME, ROWS):
        expected = np.einsum("bhd,bd->bh", q[t], k[t - FRAME]).mean(1) * 0.5
        np.testing.assert_allclose(results[t].scores[0], expected, atol=1e-5)


def queries_and_keys(program: DecoderProgram) -> tuple[np.ndarray, np.ndarray]:
    """q [T, B, 2, 4] and k [T, B, 4] of layer 0, whose input is the embedding alone."""
    params = {k: v.double().numpy() for k, v in program.params.items()}
    h = params["embed.weight"][token_ids()]
    x = (h - h.mean(-1, keepdims=True)) / np.sqrt(h.var(-1, keepdims=True) + 1e-5) * params["blocks.0.norm_1.weight"]
    qkv = (x @ params["blocks.0.qkv.weight"].T).transpose(1, 0, 2)
    return qkv[..., :8].reshape(ROWS, BATCH, 2, 4), qkv[..., 8:12]


def test_thresholds_must_fit_the_layers() -> None:
    with pytest.raises(CompileError, match="2 thresholds for 1 layer"):
        InsertReplay((1.0, 2.0)).apply(after(*analysis_pipeline()))


def test_coupling_wants_pairs() -> None:
    odd = run_pipeline(captured(batch=3), analysis_pipeline())
    before = everything(odd)
    with pytest.raises(CompileError, match="row b with row b \\+ B / 2, but batch_size is 3"):
        InsertReplay((1.0,), couple_cfg=True).apply(odd)
    assert everything(odd) == before
    assert InsertReplay((1.0,), couple_cfg=True).apply(after(*analysis_pipeline())) is True
