"""Measurement of one case on held-out videos: likelihood, agreement, frames, and where it replayed."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fastcar_compile.calibration.calibrate import rules_of
from fastcar_compile.calibration.evaluator import Details, Evaluator, Rules
from fastcar_compile.config import ReplayConfig
from fastcar_compile.errors import InputError
from fastcar_compile.evaluate.cases import Case
from fastcar_compile.evaluate.frames import Detokenize, psnr, ssim, to_frames
from fastcar_compile.ir.program import DecoderProgram


@dataclass(frozen=True)
class Result:
    """A measured case. Every token is predicted from the true past (teacher-forced).

    Attributes:
        row: JSON-safe values; docs/measurements/quality.md explains them.
        places: float64 [L, frames, F], share of the videos whose forward t = frame * F + place replayed.
        predicted: int64 [N, frames * F], the most likely symbols.
    """

    row: dict[str, Any]
    places: np.ndarray
    predicted: np.ndarray


class Judge:
    """Measures cases on the same videos.

    Args:
        program: with a prefill graph. videos: int64 [N, T], prompt included, not those that thresholds come from.
        decoder: its name in the rows. prompt: tokens before decoding starts. detokenize: None: no frames.

    Raises:
        InputError: the videos do not fit the program.
    """

    def __init__(
        self, program: DecoderProgram, videos: np.ndarray, decoder: str, prompt: int, detokenize: Detokenize | None
    ) -> None:
        self._program, self._videos, self._prompt, self._decoder = program, videos, prompt, decoder
        self._frame, self._layers = program.config.tokens_per_frame, program.config.num_layers
        self.dense = self._details(Case("dense"))
        self.frames = self.dense.losses.shape[1] // self._frame
        self._detokenize = detokenize
        whole = videos[:, prompt : prompt + self.frames * self._frame]
        self.truth = None if detokenize is None else self.pixels(whole)
        self._dense_nll = self._nll(self.dense.losses)

    def measure(self, case: Case) -> Result:
        """Return the result of one case."""
        found = self.dense if case == Case("dense") else self._details(case)
        able = found.replayed[..., self._frame :].double()
        agreement = (found.predicted == self.dense.predicted).double()
        row: dict[str, Any] = {
            "decoder": self._decoder,
            "gate": case.gate,
            "calibration": case.calibration,
            "sparse_attention": "none" if case.attention is None else str(case.attention),
            "target_replay": case.target,
            "replay_ratio": float(able.mean()),
            "replay_ratio_all_forwards": float(found.replayed.double().mean()),
            "replay_by_layer": able.mean((1, 2)).tolist(),
            "thresholds": None if case.replay is None else case.replay.to_json()["threshold"],
            "max_chain": None if case.replay is None else case.replay.max_chain,
            "refresh_every": None if case.replay is None else case.replay.refresh_every,
            "nll": self._nll(found.losses),
            "nll_dense": self._dense_nll,
            "nll_by_frame": self._by_frame(found.losses).tolist(),
            "token_agreement": float(agreement[:, self._frame :].mean()),
            "token_agreement_by_frame": self._by_frame(agreement).tolist(),
        }
        row |= self._pictures(found)
        return Result(plain(row), self._places(found), self._whole(found.predicted).numpy())

    def pixels(self, tokens: np.ndarray) -> np.ndarray:
        """Return tokens int64 [N, frames * F] as float64 [N, frames, height, width, channels] from 0 to 1.

        Raises:
            InputError: there is no detokeniser, or it gave another shape or other values.
        """
        if self._detokenize is None:
            raise InputError("there is no detokeniser", hint="give one")
        return to_frames(self._detokenize, tokens, self.frames)

    def _details(self, case: Case) -> Details:
        rules = closed_rules(self._layers) if case.replay is None else rules_of(case.replay, self._layers)
        thresholds = (None,) * self._layers if case.replay is None else case.replay.thresholds(self._layers)
        evaluator = Evaluator(self._program, self._videos, rules, self._prompt, case.attention)
        return evaluator.details(thresholds)

    def _nll(self, losses: Tensor) -> float:
        """Return the mean loss after the first frame, with an incomplete last frame; infinity if it is not finite."""
        mean = float(losses[:, self._frame :].double().mean())
        return mean if math.isfinite(mean) else math.inf

    def _whole(self, values: Tensor) -> Tensor:
        return values[:, : self.frames * self._frame]

    def _by_frame(self, values: Tensor) -> Tensor:
        """Return the mean of values [N, n] for each whole frame, with the first."""
        return self._whole(values).double().reshape(len(values), self.frames, self._frame).mean((0, 2))

    def _pictures(self, found: Details) -> dict[str, Any]:
        """Return PSNR and SSIM of the most likely symbols' frames against the true ones, from the second frame on."""
        if self.truth is None:
            return {"psnr": None, "ssim": None, "psnr_by_frame": None}
        made = self.pixels(self._whole(found.predicted).numpy())
        by_frame = [psnr(made[:, i], self.truth[:, i]) for i in range(1, self.frames)]
        after = slice(1, None)
        return {
            "psnr": psnr(made[:, after], self.truth[:, after]),
            "ssim": ssim(made[:, after], self.truth[:, after]),
            "psnr_by_frame": [None, *by_frame],
        }

    def _places(self, found: Details) -> np.ndarray:
        """Return `Result.places`. The last forward of the last frame never runs, so its place is NaN."""
        shares = found.replayed.double().mean(1)
        missing = -shares.shape[1] % self._frame
        padded = torch.nn.functional.pad(shares, (0, missing), value=math.nan)
        return padded.reshape(self._layers, -1, self._frame).numpy()


def plain(value: Any) -> Any:
    """Return JSON-safe values: an infinity becomes the text "inf"."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [plain(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def closed_rules(layers: int) -> Rules:
    """Return the rules of a decoder that never replays."""
    return rules_of(ReplayConfig(gate="never"), layers)
