"""Measurement of one case on held-out videos: likelihood, agreement, frames, and where it replayed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fastcar_compile.config import ReplayConfig
from fastcar_compile.errors import InputError
from fastcar_compile.ir.program import DecoderProgram
from fastcar_compile.tune.calibrate import Setting, rules_of
from fastcar_compile.tune.evaluate.cases import Case
from fastcar_compile.tune.evaluate.frames import Detokenize, Likeness, likeness, to_frames
from fastcar_compile.tune.evaluator import Evaluator
from fastcar_compile.tune.rule import Details, Rules


@dataclass(frozen=True)
class Result:
    """A measured case. Every token is predicted from the true past (teacher-forced).

    Attributes:
        row: JSON-safe values; docs/measurements/quality.md explains them.
        places: float64 [L, frames, F], share of the videos whose forward t = frame * F + place replayed.
        predicted: int64 [N, frames * F], the most likely symbols; where a token does not count, the true one.
    """

    row: dict[str, Any]
    places: np.ndarray
    predicted: np.ndarray


@dataclass(frozen=True)
class HeldOut:
    """What cases are measured on.

    Attributes:
        videos: int64 [N, T], prompt included, not those that thresholds come from.
        groups: name -> frames that are measured apart too, bool [N, frames], whole frames after the prompt. The first
            frame never replays and counts nowhere.
    """

    videos: np.ndarray
    setting: Setting
    groups: Mapping[str, np.ndarray] = field(default_factory=dict)


class Judge:
    """Measures cases on the same videos.

    Args:
        program: with a prefill graph. decoder: its name in the rows. detokenize: None: no frames.

    Raises:
        InputError: the videos do not fit the program, or a group does not fit the videos.
    """

    def __init__(self, program: DecoderProgram, held_out: HeldOut, decoder: str, detokenize: Detokenize | None) -> None:
        self._program, self._held_out, self._decoder = program, held_out, decoder
        self._frame, self._layers = program.config.tokens_per_frame, program.config.num_layers
        self._evaluator: tuple[Any, Evaluator] | None = None  # the last one: cases of one gate share their prompts
        self.dense = self._details(Case("dense"))
        self.frames = self.dense.losses.shape[1] // self._frame
        self._masks = {name: self._mask(name, frames) for name, frames in held_out.groups.items()}
        self._detokenize = detokenize
        whole = self._whole(torch.from_numpy(held_out.videos)[:, held_out.setting.prompt :])
        self.truth = None if detokenize is None else self.pixels(whole.numpy())
        # The first frame never replays, so no figure counts it.
        everything = torch.ones_like(self.dense.counted)
        everything[:, : self._frame] = False
        self._everything = everything
        self._dense_nll = self._mean(self.dense.losses, everything)

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
            "nll": self._mean(found.losses, self._everything),
            "nll_dense": self._dense_nll,
            "nll_by_frame": self._by_frame(found.losses),
            "token_agreement": self._mean(agreement, self._everything),
            "token_agreement_by_frame": self._by_frame(agreement),
        }
        made = self._tokens(found)
        like = None if self.truth is None else likeness(self.pixels(made), self.truth)
        row |= self._pictures(like)
        if self._masks:
            row["groups"] = {name: self._group(found, like, name) for name in self._masks}
        return Result(plain(row), self._places(found), made)

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
        # Thresholds are no part of the key: the evaluator shares prompts between thresholds of one gate.
        kept = (None if case.replay is None else case.replay.model_copy(update={"threshold": None}), case.attention)
        if self._evaluator is None or self._evaluator[0] != kept:
            setting = self._held_out.setting
            options: dict[str, Any] = {"attend": case.attention, "counted": setting.counted}
            made = Evaluator(self._program, self._held_out.videos, rules, setting.prompt, **options)
            self._evaluator = kept, made
        return self._evaluator[1].details(thresholds)

    def _mask(self, name: str, frames: np.ndarray) -> Tensor:
        """Return which tokens of whole frames a group has, bool [N, n], without the first frame."""
        expected = (len(self._held_out.videos), self.frames)
        if frames.dtype != bool or frames.shape != expected:
            what = f"group {name!r} is {frames.dtype} {list(frames.shape)}, expected bool {list(expected)}"
            raise InputError(what, hint="say of each whole frame after the prompt whether it is in the group")
        if not frames[:, 1:].any():
            raise InputError(f"group {name!r} has no frame after the first one", hint="leave it out")
        mask = torch.zeros_like(self.dense.counted)
        self._whole(mask)[:] = torch.from_numpy(frames).repeat_interleave(self._frame, 1)
        mask[:, : self._frame] = False
        return mask

    def _group(self, found: Details, like: Likeness | None, name: str) -> dict[str, Any]:
        """Return the figures of a group's frames."""
        mask, shown = self._masks[name], self._held_out.groups[name].copy()
        shown[:, 0] = False
        forwards = mask[:, : found.replayed.shape[2]].expand_as(found.replayed)
        values: dict[str, Any] = {
            "frames": int(shown.sum()),
            "replay_ratio": float(found.replayed[forwards].double().mean()),
            "replay_by_layer": [float(layer[mask[:, : layer.shape[1]]].double().mean()) for layer in found.replayed],
            "nll": self._mean(found.losses, mask),
            "nll_dense": self._mean(self.dense.losses, mask),
            "token_agreement": self._mean((found.predicted == self.dense.predicted).double(), mask),
        }
        if like is not None:
            values |= {"psnr": like.of(shown).psnr, "ssim": like.of(shown).ssim}
        return values

    def _mean(self, values: Tensor, mask: Tensor) -> float:
        """Return the mean of values [N, n] at the tokens of a mask that count; infinity if it is not finite."""
        mean = float(values[mask & self.dense.counted].double().mean())
        return mean if math.isfinite(mean) else math.inf

    def _whole(self, values: Tensor) -> Tensor:
        return values[:, : self.frames * self._frame]

    def _by_frame(self, values: Tensor) -> list[float]:
        """Return the mean of values [N, n] for each whole frame, with the first."""
        counted = self.dense.counted.double()
        sums, numbers = (
            self._whole(part).reshape(len(part), self.frames, self._frame).sum((0, 2))
            for part in (torch.where(self.dense.counted, values.double(), 0.0), counted)
        )
        return (sums / numbers).tolist()

    def _tokens(self, found: Details) -> np.ndarray:
        """Return the most likely symbols of whole frames. Where a token does not count, it is the true one."""
        truth = torch.from_numpy(self._held_out.videos)[:, self._held_out.setting.prompt :]
        return self._whole(torch.where(found.counted, found.predicted, truth)).numpy()

    def _pictures(self, like: Likeness | None) -> dict[str, Any]:
        """Return PSNR and SSIM of the most likely symbols' frames against the true ones, from the second frame on."""
        if like is None:
            return {"psnr": None, "ssim": None, "psnr_by_frame": None}
        every = slice(None)
        by_frame = [like.of((every, slice(i, i + 1))).psnr for i in range(1, self.frames)]
        after = like.of((every, slice(1, None)))
        return {"psnr": after.psnr, "ssim": after.ssim, "psnr_by_frame": [None, *by_frame]}

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
