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
    """Drawn from the decoder itself, so that its likelihood is as good as it gets; a third of the symbols of a frame
    are those of the frame before."""
    random = torch.Generator().manual_seed(seed)
    tokens = torch.zeros(count, 1, dtype=torch.int64)
    with torch.inference_mode():
        for place in range(LENGTH):
            logits = model(tokens, use_cache=False).logits[:, -1]
            drawn = torch.multinomial(logits.softmax(-1), 1, generator=random)
            same = torch.rand(count, 1, generator=random) < (0.5 if place >= FRAME else 0)
            tokens = torch.cat([tokens, torch.where(same, tokens[:, -FRAME, None], drawn)], 1)
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
