"""Training of gates: the decoder with gradients against the evaluator, what training gains, the file."""

import re
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from decoders import headless_llama
from drawn_videos import FRAME, LAYERS, LENGTH, videos
from transformers import LlamaForCausalLM

import fastcar_compile as fc
from fastcar_compile.config import ReplayConfig
from fastcar_compile.errors import InputError
from fastcar_compile.tune.calibrate import program_of, rules_of
from fastcar_compile.tune.evaluator import Evaluator
from fastcar_compile.tune.training import train as training_of_gates
from fastcar_compile.tune.training.relaxed import Relaxation, RelaxedDecoder, TasScorer
from fastcar_compile.tune.training.train import Options, Training

from .conftest import interrupted_and_resumed

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def some(decoder: LlamaForCausalLM) -> np.ndarray:
    return videos(decoder, 128, 1)


def training(model: LlamaForCausalLM, tokens: np.ndarray, gate: str, prompt: int = 1) -> Training:
    relaxed = RelaxedDecoder(model, len(tokens), LENGTH, FRAME, prompt)
    return Training(relaxed, torch.from_numpy(tokens), Options(gate, 0.5, 4, 1, len(tokens), 0))


@pytest.mark.parametrize("prompt", [pytest.param(1, marks=pytest.mark.thorough), 3])
def test_hard_decisions_are_those_of_the_evaluator(decoder: LlamaForCausalLM, some: np.ndarray, prompt: int) -> None:
    """Weighted heads, thresholds from the bias; the last frame is not whole where the prompt is longer than 1."""
    tokens = some[:4]
    one = training(decoder, tokens, "tas", prompt)
    relaxed, scorers = one._decoder, [cast("TasScorer", scorer) for scorer in one.scorers]
    with torch.no_grad():
        for scorer in scorers:
            scorer.bias += 0.007  # it begins at the score of some token
        logits, shares = relaxed.replayed(torch.from_numpy(tokens[:, :-1]), scorers)
    heads = [dict(enumerate(scorer.weights()["heads"].tolist())) for scorer in scorers]
    rules = rules_of(ReplayConfig(gate="tas", heads=heads), LAYERS)
    found = Evaluator(program_of(decoder, tokens.shape), tokens, rules, prompt).measure(
        [s.threshold() for s in scorers]
    )
    assert all(0.1 < ratio < 0.9 for ratio in found.ratios)
    np.testing.assert_allclose(shares.numpy(), found.ratios, atol=1e-6)
    first = prompt - 1 + FRAME
    targets = torch.from_numpy(tokens[:, first + 1 :])
    nll = torch.nn.functional.cross_entropy(logits[:, first:].transpose(1, 2), targets)
    assert float(nll) == pytest.approx(found.nll, rel=1e-4)


def test_gradients_reach_every_weight_of_every_layer(decoder: LlamaForCausalLM, some: np.ndarray) -> None:
    for gate in ("learned", "tas"):
        one = training(decoder, some[:4], gate)
        one._step(0)
        for name, weight in one.scorers.named_parameters():
            assert weight.grad is not None, name
            assert float(weight.grad.abs().max()) > 0, name
    assert all(weight.grad is None for weight in decoder.parameters())


def test_the_loss_counts_the_tokens_that_the_decoder_predicts(decoder: LlamaForCausalLM, some: np.ndarray) -> None:
    """With the last symbols given, the step's NLL is the evaluator's of the same decisions."""
    tokens, counted = some[:4], (0, int(np.median(some)))
    relaxed = RelaxedDecoder(decoder, 4, LENGTH, FRAME, 1)
    options = Options("tas", 0.5, 4, 1, 4, 0, counted=counted)
    one = Training(relaxed, torch.from_numpy(tokens), options)
    step, _, _ = one._loss(torch.from_numpy(tokens), Relaxation())
    rules = rules_of(ReplayConfig(gate="never"), LAYERS)
    dense = Evaluator(program_of(decoder, tokens.shape), tokens, rules, counted=counted).measure([None] * LAYERS)
    assert step.nll_dense == pytest.approx(dense.nll, rel=1e-4)
    with pytest.raises(InputError, match="no token after the first frame has an id in"):
        train(decoder, tokens, "tas", steps=1, counted=(10**6, 10**6 + 1))


def nll_increase(model: LlamaForCausalLM, tokens: np.ndarray, gate: ReplayConfig, share: float) -> float:
    """NLL relative to dense of calibrated thresholds, on other videos than the training's."""
    found = fc.calibrate(model, tokens, replay=gate, target_replay=share)
    assert found.replay >= share
    return found.nll / found.nll_dense


def train(model: LlamaForCausalLM, tokens: np.ndarray, gate: str, **options: Any) -> fc.TrainedGate:
    options |= {"units": 4} if gate == "learned" else {}
    return fc.train_gate(model, tokens, gate=gate, target_replay=0.5, batch=16, **options)


@pytest.fixture(scope="module")
def learned(decoder: LlamaForCausalLM, some: np.ndarray) -> fc.TrainedGate:
    return train(decoder, some[64:], "learned", steps=40)


