"""Drafts fitted to videos: sizes, errors, checkpoints, and what evaluator and calibrator make of them."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import Made
from drawn_videos import FRAME, LAYERS, LENGTH, sharp_decoder, videos
from torch import Tensor
from torch.nn import functional as F
from transformers import LlamaForCausalLM

import fastcar_compile as fc
from fastcar_compile.errors import CompileError, InputError
from fastcar_compile.gates.draft import LayerDraft
from fastcar_compile.tune.calibrate import program_of, search_of
from fastcar_compile.tune.training.draft import Distillation, DraftScorer
from fastcar_compile.tune.training.relaxed import RelaxedDecoder
from fastcar_compile.tune.training.train import Options

from .test_evaluator import check_against_the_session, rewritten

NEURONS = 256

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def wide(one_thread: None) -> LlamaForCausalLM:
    return sharp_decoder(intermediate_size=NEURONS)


@pytest.fixture(scope="module")
def some(wide: LlamaForCausalLM) -> np.ndarray[Any, Any]:
    return videos(wide, 48, 1)


def fit(model: LlamaForCausalLM, tokens: np.ndarray[Any, Any], **options: Any) -> fc.Draft:
    return fc.fit_draft(model, tokens[:32], **options)


@pytest.fixture(scope="module")
def fitted(
    wide: LlamaForCausalLM, some: np.ndarray[Any, Any], tmp_path_factory: pytest.TempPathFactory
) -> dict[float, fc.Draft]:
    """Share -> draft. The layers are fitted once."""
    kept = tmp_path_factory.mktemp("fitted") / "checkpoint"
    return Made(lambda share: fit(wide, some, share=share, checkpoint=kept))


def surrogate(own: LayerDraft, x: Tensor) -> Tensor:
    assert own.gate_proj is not None
    neurons = F.silu(x @ own.gate_proj.T) * (x @ own.up_proj.T)
    return torch.cat([neurons, x @ own.inner.T], -1) @ own.outer.T + own.bias


def errors(model: LlamaForCausalLM, draft: fc.Draft, tokens: np.ndarray[Any, Any]) -> list[float]:
    """Per layer the mean square of m(x) - y behind the first frame, as a share of that of y; 1 without a draft."""
    found = list[float]()

    def watch(layer: int) -> Any:
        def see(_module: torch.nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            x, y = inputs[0][:, FRAME + 1 :], output[:, FRAME + 1 :]
            left = y - surrogate(draft.layers[layer], x) if layer in draft.layers else y
            found.append(float(left.square().sum() / y.square().sum()))

        return see

    mlps = [model.get_submodule(f"model.layers.{layer}.mlp") for layer in range(LAYERS)]
    hooks = [mlp.register_forward_hook(watch(layer)) for layer, mlp in enumerate(mlps)]
    with torch.no_grad():
        model(torch.from_numpy(tokens[:, :-1]), use_cache=False)
    for hook in hooks:
        hook.remove()
    return found


@pytest.mark.thorough
def test_the_share_is_kept_and_more_of_it_errs_less(
    wide: LlamaForCausalLM, some: np.ndarray[Any, Any], fitted: dict[float, fc.Draft]
) -> None:
    """On videos that it was not fitted to."""
    for share, draft in ((share, fitted[share]) for share in (0.3, 0.7)):
        used = sum(own.size.share(NEURONS, gated=True) for own in draft.layers.values()) / LAYERS
        assert 0 < used <= share
        assert draft.gate is not None
        assert sorted(draft.gate.layers) == list(range(LAYERS))
        for own in draft.layers.values():
            assert ((own.gains >= 0) & (own.gains <= 1)).all()
    small, large = (errors(wide, draft, some[32:]) for draft in fitted.values())
    assert sum(large) < 0.9 * sum(small)
    assert sum(small) < LAYERS


@pytest.mark.thorough
def test_same_seed_same_bytes(
    wide: LlamaForCausalLM, some: np.ndarray[Any, Any], fitted: dict[float, fc.Draft], tmp_path: Path
) -> None:
    """Also for a fit that was interrupted and resumed, and one of another share with the first one's layers."""
    checkpoint, lines = tmp_path / "checkpoint", list[str]()

    def stop(line: str) -> None:
        lines.append(line)
        if line.startswith("layer 0 is fitted"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fit(wide, some, share=0.7, checkpoint=checkpoint, progress=stop)
    further = list[str]()
    assert fit(wide, some, share=0.7, checkpoint=checkpoint, progress=further.append) == fitted[0.7]
    assert [line for line in further if "is fitted" in line] == [f"layer 1 is fitted in {lines[-1].split()[-2]} sizes"]
    further.clear()
    assert fit(wide, some, share=0.3, checkpoint=checkpoint, progress=further.append) == fitted[0.3]
    assert not any("is fitted" in line for line in further)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"share": 0}, "share is 0"),
        ({"share": 1.0}, "share is 1"),
        ({"distill_replay": 1.0}, "distill_replay is 1"),
        ({"distill_rate": 0.0}, "distill_rate is 0"),
        (
            {"tokens_per_frame": 11},
            "videos of 33 tokens are too short; 35 are needed: a prompt of 1, 3 frames of 11, and 1 more",
        ),
        ({"prompt": 9}, "videos of 33 tokens are too short; 34 are needed: a prompt of 9, 3 frames of 8, and 1 more"),
    ],
)
def test_what_is_refused(
    wide: LlamaForCausalLM, some: np.ndarray[Any, Any], options: dict[str, Any], text: str
) -> None:
    with pytest.raises(InputError, match=text):
        fit(wide, some, **options)


