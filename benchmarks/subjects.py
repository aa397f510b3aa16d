"""The shipped decoders, with videos that neither they nor their gates have seen."""

import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pages import ROOT
from transformers import AutoModelForCausalLM

import fastcar_compile as fc
from fastcar_compile.gates import GateWeights
from fastcar_compile.tune.calibrate import Setting

EXAMPLES = ROOT / "examples"
DATA = ROOT / "build" / "doom" / "data"
HELD_OUT_SEED, CALIBRATION_SEED = 1, 2
"""Seeds of drawn videos. The decoders were trained on videos of seeds from 10 million on."""

HELD_OUT = 32
"""Drawn videos that judge."""

KINDS = ("still", "turning", "walking", "shooting")
"""Kinds of motion, as `examples/doom/game.py` numbers them."""

FRAMES, PROMPT = 16, 4
"""Frames of a sequence of play, and those of them that are read before decoding starts."""

EACH, RICH = 6, 3
"""Held-out sequences of each map. One of so many is chosen because it shows shooting, which is rare."""

JUDGES, CHOICES = 64, 200
"""Sequences of play that judge a calibration; random choices of which the most representative one is taken."""

DRAWN = ("moving_shapes", "bouncing_digits", "moving_shapes/tuned", "bouncing_digits/tuned")
GAME = ("doom", "doom/unseen")
"""The game decoder, on its own maps and on one that it has not seen."""

Videos = np.ndarray
Groups = dict[str, np.ndarray]


