"""The shipped decoders of docs/measurements/quality.md, and how their gates are trained and calibrated."""

import importlib.util
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

import fastcar_compile as fc
from fastcar_compile.gates import GateWeights
from fastcar_compile.tune.calibrate import Setting
from fastcar_compile.tune.evaluate import SinkWindow

ROOT = Path(__file__).parents[2]
HELD_OUT_SEED, CALIBRATION_SEED, TRAINING_SEED = 1, 2, 3
"""Seeds of videos. The decoders were trained on videos of seeds from 10 million on."""

HELD_OUT, BATCH = 32, 4
RATIOS = (0.5, 0.8, 0.85)

MARGINS = {"input_delta": 0.0, "tas": 0.06, "learned": 0.12}
"""Gate -> relative margin on the share that computes when its thresholds are chosen: new videos may compute more."""


@dataclass(frozen=True)
class Round:
    """One round of training, with BATCH videos per step.

    Attributes:
        target: share of the forwards t >= F to replay. softness: used after the first round.
        rate: of the decoder's own weights, when they are tuned with the gate; 0 freezes them.
    """

    steps: int
    target: float
    softness: float = 0.5
    rate: float = 0.0


@dataclass(frozen=True)
class Decoder:
    """A shipped decoder.

    Attributes:
        name: its folder in examples/; "EXAMPLE/tuned" is EXAMPLE's decoder, tuned for replay.
        windows: attention windows to compare with and without replay.
        calibration_videos: number of videos that thresholds are chosen on.
        training: gate -> the rounds of its training.
        from_heads: the training of `tas` starts from heads chosen one by one.
        grid: gate -> the replay ratios that it is calibrated for and measured at.
    """

    name: str
    windows: tuple[SinkWindow, ...]
    calibration_videos: int
    training: dict[str, tuple[Round, ...]]
    from_heads: bool = False
    grid: dict[str, tuple[float, ...]] = field(default_factory=lambda: dict.fromkeys(MARGINS, RATIOS))

    @property
    def folder(self) -> Path:
        """Folder of model, gates and cases."""
        return ROOT / "examples" / self.name

    @property
    def ratios(self) -> list[float]:
        """All replay ratios of the grid."""
        return sorted({ratio for ratios in self.grid.values() for ratio in ratios})

    @property
    def example(self) -> str:
        """The example whose videos it decodes."""
        return self.name.split("/")[0]

    @property
    def tuned(self) -> bool:
        """Whether it was tuned for replay."""
        return self.name != self.example

    def model(self) -> Any:
        """Return the model, float32, in evaluation mode."""
        return AutoModelForCausalLM.from_pretrained(
            self.folder / "model", local_files_only=True, dtype=torch.float32
        ).eval()

    def video(self) -> Any:
        """Return the module of the example's video.py."""
        folder = ROOT / "examples" / self.example
        spec = importlib.util.spec_from_file_location(f"{self.example}_video", folder / "video.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    def videos(self, count: int, seed: int) -> np.ndarray:
        """Return videos int64 [count, T], BOS first."""
        video = self.video()
        return video.with_bos(video.tokenize(video.make_videos(count, seed)))

    @property
    def setting(self) -> Setting:
        """How videos are read when thresholds are chosen."""
        return Setting()

    def calibration(self, count: int) -> np.ndarray:
        """Return videos int64 [count, T] to calibrate on."""
        return self.videos(count, CALIBRATION_SEED)

    def held_out(self) -> np.ndarray:
        """Return the videos int64 [HELD_OUT, T] that judge thresholds."""
        return self.videos(HELD_OUT, HELD_OUT_SEED)

    def shipped(self, _gate: str, target: float) -> tuple[str, float | None]:
        """Return the calibration and the target of the case whose thresholds are shipped for a target."""
        return "calibrated", target

    def gate_file(self, gate: str) -> Path:
        """Return the path of a trained gate."""
        return self.folder / "gates" / f"{gate}.safetensors"

    @property
    def hindsight_file(self) -> Path:
        """Results of the best decisions. The file is missing where a gate reaches the goals."""
        return self.folder / "hindsight.json"

    def weights(self) -> GateWeights:
        """Return the weights of gate `learned`."""
        return GateWeights.load(self.gate_file("learned"))

    def config(self, gate: str) -> fc.ReplayConfig:
        """Return a config of the gate, with trained weights if it has any."""
        if gate in self.training:
            return fc.TrainedGate.load(self.gate_file(gate)).replay_config()
        return fc.ReplayConfig(gate=gate)


DECODERS = (
    Decoder(
        "moving_shapes",
        (SinkWindow(256, 16), SinkWindow(640, 16)),
        16,
        {
            "learned": (
                Round(110, 0.82),
                Round(80, 0.83),
                Round(40, 0.82, 0.15),
                Round(150, 0.87, 0.4),
                Round(200, 0.865, 0.25),
                Round(160, 0.86, 0.15),
            ),
            "tas": (Round(80, 0.52),),
        },
    ),
    Decoder(
        "bouncing_digits",
        (SinkWindow(101, 16), SinkWindow(256, 16)),
        32,
        {
            "learned": (Round(320, 0.82), Round(100, 0.82), Round(100, 0.82)),
            "tas": (Round(120, 0.52),),
        },
        from_heads=True,
    ),
)


TUNED_GRID = {"tas": (0.5, 0.8), "learned": (*RATIOS, 0.9)}
TUNED = (
    replace(
        DECODERS[0],
        name="moving_shapes/tuned",
        calibration_videos=32,
        training={"learned": (Round(400, 0.9, rate=1e-3),), "tas": (Round(80, 0.52), Round(60, 0.52, 0.3))},
        grid=TUNED_GRID,
    ),
    replace(
        DECODERS[1],
        name="bouncing_digits/tuned",
        training={"learned": (Round(600, 0.9, rate=1e-3),), "tas": (Round(100, 0.52), Round(60, 0.52, 0.3))},
        from_heads=False,
        grid=TUNED_GRID,
    ),
)
DECODERS += TUNED
BY_NAME = {decoder.name: decoder for decoder in DECODERS}
