"""The game decoder as benchmarks/calibration.py takes it: its sequences are recorded where they are missing."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import fastcar_compile as fc
from fastcar_compile.tune.calibrate import Setting
from replay_doom.sequences import representative
from replay_doom.setup import DELTA, DOOM, LEARNED, LIMITS, MEAN, ROOT, Counts, Decoder, Setup
from replay_doom.stages import within

GATES = {variant.gate: variant for variant in (MEAN, DELTA, LEARNED)}


@dataclass(frozen=True)
class Played:
    """The decoder of examples/doom/world.

    Attributes:
        data: folder of recorded and tokenised play.
        judges: number of sequences that judge thresholds.
    """

    data: Path
    name: str = "doom"
    judges: int = 64

    @property
    def _setup(self) -> Setup:
        return Setup(self.data, DOOM / "world", DOOM, ROOT / "build" / "doom" / "quality", Counts(), print)

    @property
    def _decoder(self) -> Decoder:
        return self._setup.dense

    @property
    def folder(self) -> Path:
        """Folder of gates and cases."""
        return DOOM

    @property
    def setting(self) -> Setting:
        """How sequences are read: the first frames are a prompt, and actions do not count."""
        return self._setup.setting

    def model(self) -> Any:
        """Return the model, float32, in evaluation mode."""
        return self._decoder.model()

    def config(self, gate: str) -> fc.ReplayConfig:
        """Return a config of the gate, with the trained weights of `learned`; `tas` is the mean of the heads."""
        return self._decoder.config(GATES[gate])

    def calibration(self, count: int) -> np.ndarray:
        """Return sequences int64 [count, T] to calibrate on."""
        return self._sequences("calibration", count)

    def held_out(self) -> np.ndarray:
        """Return the sequences int64 [judges, T] that judge thresholds."""
        return self._sequences("held_out", self.judges)

    def _sequences(self, split: str, count: int) -> np.ndarray:
        self._setup.record(split)
        tokens, counts = self._setup.tokens(split), self._setup.counts
        return tokens.take(representative(tokens, count, counts.frames, counts.prompt), counts.frames)

    def shipped(self, gate: str, _target: float) -> tuple[str, float | None]:
        """Return the calibration and the target of the shipped case: of a gate, that within doom.md's greater limit."""
        return within(GATES[gate], LIMITS[-1]), None