@dataclass(frozen=True)
class Subject:
    """A shipped decoder.

    Attributes:
        name: its folder in examples/, with gates/ and cases.json.
    """

    name: str

    @property
    def title(self) -> str:
        """Name in tables."""
        return self.name

    @property
    def setting(self) -> Setting:
        """How its videos are read."""
        return Setting()

    @property
    def folder(self) -> Path:
        """Folder of gates and cases."""
        return EXAMPLES / self.name

    @property
    def weights(self) -> Path:
        """Folder of `save_pretrained`."""
        return self.folder / "model"

    def model(self) -> Any:
        """Return the model, float32, in evaluation mode."""
        options: dict[str, Any] = {"local_files_only": True, "dtype": torch.float32}
        return AutoModelForCausalLM.from_pretrained(self.weights, **options).eval()

    def gate_weights(self) -> GateWeights:
        """Return the weights of gate `learned`."""
        return GateWeights.load(self.folder / "gates" / "learned.safetensors")

    def config(self, gate: str) -> fc.ReplayConfig:
        """Return a config of the gate, with its trained weights if it has any."""
        path = self.folder / "gates" / f"{gate}.safetensors"
        return fc.TrainedGate.load(path).replay_config() if path.exists() else fc.ReplayConfig(gate=gate)

    def measured(self) -> tuple[Videos, Groups]:
        """Return held-out videos int64 [N, T] that cases are measured on, and groups of their frames."""
        return self.held_out(), {}

    def shares(self) -> dict[str, float]:
        """Return kind of motion -> share of all recorded frames; nothing: all measured frames count alike."""
        return {}

    def held_out(self) -> Videos:
        """Return the videos int64 [N, T] that judge a calibration."""
        return self.drawn(HELD_OUT, HELD_OUT_SEED)

    def calibration(self, count: int) -> Videos:
        """Return videos int64 [count, T] to calibrate on."""
        return self.drawn(count, CALIBRATION_SEED)

    def detokenize(self) -> Callable[[Videos], np.ndarray]:
        """Return what makes frames of tokens."""
        return self._video().pixels

    def drawn(self, count: int, seed: int) -> Videos:
        """Return drawn videos int64 [count, T]."""
        video = self._video()
        return video.with_bos(video.tokenize(video.make_videos(count, seed)))

    def _video(self) -> Any:
        example = self.name.split("/")[0]  # "EXAMPLE/tuned" decodes EXAMPLE's videos
        spec = importlib.util.spec_from_file_location(f"{example}_video", EXAMPLES / example / "video.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module


@dataclass(frozen=True)
class Played(Subject):
    """The game decoder, on recorded play of its own maps or of a map that it has not seen.

    Attributes:
        data: folder of recorded and tokenised play. Splits that it lacks are recorded. split: what is measured.
    """

    data: Path = DATA
    split: str = "held_out"

    @property
    def title(self) -> str:
        """Name in tables."""
        return GAME[self.split != "held_out"]

    @property
    def setting(self) -> Setting:
        """A prompt of PROMPT frames. An action token is given: it counts in no mean, and its forward replays."""
        world = game_module("world_format")
        return Setting(PROMPT * world.TOKENS_PER_FRAME, (0, world.CODES))

    @property
    def weights(self) -> Path:
        """Folder of `save_pretrained`."""
        return self.folder / "world" / "decoder"

    def config(self, gate: str) -> fc.ReplayConfig:
        """Return a config of the gate; `tas` is the mean of the heads, as the paper has it."""
        return fc.ReplayConfig(gate=gate) if gate == "tas" else super().config(gate)

    def measured(self) -> tuple[Videos, Groups]:
        """Return evenly spaced sequences, some with shooting, and the frames of each kind of motion and map."""
        tokens = self.tokens(self.split)
        starts = spaced(tokens, EACH, FRAMES, RICH)
        return tokens.take(starts, FRAMES), groups_of(tokens, starts, FRAMES, PROMPT)

    def shares(self) -> dict[str, float]:
        """Return the shares of the kinds in the split: a third of the measured sequences were chosen for shooting."""
        counts = np.bincount(self.tokens(self.split).kinds, minlength=len(KINDS))
        return dict(zip(KINDS, (counts / counts.sum()).tolist(), strict=True))

    def held_out(self) -> Videos:
        """Return representative sequences of held-out play."""
        return self._representative(self.split, JUDGES)

    def calibration(self, count: int) -> Videos:
        """Return representative sequences of the calibration's play."""
        return self._representative("calibration", count)

    def _representative(self, split: str, count: int) -> Videos:
        tokens = self.tokens(split)
        return tokens.take(representative(tokens, count, FRAMES, PROMPT), FRAMES)

    def tokens(self, split: str) -> Any:
        """Return the tokens of a split as a `TokenSplit` of examples/doom, of the decoder's own maps if it has any."""
        data, decoder = game_module("data"), game_module("decoder")
        data.record_split(data.SPLITS[split], self.data, 1, data.SHARD_FRAMES // (4 if split == "calibration" else 2))
        decoder.tokenize_split(self._autoencoder(), self.data, split)
        return decoder.load_tokens(self.data, split, None if split == "held_out_scenario" else decoder.SCENARIOS)

    def detokenize(self) -> Callable[[Videos], np.ndarray]:
        """Return what makes frames uint8 [N, frames, 64, 64, 3] of whole frames' tokens int64 [N, T]."""
        decode, length = self._autoencoder().decode, game_module("world_format").TOKENS_PER_FRAME

        def frames(tokens: Videos) -> np.ndarray:
            made = decode(np.ascontiguousarray(tokens.reshape(-1, length)[:, 1:]))
            return made.reshape(len(tokens), -1, *made.shape[1:])

        return frames

    def _autoencoder(self) -> Any:
        return game_module("autoencoder").load_autoencoder(self.folder / "world" / "tokenizer.safetensors")


def game_module(name: str) -> Any:
    """Return a module of examples/doom, which import each other by plain names. They need the extra `doom`."""
    for folder in (EXAMPLES, EXAMPLES / "doom"):
        if str(folder) not in sys.path:
            sys.path.insert(0, str(folder))
    return import_module(name)


def subject_of(name: str, data: Path = DATA) -> Subject:
    """Return a shipped decoder; "doom/unseen" is the game decoder on a map that it has not seen."""
    if not name.startswith("doom"):
        return Subject(name)
    return Played("doom", data, "held_out_scenario" if name == GAME[1] else "held_out")


def scenario_of(split: Any, starts: np.ndarray) -> np.ndarray:
    """Return the scenario of each sequence."""
    return np.repeat(split.scenarios, np.diff(split.bounds, axis=1)[:, 0])[starts]


def spaced(split: Any, each: int, frames: int, rich: int = 0) -> np.ndarray:
    """Return the first frame of `each` sequences of every scenario, int64 [N], one scenario after the other.

    They are evenly spaced. The last one of `rich` is the one that shows most shooting instead, and overlaps no other.
    """
    every = split.sequences(frames)
    names, found = scenario_of(split, every), []
    for name in sorted(set(split.scenarios)):
        own = every[names == name]
        chosen = own[np.linspace(0, len(own) - 1, each).astype(np.int64)].tolist()
        for index in range(rich - 1, each, rich) if rich else ():
            chosen[index] = _shooting(split, own, chosen[:index] + chosen[index + 1 :], frames)
        found += chosen
    return np.array(found, np.int64)


def _shooting(split: Any, starts: np.ndarray, others: list[int], frames: int) -> int:
    """Return the sequence that shows most shooting and overlaps no other one."""
    shown = (split.kinds[starts[:, None] + np.arange(frames)] == KINDS.index("shooting")).sum(1)
    free = (np.abs(starts[:, None] - np.array(others)[None]) >= frames).all(1)
    return int(starts[np.argmax(np.where(free, shown, -1))])


def representative(split: Any, count: int, frames: int, prompt: int) -> np.ndarray:
    """Return the first frame of `count` sequences in which as many image tokens stay as in all play, int64 [N].

    Tokens that stay from frame to frame say most of how much a sequence replays, and cost nothing to count. As many
    sequences of each scenario; of CHOICES random ones, the choice whose mean is nearest to that of the scenario.
    """
    every = np.concatenate([np.arange(first, end - frames + 1, frames) for first, end in split.bounds])
    names, scenarios, random = scenario_of(split, every), sorted(set(split.scenarios)), np.random.default_rng(0)
    found = list[np.ndarray]()
    for place, name in enumerate(scenarios):
        own = every[names == name]
        tokens = split.tokens[own[:, None] + np.arange(prompt, frames)][:, :, 1:]
        stays = (tokens[:, 1:] == tokens[:, :-1]).mean((1, 2))
        number = (count + len(scenarios) - 1 - place) // len(scenarios)
        draws = [random.permutation(len(own))[:number] for _ in range(CHOICES)]
        best = min(draws, key=lambda chosen: abs(float(stays[chosen].mean() - stays.mean())))
        found.append(own[np.sort(best)])
    return np.concatenate(found)


def groups_of(split: Any, starts: np.ndarray, frames: int, prompt: int) -> dict[str, np.ndarray]:
    """Return kind of motion or scenario -> the decoded frames that show it, bool [N, frames - prompt].

    A group without a frame after the first decoded one is left out, and so is the scenario where there is only one.
    """
    kinds = split.kinds[starts[:, None] + np.arange(prompt, frames)]
    found = {name: kinds == index for index, name in enumerate(KINDS)}
    names = scenario_of(split, starts)
    if len(set(names)) > 1:
        found |= {name: np.repeat(names == name, frames - prompt).reshape(kinds.shape) for name in sorted(set(names))}
    return {name: shown for name, shown in found.items() if shown[:, 1:].any()}
