"""The bouncing-digits example, and what the examples share: data, training that goes on, and the decoder it ships."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from conftest import imported
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from transformers import LlamaConfig, LlamaForCausalLM

EXAMPLES = Path(__file__).parents[1] / "examples"
FOLDER = EXAMPLES / "bouncing_digits"
NAMES = ("video", "train", "common.training", "common.likelihood")
NLL_LIMIT = 0.15  # nats per token on 8 unseen videos; 32 give 0.107, copying the frame before costs 1.16
SIZE_LIMIT = 4 * 2**20


@pytest.fixture(scope="module")
def example() -> Iterator[SimpleNamespace]:
    """The example's modules, imported as its own scripts import them."""
    with imported([FOLDER, EXAMPLES], NAMES) as modules:
        yield modules


@given(data=st.data())
@settings(deadline=None, max_examples=25)
def test_tokens_are_lossless(example: SimpleNamespace, data: st.DataObject) -> None:
    shape = (data.draw(st.integers(1, 3)), data.draw(st.integers(1, 4)), 20, 20)
    video = data.draw(arrays(np.uint8, shape, elements=st.integers(0, 2)))
    tokens = example.video.tokenize(video)
    assert tokens.shape == (shape[0], shape[1] * 101)
    ends = tokens.reshape(shape[0], shape[1], 101)[..., -1]
    assert (ends == example.video.SEPARATOR).all()
    assert (tokens == example.video.SEPARATOR).sum() == ends.size
    np.testing.assert_array_equal(example.video.detokenize(tokens), video)


def tiny() -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2}
    sizes |= {"num_hidden_layers": 1}
    return LlamaForCausalLM(LlamaConfig(vocab_size=5, max_position_embeddings=32, **sizes))


def tiny_world(example: SimpleNamespace) -> object:
    def tokens(count: int, seed: int, frames: int) -> np.ndarray:
        first = np.random.default_rng(seed).integers(0, 4, (count, 3))
        return np.concatenate([np.full((count, 1), 4), np.tile(first, frames)], 1)

    return example.training.World(tokens, 3, 4)


def test_training_lowers_the_loss_and_goes_on_from_a_checkpoint(
    example: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training, world = example.training, tiny_world(example)
    monkeypatch.setattr(training, "SAVE_SECONDS", 0.0)
    plan = training.Plan((training.Phase(2, 4, 6), training.Phase(4, 2, 4)), seed=0, rate=1e-2, every=5)
    whole, stopped, resumed = tiny(), tiny(), tiny()
    log = training.train(whole, world, plan, tmp_path / "whole")
    assert [(e["step"], e["frames"]) for e in log] == [(5, 2), (10, 4), (10, 4)]
    assert log[-1]["held_out_nll_frames_2_to_8"] < log[0]["held_out_nll_frames_2_to_8"] < math.log(5)
    real, calls = training.update, []

    def interrupted(*arguments: object) -> float:
        calls.append(1)
        if len(calls) == 8:
            raise KeyboardInterrupt
        return real(*arguments)

    monkeypatch.setattr(training, "update", interrupted)
    with pytest.raises(KeyboardInterrupt):
        training.train(stopped, world, plan, tmp_path / "part")
    monkeypatch.setattr(training, "update", real)
    assert training.train(resumed, world, plan, tmp_path / "part") == log
    for (name, a), b in zip(whole.named_parameters(), resumed.parameters(), strict=True):
        assert torch.equal(a, b), name


def test_shipped_decoder_is_small_another_architecture_and_models_motion(example: SimpleNamespace) -> None:
    folder, video = FOLDER / "model", example.video
    assert sum(file.stat().st_size for file in folder.iterdir()) <= SIZE_LIMIT
    config = json.loads((folder / "config.json").read_text())
    expected = {"num_hidden_layers": 3, "num_attention_heads": 8, "num_key_value_heads": 2, "hidden_act": "gelu"}
    assert {key: config[key] for key in expected} == expected
    assert (config["model_type"], config["tokens_per_frame"], config["vocab_size"]) == ("qwen3", 101, 82)
    model = example.likelihood.load_decoder(folder)
    tokens = video.with_bos(video.tokenize(video.make_videos(8, example.likelihood.HELD_OUT_SEED + 2)))
    nll = float(example.likelihood.nll_by_frame(model, tokens, 101)[1:].mean())
    assert nll <= NLL_LIMIT
    assert nll < 0.12 * example.likelihood.copy_nll(tokens, 101, video.VOCAB_SIZE)
    built = example.train.build_model().config
    assert {key: getattr(built, key) for key in expected} == expected