def test_a_small_mlp_has_no_draft(some: np.ndarray[Any, Any]) -> None:
    with pytest.raises(CompileError, match="the MLP of layer 0 is too small for a draft"):
        fit(sharp_decoder(intermediate_size=16), some)


def test_the_evaluator_equals_the_session(wide: LlamaForCausalLM, fitted: dict[float, fc.Draft]) -> None:
    replay = fc.ReplayConfig(draft=fitted[0.7])
    check_against_the_session(replay, rewritten(replay, build=lambda: wide), prompt=3)


@pytest.mark.thorough
def test_calibration_of_a_model_and_of_its_artifact(
    wide: LlamaForCausalLM, some: np.ndarray[Any, Any], fitted: dict[float, fc.Draft], tmp_path: Path
) -> None:
    """The artifact knows the draft by its digest, and has its weights in the program. Plain replay costs more."""
    draft = fitted[0.7]
    found = fc.calibrate(wide, some[32:], replay=fc.ReplayConfig(draft=draft), target_replay=0.5)
    options: dict[str, Any] = {
        "max_seq_len": LENGTH,
        "tokens_per_frame": FRAME,
        "output": tmp_path / "built",
        "prefill_chunk": 4,
    }
    artifact = fc.compile(wide, "cpu", replay=fc.ReplayConfig(draft=draft, threshold=found.values), **options)
    again = fc.calibrate(fc.load(artifact.path), some[32:], target_replay=0.5)
    # The artifact has smaller chunks, and PyTorch adds up other bits in them on some CPUs.
    assert again.values == pytest.approx(found.values, rel=1e-5)
    assert again.nll == pytest.approx(found.nll, rel=1e-6)
    left = [1 - draft.layers[i].size.share(NEURONS, gated=True) for i in range(LAYERS)]
    spared = sum(r * part for r, part in zip(found.per_layer, left, strict=True)) / LAYERS
    assert again.spared == found.spared == pytest.approx(spared)
    plain = fc.ReplayConfig(gate="learned", gate_weights=draft.gate)
    assert found.nll < fc.calibrate(wide, some[32:], replay=plain, target_replay=0.5).nll


@pytest.mark.thorough
def test_a_layer_whose_draft_does_not_pay_never_replays(
    wide: LlamaForCausalLM, some: np.ndarray[Any, Any], fitted: dict[float, fc.Draft]
) -> None:
    """A limit on the NLL chooses each layer for itself. A layer that the draft leaves out replays plainly."""
    good = fitted[0.7]
    assert good.gate is not None
    gates = [good.gate.layer(layer).params() for layer in range(LAYERS)]
    first, second = (good.layers[layer].params() for layer in range(LAYERS))
    wrong = second | {"outer": 30 * second["outer"].flip(0), "gains": torch.zeros_like(second["gains"])}
    found = list[fc.Thresholds]()
    for own in (wrong, dict[str, Tensor]()):
        draft = fc.Draft.of({0: first | gates[0], 1: own | gates[1]})
        found.append(fc.calibrate(wide, some[32:], replay=fc.ReplayConfig(draft=draft), max_nll_increase=0.02))
    assert found[0].values[1] is None
    assert found[1].values[1] is not None
    assert found[1].per_layer[1] > 0.05
    assert all(own.per_layer[0] > 0.1 and own.nll <= 1.02 * own.nll_dense for own in found)


