"""Files and counts of the study, and the code of examples/doom that it uses."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
DOOM = ROOT / "examples" / "doom"
sys.path[:0] = [str(DOOM), str(DOOM.parent)]  # the examples import their modules by plain names

import numpy as np  # noqa: E402
from autoencoder import Autoencoder, load_autoencoder  # noqa: E402
from common.worlds import load_decoder  # noqa: E402
from data import SHARD_FRAMES, SPLITS, record_split  # noqa: E402
from decoder import SCENARIOS, TokenSplit, load_tokens, tokenize_split  # noqa: E402
from world_format import CODES, TOKENS_PER_FRAME  # noqa: E402

import fastcar_compile as fc  # noqa: E402
from fastcar_compile.gates import GateWeights  # noqa: E402
from fastcar_compile.tune.calibrate import Setting  # noqa: E402

Say = Callable[[str], None]
COUNTED = (0, CODES)
"""Image tokens. An action token is given: it counts in no mean, and its forward replays like any."""

LIMITS = (1.05, 1.10)
"""NLL relative to dense that replay may cost."""

TARGETS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.65, 0.8)
RANDOM = (0.1, 0.3, 0.6)


@dataclass(frozen=True)
class Counts:
    """How much is trained and measured. The page names the counts of the results that it shows.

    Attributes:
        frames, prompt: frames of a sequence, and those of them that are read before decoding starts.
        calibration, held_out, unseen: sequences per scenario. One of `sequences.RICH` held-out ones shows shooting.
        precision: sequences per scenario for quantised decoders.
        train_frames, train_prompt: as `frames` and `prompt`, for training. batch: sequences per step.
        tas, learned, tuned: steps of the trainings.
        rollouts, rollout_frames: generated continuations, and their frames.
    """

    frames: int = 16
    prompt: int = 4
    calibration: int = 2
    held_out: int = 6
    unseen: int = 6
    precision: int = 2
    train_frames: int = 8
    train_prompt: int = 2
    batch: int = 4
    tas: int = 60
    learned: int = 150
    tuned: int = 120
    rollouts: int = 6
    rollout_frames: int = 64


TINY = Counts(8, 3, 1, 2, 2, 1, 5, 2, 2, 2, 2, 2, 2, 3)
"""Enough to see that every stage works."""


@dataclass(frozen=True)
class Variant:
    """A gate with what belongs to it.

    Attributes:
        name: in tables. gate: its registered name. trained: it has a file of weights.
    """

    name: str
    gate: str
    trained: bool = False

    @property
    def slug(self) -> str:
        """A name for files."""
        return self.name.replace(" ", "_").replace(",", "")


MEAN = Variant("tas, mean of heads", "tas")
HEADS = Variant("tas, trained heads", "tas", trained=True)
DELTA = Variant("input_delta", "input_delta")
LEARNED = Variant("learned", "learned", trained=True)
RANDOMLY = Variant("random", "random")


@dataclass(frozen=True)
class Decoder:
    """One of the two decoders.

    Attributes:
        name: in tables. folder: of its cases.json and its gates/. weights: folder of `save_pretrained`.
        variants: the gates that are calibrated for it. shipped: it is in the repository.
    """

    name: str
    folder: Path
    weights: Path
    variants: tuple[Variant, ...]
    shipped: bool = True

    def model(self) -> Any:
        """Return the model in float32, in evaluation mode."""
        return load_decoder(self.weights)

    def gate_file(self, gate: str) -> Path:
        """Return the path of a trained gate."""
        return self.folder / "gates" / f"{gate}.safetensors"

    def gate_weights(self) -> GateWeights:
        """Return the weights of gate `learned`."""
        return GateWeights.load(self.gate_file("learned"))

    def config(self, variant: Variant) -> fc.ReplayConfig:
        """Return a config of a gate, with its trained weights."""
        if variant.trained:
            return fc.TrainedGate.load(self.gate_file(variant.gate)).replay_config()
        return fc.ReplayConfig(gate=variant.gate)


@dataclass(frozen=True)
class Setup:
    """Everything that the stages share.

    Attributes:
        data: recorded and tokenised play. tokenizer: the autoencoder's file. world: folder of `export.py`.
        out: folder of gates and cases. work: journals, checkpoints, results, and the tuned decoder.
    """

    data: Path
    world: Path
    out: Path
    work: Path
    counts: Counts
    say: Say

    @property
    def dense(self) -> Decoder:
        """The decoder as it was trained."""
        return Decoder("trained", self.out, self.world / "decoder", (MEAN, HEADS, DELTA, LEARNED))

    @property
    def tuned(self) -> Decoder:
        """The decoder that was tuned together with its gate `learned`."""
        folder = self.work / "tuned"
        return Decoder("tuned", folder, folder / "decoder", (LEARNED,), shipped=False)

    @property
    def decoders(self) -> tuple[Decoder, ...]:
        """The decoders that there are."""
        return tuple(d for d in (self.dense, self.tuned) if (d.weights / "config.json").exists())

    @property
    def setting(self) -> Setting:
        """How the sequences of calibration and measurement are read."""
        return Setting(self.counts.prompt * TOKENS_PER_FRAME, COUNTED)

    def autoencoder(self) -> Autoencoder:
        """Return the tokenizer."""
        return load_autoencoder(self.world / "tokenizer.safetensors")

    def record(self, split: str) -> None:
        """Record and tokenise a split other than the training's, as examples/doom/data.py and train.py do."""
        frames = SHARD_FRAMES // (4 if split == "calibration" else 2)
        record_split(SPLITS[split], self.data, 1, frames)
        tokenize_split(self.autoencoder(), self.data, split)

    def tokens(self, split: str) -> TokenSplit:
        """Return the tokens of a split: of the decoder's own scenarios, where it has any."""
        chosen = None if split == "held_out_scenario" else SCENARIOS
        return load_tokens(self.data, split, chosen)

    def pixels(self) -> Callable[[np.ndarray], np.ndarray]:
        """Return what makes frames uint8 [N, frames, 64, 64, 3] of whole frames' tokens int64 [N, T]."""
        model = self.autoencoder()

        def frames(tokens: np.ndarray) -> np.ndarray:
            codes = tokens.reshape(-1, TOKENS_PER_FRAME)[:, 1:]
            made = model.decode(np.ascontiguousarray(codes))
            return made.reshape(len(tokens), -1, *made.shape[1:])

        return frames
