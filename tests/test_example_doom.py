"""The doom example: recording, tokenizer, training that goes on, rollouts, and the files that a world consists of."""

import importlib
import math
import re
import sys
import tomllib
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from conftest import check_module, imported
from transformers import Qwen3Config, Qwen3ForCausalLM

EXAMPLES = Path(__file__).parents[1] / "examples"
FOLDER = EXAMPLES / "doom"
NAMES = (
    "common.worlds", "common.world_files", "common.rollout", "common.strips", "common.progress", "world_format", "data",
    "autoencoder", "decoder", "measure", "report", "train", "export",
)  # fmt: skip


@pytest.fixture(scope="module")
def example() -> Iterator[SimpleNamespace]:
    """The example's modules, imported as its own scripts import them."""
    check_module("vector_quantize_pytorch")
    with imported([FOLDER, EXAMPLES], NAMES) as modules:
        yield modules


def tiny() -> Qwen3ForCausalLM:
    """A decoder of the example's vocabulary and window kind, small enough for a test."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=1024, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, max_position_embeddings=4096, use_sliding_window=True,
        sliding_window=1040, layer_types=["sliding_attention"] * 2, eos_token_id=None, bos_token_id=None,
    )  # fmt: skip
    return Qwen3ForCausalLM(config).eval()


def tiny_split(example: SimpleNamespace) -> object:
    """Two episodes of 20 frames that use few codes."""
    rng = np.random.default_rng(0)
    tokens = example.decoder.frame_tokens(rng.integers(0, 10, 40).astype(np.uint8), rng.integers(0, 3, (40, 64)))
    bounds = np.array([[0, 20], [20, 40]])
    return example.decoder.TokenSplit(tokens, bounds, np.zeros(40, np.uint8), ("a", "b"))


def test_world_toml_names_every_token_and_button(example: SimpleNamespace) -> None:
    world, format_ = tomllib.loads(example.export.world_toml().text()), example.world_format
    assert math.prod(format_.LEVELS) == world["image"]["count"] == format_.CODES
    assert math.prod(world["image"]["grid"]) + 1 == world["tokens_per_frame"]
    tokens = [action["token"] for action in world["actions"]]
    assert tokens == list(range(format_.CODES, format_.CODES + len(tokens)))
    assert tokens[-1] < format_.VOCAB_SIZE
    used = [button for action in world["actions"] for button in action["buttons"]]
    assert set(used) == set(world["buttons"])
    keys = [key for pressed in world["buttons"].values() for key in pressed]
    assert len(keys) == len(set(keys))


def test_an_episode_repeats_and_its_frames_show_what_they_are_called(
    example: SimpleNamespace, require_module: Callable[[str], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    require_module("vizdoom")
    monkeypatch.chdir(tmp_path)  # the game makes a folder where it is started
    game = importlib.import_module("game")
    assert set(example.data.SPLITS["held_out_scenario"].scenarios) == {game.HELD_OUT}
    assert game.HELD_OUT not in game.TRAINING
    shard = example.data.record_shard("my_way_home", 7, 60)
    again = game.episodes("my_way_home", 7, example.data.LONGEST)
    first, end = next(shard.bounds())
    np.testing.assert_array_equal(next(again).frames[: end - first], shard.frames[first:end])
    again.close()
    assert shard.frames.shape[1:] == (64, 64, 3)
    assert len(shard.frames) == len(shard.actions) == len(shard.kinds) >= 60
    change = np.abs(np.diff(shard.frames.astype(float), axis=0)).mean((1, 2, 3))
    within = np.isin(np.arange(1, len(shard.kinds)), shard.starts, invert=True)
    moving = np.isin(shard.kinds[1:], (game.TURNING, game.WALKING))
    assert change[moving & within].mean() > 1.0
    example.data.save_shard(shard, tmp_path / "s.safetensors")
    loaded = example.data.load_shard(tmp_path / "s.safetensors")
    np.testing.assert_array_equal(loaded.frames, shard.frames)
    assert loaded.scenario == "my_way_home"


@pytest.mark.thorough  # an export that is done once, for the shipped file
def test_pixels_onnx_is_the_tokenizers_decoder(example: SimpleNamespace, tmp_path: Path) -> None:
    onnxruntime: Any = importlib.import_module("onnxruntime")  # it has no types
    torch.manual_seed(0)
    model = example.autoencoder.Autoencoder().eval()
    frames = np.random.default_rng(0).integers(0, 256, (3, 64, 64, 3), dtype=np.uint8)
    codes = model.encode(frames)
    assert codes.shape == (3, 64)
    assert 0 <= codes.min() < codes.max() < example.world_format.CODES
    example.world_files.write_pixels(example.export.TokensToFrames(model), (8, 8), tmp_path / "pixels.onnx")
    for file in (tmp_path / "pixels.onnx", FOLDER / "world" / "pixels.onnx"):
        assert re.findall(rb"[^\0]{0,40}(?:\.py\b|/work/|/home/)", file.read_bytes()) == [], "paths of a machine"
    session = onnxruntime.InferenceSession(tmp_path / "pixels.onnx")
    made = session.run(None, {"tokens": codes.reshape(3, 8, 8)})[0]
    assert (made.dtype, made.shape) == (np.uint8, frames.shape)
    assert np.abs(made.astype(int) - model.decode(codes)).max() <= 1, "a value near the middle may round another way"


def test_targets_are_image_tokens_after_the_first_frame(example: SimpleNamespace) -> None:
    tokens = torch.from_numpy(tiny_split(example).take(np.array([0, 3]), 16))  # pyright: ignore[reportAttributeAccessIssue]
    targets = example.decoder.WORLD.targets_of(tokens)
    assert (targets == example.worlds.IGNORED).sum(1).tolist() == [64 + 15, 64 + 15]
    counted = targets != example.worlds.IGNORED
    assert torch.equal(targets[counted], tokens[:, 1:][counted])


def test_training_lowers_the_loss_and_goes_on_from_a_checkpoint(
    example: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worlds = example.worlds
    monkeypatch.setattr(worlds, "WARM_UP_STEPS", 2)
    monkeypatch.setattr(worlds, "AVERAGE", 0.5)
    monkeypatch.setattr(worlds.Trainer, "learning_rate", lambda self, step: self.plan.rate)
    monkeypatch.setattr(sys.modules["common.training"], "SAVE_SECONDS", 0.0)
    split = tiny_split(example)

    def trained(steps: int, name: str) -> Qwen3ForCausalLM:
        plan = Namespace(steps=steps, cooldown=2, batch=2, frames=3, rate=2e-2, every=4, seed=0, out=tmp_path / name)
        trainer = worlds.Trainer(tiny, example.decoder.WORLD, plan)
        trainer.run(split, split, example.progress.Log(tmp_path / f"{name}.jsonl", trainer.first))
        return trainer.averaged()

    whole = trained(8, "whole")
    trained(4, "part")
    resumed = trained(8, "part")
    entries = example.progress.read_log(tmp_path / "part.jsonl")
    assert [entry["step"] for entry in entries] == [4, 8]
    assert entries[1]["held_out_nll"] < entries[0]["held_out_nll"] < math.log(1024)
    for (name, a), b in zip(whole.named_parameters(), resumed.parameters(), strict=True):
        assert torch.equal(a, b), name