@pytest.mark.thorough
def test_a_trained_network_beats_the_input_delta(
    decoder: LlamaForCausalLM, some: np.ndarray, learned: fc.TrainedGate
) -> None:
    trained = nll_increase(decoder, some[:32], learned.replay_config(), 0.5)
    assert trained < 0.95 * nll_increase(decoder, some[:32], ReplayConfig(gate="input_delta"), 0.5)


@pytest.mark.thorough
def test_trained_heads_beat_all_heads(decoder: LlamaForCausalLM, some: np.ndarray) -> None:
    lines: list[str] = []
    trained = train(decoder, some[64:], "tas", steps=20, progress=lines.append)
    assert len(lines) == 20
    assert lines[-1].startswith("step 20 of 20: replay ")
    # At one half all replay of one layer and none of the other is best with any heads.
    gained = nll_increase(decoder, some[:64], trained.replay_config(), 0.3)
    assert gained < 0.97 * nll_increase(decoder, some[:64], ReplayConfig(gate="tas"), 0.3)


def test_the_network_of_the_evaluator_is_the_trained_one(
    decoder: LlamaForCausalLM, some: np.ndarray, learned: fc.TrainedGate
) -> None:
    """Weights in the file are folded and rounded, so a few decisions may differ from those of the last steps."""
    config = learned.replay_config()
    found = Evaluator(program_of(decoder, some[64:].shape), some[64:], rules_of(config, LAYERS)).measure([0.0] * LAYERS)
    assert found.replay == pytest.approx(learned.replay, abs=0.05)
    assert found.nll == pytest.approx(learned.nll, rel=0.1)


def test_same_seed_same_bytes_and_the_file_comes_back(
    decoder: LlamaForCausalLM, some: np.ndarray, tmp_path: Path
) -> None:
    first, again = tmp_path / "first.safetensors", tmp_path / "again.safetensors"
    trained = train(decoder, some[:16], "learned", steps=2)
    trained.save(first)
    train(decoder, some[:16], "learned", steps=2).save(again)
    assert first.read_bytes() == again.read_bytes()
    loaded = fc.TrainedGate.load(first)
    assert loaded.facts() == trained.facts()
    assert loaded.replay_config() == fc.ReplayConfig(gate="learned", gate_weights=first, threshold=[0.0, 0.0])
    train(decoder, some[:16], "learned", steps=1, seed=1).save(again)
    assert first.read_bytes() != again.read_bytes()


def test_an_interrupted_training_goes_on(
    decoder: LlamaForCausalLM, some: np.ndarray, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its steps have two slices."""
    monkeypatch.setattr(training_of_gates, "SLICE_TOKENS", 8 * (LENGTH + 1))
    one = partial(train, decoder, some[:16], "tas")
    resumed, whole = interrupted_and_resumed(one, tmp_path / "state.safetensors"), one(steps=13)
    assert resumed.facts() == whole.facts()


@pytest.mark.thorough
@pytest.mark.parametrize("gate", ["learned", pytest.param("tas", marks=pytest.mark.thorough)])
def test_going_on_begins_where_the_gate_was(decoder: LlamaForCausalLM, some: np.ndarray, gate: str) -> None:
    trained = train(decoder, some[:32], gate, steps=3)
    one = training(decoder, some[:16], gate)
    one._go_on_from(trained)
    scorers = one._list()
    for scorer, weights, threshold in zip(scorers, trained.layers, trained.thresholds, strict=True):
        assert scorer.threshold() == pytest.approx(threshold, rel=1e-5)
        for name, tensor in scorer.weights().items():
            torch.testing.assert_close(tensor, weights[name])
    further = train(decoder, some[:32], gate, steps=1, start=trained)
    assert further.inputs != trained.inputs
    assert further.price == pytest.approx(trained.price, abs=0.2)
    other = "tas" if gate == "learned" else "learned"
    with pytest.raises(InputError, match=f"the gate to start from is '{gate}' with .*, not '{other}' with "):
        train(decoder, some[:32], other, steps=1, start=trained)


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"gate": "input_delta"}, "gate 'input_delta' has nothing to train", "choose from learned, tas"),
    ({"target_replay": 1.0}, "target_replay is 1", "give a share between 0 and 1"),
    ({"softness": 0.0}, "softness is 0", "give a number above 0"),
    ({"units": 0}, "units is 0", f"give a whole number from 1 to {2**30}"),
    ({"batch": 2.5}, "batch is 2.5", f"give a whole number from 1 to {2**30}"),
    ({"videos": np.zeros((2, 9), np.float32)}, "the videos are float32 [2, 9]", "give token ids as integers [N, T]"),
    ({"videos": np.zeros((2, 10), np.int64)}, "videos of 10 tokens are too short; 11 are needed", "at least 11 tokens"),
    ({"model": headless_llama()}, "a headless decoder has no likelihood to train on", "train with its head"),
]


@pytest.mark.parametrize(("options", "what", "hint"), REFUSED, ids=[w for _, w, _ in REFUSED])
def test_refusals(decoder: LlamaForCausalLM, some: np.ndarray, options: dict[str, Any], what: str, hint: str) -> None:
    given = {"model": decoder, "videos": some, "target_replay": 0.5, "tokens_per_frame": FRAME} | options
    with pytest.raises(InputError, match=re.escape(what)) as caught:
        fc.train_gate(given.pop("model"), given.pop("videos"), **given)
    assert hint in (caught.value.hint or "")