@pytest.mark.thorough
@pytest.mark.parametrize("quant", ["none", "w8a8"])
def test_a_draft_of_an_artifact(
    wide: LlamaForCausalLM, some: np.ndarray[Any, Any], fitted: dict[float, fc.Draft], tmp_path: Path, quant: str
) -> None:
    """It imitates the MLPs as the artifact computes them."""
    options: dict[str, Any] = {"max_seq_len": LENGTH, "tokens_per_frame": FRAME, "quant": quant, "prefill_chunk": 5}
    built = fc.compile(wide, "cpu", output=tmp_path / "built", batch_size=4, **options)
    artifact, own = fc.load(built.path), fitted[0.7]
    found = fc.fit_draft(artifact, some[:32], share=0.7)
    assert [d.size for d in found.layers.values()] == [d.size for d in own.layers.values()]
    allowed = {"none": 1.01, "w8a8": 1.1}[quant] * sum(errors(wide, own, some[32:]))
    assert sum(errors(wide, found, some[32:])) < allowed
    for layer, draft in found.layers.items():
        rows = wide.get_parameter(f"model.layers.{layer}.mlp.up_proj.weight").detach()
        assert torch.cdist(draft.up_proj, rows).min(1).values.max() < 0.02 * rows.norm(dim=1).mean()
    refused: list[tuple[np.ndarray[Any, Any], dict[str, Any], str]] = [
        (some, {"distill_steps": 1}, "an artifact has no gradients"),
        (some[:3], {}, "the artifact reads 4 videos together, and there are 3"),
        (np.pad(some, ((0, 0), (0, 1))), {}, "the artifact was compiled for 32 tokens, and the videos have 34"),
    ]
    for tokens, given, text in refused:
        with pytest.raises(InputError, match=text):
            fc.fit_draft(artifact, tokens, **given)


def divergence(model: LlamaForCausalLM, draft: fc.Draft, tokens: np.ndarray[Any, Any], threshold: float) -> float:
    """Mean divergence from the dense decoder behind the first frame. Replay and NLL are those of the evaluator."""
    decoder, given = RelaxedDecoder(model, len(tokens), LENGTH, FRAME), torch.from_numpy(tokens)
    options = Options("learned", 0.8, 1, 1, len(tokens), 0)
    scorers = Distillation(decoder, given, options, draft, 0.01, threshold, "").scorers
    with torch.no_grad():
        logits, shares = decoder.replayed(given[:, :-1], [s for s in scorers if isinstance(s, DraftScorer)])
        now, dense = (v[:, FRAME:].log_softmax(-1) for v in (logits, decoder.dense(given[:, :-1])))
    search = search_of(program_of(model, tokens.shape), fc.ReplayConfig(draft=draft), tokens)[0]
    outcome, wanted = search.outcome((threshold,) * LAYERS), given[:, FRAME + 1 :, None]
    nll, nll_dense = (float(-v.gather(-1, wanted).mean()) for v in (now, dense))
    assert outcome.loss == pytest.approx(np.log(nll / nll_dense), abs=1e-5)
    assert outcome.ratios == pytest.approx(shares.tolist(), abs=1e-6)
    assert 0.3 < outcome.replay < 0.95
    return float((dense.exp() * (dense - now)).sum(-1).mean())


@pytest.mark.thorough
def test_distilled_drafts_predict_better(
    wide: LlamaForCausalLM, some: np.ndarray[Any, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On other videos, after a fit to two of many. The decoder stays; a resumed training ends the same."""
    monkeypatch.setattr("fastcar_compile.tune.training.draft.FIT_TOKENS", 2 * (LENGTH + 1))
    before, held_out = {name: weight.clone() for name, weight in wide.named_parameters()}, some[40:]
    options: dict[str, Any] = {"share": 0.3, "checkpoint": tmp_path / "checkpoint"}
    fitted, steps = fit(wide, some, **options), {"distill_steps": 13, "distill_rate": 2e-3}
    found = fit(wide, some, **options, **steps)
    assert all(torch.equal(weight, before[name]) for name, weight in wide.named_parameters())
    search = search_of(program_of(wide, held_out.shape), fc.ReplayConfig(draft=fitted), held_out)[0]
    (level, *_) = search.level(0.8)
    assert level is not None
    # The level is a score itself, which either rule may round to another side.
    was, now = (divergence(wide, draft, held_out, level + 1e-3) for draft in (fitted, found))
    assert now < 0.7 * was
    assert found.gate == fitted.gate
    for layer, own in found.layers.items():
        assert own.size == fitted.layers[layer].size
        assert torch.equal(own.edges, fitted.layers[layer].edges)
        assert ((own.gains >= 0) & (own.gains <= 1)).all()
    state = tmp_path / "checkpoint-0.3"
    state.unlink()

    def stop(line: str) -> None:
        if line.startswith("step 13 of 13"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fit(wide, some, **options, **steps, progress=stop)
    lines = list[str]()
    assert fit(wide, some, **options, **steps, progress=lines.append) == found
    assert next(line for line in lines if line.startswith("step")).startswith("step 12 of 13")
