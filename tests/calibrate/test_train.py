"""Training of gates: the decoder with gradients against the evaluator, what training gains, the file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from decoders import headless_llama, llama
from transformers import LlamaForCausalLM

import fastcar_compile as fc
from fastcar_compile.calibrate import Evaluator, program_of, rules_of
from fastcar_compile.calibrate.relaxed import RelaxedDecoder, Scorer
from fastcar_compile.calibrate.scorers import LearnedScorer, TasScorer
from fastcar_compile.calibrate.train import Options, _Training
from fastcar_compile.config import ReplayConfig
from fastcar_compile.errors import InputError, UserError

FRAME, FRAMES, LAYERS = 8, 4, 2
LENGTH = FRAME * FRAMES


@pytest.fixture(scope="module")
def decoder() -> LlamaForCausalLM:
    """Sharp enough that a wrong MLP output costs likelihood; symbols stay much the same from frame to frame."""
    model = llama(vocab_size=7, max_position_embeddings=LENGTH + 1)
    model.lm_head.weight.data *= 12
    for layer in model.model.layers:
        layer.mlp.down_proj.weight.data *= 25
    model.config.tokens_per_frame = FRAME
    return model.requires_grad_(False)


def videos(model: LlamaForCausalLM, count: int, seed: int) -> np.ndarray:
    """A first frame by chance, then drawn from the decoder itself, so that its likelihood is as good as it gets."""
    random = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 7, (count, 1 + FRAME), generator=random)
    with torch.inference_mode():
        for _ in range(LENGTH - FRAME):
            logits = model(tokens, use_cache=False).logits[:, -1]
            tokens = torch.cat([tokens, torch.multinomial(logits.softmax(-1), 1, generator=random)], 1)
    return tokens.numpy()


@pytest.fixture(scope="module")
def some(decoder: LlamaForCausalLM) -> np.ndarray:
    return videos(decoder, 64, 1)


def training(model: LlamaForCausalLM, tokens: np.ndarray, gate: str, prompt: int = 1) -> _Training:
    relaxed = RelaxedDecoder(model, len(tokens), LENGTH, FRAME, prompt)
    return _Training(relaxed, torch.from_numpy(tokens), Options(gate, 0.5, 4, 1, len(tokens), 0))


def test_the_dense_decoder_is_the_model(decoder: LlamaForCausalLM, some: np.ndarray) -> None:
    tokens = torch.from_numpy(some[:3, :-1])
    found = RelaxedDecoder(decoder, 3, LENGTH, FRAME).dense(tokens)
    torch.testing.assert_close(found, decoder(tokens, use_cache=False).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("prompt", [1, 3])
def test_hard_decisions_are_those_of_the_evaluator(decoder: LlamaForCausalLM, some: np.ndarray, prompt: int) -> None:
    """Weighted heads, thresholds from the bias; the last frame is not whole where the prompt is longer than 1."""
    tokens = some[:4]
    one = training(decoder, tokens, "tas", prompt)
    relaxed, scorers = one._decoder, list(one.scorers)
    with torch.no_grad():
        for scorer in one.scorers:
            scorer.bias += 0.007  # it begins at the score of some token
        logits, shares = relaxed.replayed(torch.from_numpy(tokens[:, :-1]), scorers)
    heads = [dict(enumerate(scorer.weights()["heads"].tolist())) for scorer in scorers]
    rules = rules_of(ReplayConfig(gate="tas", heads=heads), LAYERS)
    found = Evaluator(program_of(decoder, 4), tokens, rules, prompt).measure([s.threshold() for s in scorers])
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


def damage(model: LlamaForCausalLM, tokens: np.ndarray, gate: ReplayConfig, share: float) -> float:
    """NLL relative to dense of calibrated thresholds, on other videos than the training's."""
    found = fc.calibrate(model, tokens, replay=gate, target_replay=share)
    assert found.replay >= share
    return found.nll / found.nll_dense


def test_trained_heads_beat_all_heads(decoder: LlamaForCausalLM, some: np.ndarray) -> None:
    lines: list[str] = []
    trained = fc.train_gate(
        decoder, some[8:], gate="tas", target_replay=0.5, steps=25, batch=8, progress=lines.append
    )
    assert len(lines) == 25
    assert lines[-1].startswith("step 25 of 25: replay ")
    assert trained.replay == pytest.approx(0.5, abs=0.12)
    gained = damage(decoder, some[:8], ReplayConfig(gate="tas", heads=trained.heads()), 0.5)
    before = damage(decoder, some[:8], ReplayConfig(gate="tas"), 0.5)
    print(gained, before)
    assert gained < before
