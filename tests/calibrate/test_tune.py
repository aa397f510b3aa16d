"""Fine-tuning for replay: what it changes, what it gains, and both training commands."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from drawn_videos import FRAME, LENGTH, sharp_decoder, videos
from transformers import AutoModelForCausalLM, LlamaForCausalLM
from typer.testing import CliRunner

import fastcar_compile as fc
from fastcar_compile.cli import app
from fastcar_compile.errors import InputError
from fastcar_compile.tune.training.relaxed import RelaxedDecoder
from fastcar_compile.tune.training.train import TunedDecoder

from .conftest import interrupted_and_resumed

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def some(decoder: LlamaForCausalLM) -> np.ndarray:
    return videos(decoder, 192, 1)


def tune(model: LlamaForCausalLM, tokens: np.ndarray, **options: Any) -> TunedDecoder:
    given: dict[str, Any] = {"target_replay": 0.7, "batch": 16, "units": 4} | options
    return fc.tune_decoder(model, tokens, **given)


@pytest.fixture(scope="module")
def tuned(decoder: LlamaForCausalLM, some: np.ndarray) -> TunedDecoder:
    return tune(decoder, some[64:], steps=48, rate=3e-3)


@pytest.mark.thorough  # a result of training; the mechanics are tested beside it
def test_a_tuned_decoder_loses_less_by_replay(decoder: LlamaForCausalLM, some: np.ndarray, tuned: TunedDecoder) -> None:
    """On videos of neither training. The frozen decoder has a gate that was trained as long."""
    gate = fc.train_gate(decoder, some[64:], target_replay=0.7, batch=16, units=4, steps=48)
    frozen = fc.calibrate(decoder, some[:64], replay=gate.replay_config(), target_replay=0.7)
    found = fc.calibrate(tuned.model, some[:64], replay=tuned.gate.replay_config(), target_replay=0.7)
    assert found.replay >= 0.7
    assert found.nll < 0.7 * frozen.nll
    assert found.nll_dense < 1.4 * frozen.nll_dense, "it drew the videos itself: it can only get worse"


def test_only_the_copy_changes_and_it_is_what_was_trained(some: np.ndarray) -> None:
    model = sharp_decoder(tie_word_embeddings=True)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    found = tune(model, some[:16], steps=2)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name
    changed = dict(found.model.named_parameters())
    assert all(not torch.equal(weight, before[name]) for name, weight in changed.items())
    tuned = cast("LlamaForCausalLM", found.model)
    assert tuned.lm_head.weight is tuned.get_input_embeddings().weight
    assert not found.model.training


def test_the_weights_that_are_trained_are_those_of_the_copy(decoder: LlamaForCausalLM, some: np.ndarray) -> None:
    tokens = torch.from_numpy(some[:3, :-1])
    relaxed = RelaxedDecoder(decoder, 3, LENGTH, FRAME)
    weights = relaxed.own_weights()
    assert sorted(weights) == sorted(name for name, _ in decoder.named_parameters())
    copy = sharp_decoder()
    with torch.no_grad():
        for number, (name, weight) in enumerate(weights.items()):
            weight.mul_(1 + 0.01 * number)
            dict(copy.named_parameters())[name].copy_(weight)
        torch.testing.assert_close(relaxed.dense(tokens), copy(tokens, use_cache=False).logits, rtol=1e-3, atol=1e-3)
    relaxed.dense(tokens).square().mean().backward()
    assert all(weight.grad is not None and float(weight.grad.abs().max()) > 0 for weight in weights.values())


def test_tuning_goes_on_from_a_gate(decoder: LlamaForCausalLM, some: np.ndarray) -> None:
    gate = fc.train_gate(decoder, some[:16], target_replay=0.7, batch=16, units=4, steps=3)
    found = tune(decoder, some[:16], steps=1, start=gate, rate=1e-9)
    for before, after in zip(gate.layers, found.gate.layers, strict=True):
        torch.testing.assert_close(after["w1"], before["w1"], rtol=0.05, atol=0.05)
    assert found.gate.inputs != gate.inputs


def test_an_interrupted_tuning_goes_on(decoder: LlamaForCausalLM, some: np.ndarray, tmp_path: Path) -> None:
    one = partial(tune, decoder, some[:16])
    resumed, whole = interrupted_and_resumed(one, tmp_path / "state.safetensors"), one(steps=13)
    assert resumed.gate.facts() == whole.gate.facts()
    for (name, weight), other in zip(resumed.model.named_parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(weight, other), name


def test_no_rate(decoder: LlamaForCausalLM, some: np.ndarray) -> None:
    with pytest.raises(InputError) as caught:
        tune(decoder, some[:16], rate=0.0)
    assert (caught.value.what, caught.value.hint) == ("rate is 0", "give a number above 0")


@pytest.fixture(scope="module")
def fastcar(
    decoder: LlamaForCausalLM, some: np.ndarray, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Callable[..., tuple[int, str]]]:
    """A folder with a decoder and videos, and the command line in it."""
    folder = tmp_path_factory.mktemp("commands")
    decoder.save_pretrained(folder / "decoder")
    np.save(folder / "videos.npy", some[:32])

    def run(name: str, *words: object) -> tuple[int, str]:
        given = ["--videos", folder / "videos.npy", "--target-replay", 0.5, "--units", 4, "--batch", 16, *words]
        outcome = CliRunner().invoke(app, [name, *(str(w) for w in given)])
        return outcome.exit_code, outcome.stdout

    return folder, run


def test_the_commands(fastcar: tuple[Path, Callable[..., tuple[int, str]]]) -> None:
    """A gate is trained, the decoder is tuned from it, and both are compiled."""
    folder, run = fastcar
    code, text = run("train-gate", folder / "decoder", "-o", folder / "gate.safetensors", "--steps", 2)
    assert code == 0
    assert text.startswith("gate    learned, written to ")
    words = (folder / "decoder", "-o", folder / "tuned", "--steps", 2, "--start", folder / "gate.safetensors")
    code, text = run("tune-decoder", *words, "--json")
    assert code == 0
    gate = fc.TrainedGate.load(folder / "tuned" / "gate.safetensors")
    assert json.loads(text)["replay"] == pytest.approx(gate.replay)
    assert sorted(path.name for path in folder.iterdir()) == ["decoder", "gate.safetensors", "tuned", "videos.npy"]
    model = AutoModelForCausalLM.from_pretrained(folder / "tuned" / "model", local_files_only=True)
    before = AutoModelForCausalLM.from_pretrained(folder / "decoder", local_files_only=True)
    assert model.config.tokens_per_frame == FRAME
    assert not torch.equal(model.lm_head.weight, before.lm_head.weight)
    code, text = run("tune-decoder", *words, "--json")
    assert code == 2
    assert json.loads(text)["error"]["message"] == "the output exists already"


@pytest.mark.parametrize("name", ["train-gate", "tune-decoder"])
def test_a_missing_start(fastcar: tuple[Path, Callable[..., tuple[int, str]]], name: str) -> None:
    folder, run = fastcar
    code, text = run(name, folder / "decoder", "-o", folder / "new", "--start", folder / "none", "--json")
    assert code == 2
    assert json.loads(text)["error"]["message"] == "the gate does not exist"
    assert not (folder / "new").exists()
