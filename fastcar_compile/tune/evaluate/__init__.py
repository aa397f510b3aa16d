"""Quality measurements: gates, replay ratios, thresholds and sparse attention against the dense decoder."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from fastcar_compile.config import ReplayConfig
from fastcar_compile.errors import InputError
from fastcar_compile.ir.program import DecoderProgram
from fastcar_compile.runtime.compiled import Artifact
from fastcar_compile.support.strict_json import read_json
from fastcar_compile.support.values import reporter, token_range
from fastcar_compile.tune.calibrate import Setting, program_key, program_of, search_of
from fastcar_compile.tune.evaluate.cases import CALIBRATIONS, Case, grid, load_cases, save_cases
from fastcar_compile.tune.evaluate.frames import Detokenize, entry_point
from fastcar_compile.tune.evaluate.measure import HeldOut, Judge, Result
from fastcar_compile.tune.evaluate.window import SinkWindow

Say = Callable[[str], None]


class Study:
    """One decoder on one set of held-out videos.

    Args:
        source: an artifact, or a decoder as `compile` takes it, or a dense program of `program_of` with passes of the
            caller's own. Nothing is compiled, so any gate can be measured.
        videos: int64 [N, T], prompt included, not the videos that thresholds were chosen on.
        decoder: its name in the rows.
        tokens_per_frame, quant: for a decoder, as `calibrate` takes them.
        prompt: tokens before decoding starts.
        counted: ids of the tokens that count in means, as `calibrate` takes them.
        groups: name -> frames that are measured apart too, bool [N, frames], whole frames after the prompt.
        detokenize: gives the frames for PSNR, SSIM and pictures; None leaves these out.
        journal: a JSON file that keeps every row. An interrupted study continues from it.
        progress: called with one line per step. The logger `fastcar_compile` has it too, at INFO.

    Raises:
        InputError: the videos do not fit the decoder, or the detokeniser does not fit the videos.
    """

    def __init__(
        self,
        source: Artifact | nn.Module | DecoderProgram,
        videos: Any,
        *,
        decoder: str,
        tokens_per_frame: int | None = None,
        quant: str = "none",
        prompt: int = 1,
        counted: tuple[int, int] | None = None,
        groups: Mapping[str, Any] | None = None,
        detokenize: Detokenize | None = None,
        journal: str | Path | None = None,
        progress: Say | None = None,
    ) -> None:
        self._videos, self._decoder = np.ascontiguousarray(np.asarray(videos)), decoder
        self._setting = Setting(prompt, token_range("counted", counted))
        self._groups = {name: np.asarray(frames, bool) for name, frames in (groups or {}).items()}
        self._detokenize, self._say = detokenize, reporter(progress)
        if isinstance(source, DecoderProgram):
            self.program = source
        elif isinstance(source, Artifact):
            self.program = source.program
        else:
            self.program = program_of(source, self._videos.shape, tokens_per_frame, quant)
        self._journal = None if journal is None else Path(journal)
        grouped = {name: frames.tolist() for name, frames in self._groups.items()}
        facts = {"decoder": decoder, **self._setting.facts(), **({"groups": grouped} if grouped else {})}
        self._key = program_key(self.program, facts, self._videos)
        self._rows = self._read()
        self._judge: Judge | None = None

    @property
    def judge(self) -> Judge:
        """The judge, made at the first measurement."""
        if self._judge is None:
            self._say("dense")
            held_out = HeldOut(self._videos, self._setting, self._groups)
            self._judge = Judge(self.program, held_out, self._decoder, self._detokenize)
        return self._judge

    def plan(
        self,
        videos: Any,
        gates: Sequence[ReplayConfig],
        ratios: Sequence[float],
        calibrations: Sequence[str] = CALIBRATIONS,
        journals: str | Path | None = None,
    ) -> list[Case]:
        """Return cases whose thresholds are chosen on `videos`, int64 [N, T].

        Args:
            gates, ratios, calibrations: the grid. journals: a folder for the measurements of every gate.

        Raises:
            InputError: a video is also held out, or `grid` refuses an argument.
        """
        tokens = np.ascontiguousarray(np.asarray(videos))
        if {row.tobytes() for row in tokens} & {row.tobytes() for row in self._videos}:
            raise InputError("a calibration video is a held-out video too", hint="calibrate on other videos")
        searches = {}
        for gate in gates:
            book = None if journals is None else Path(journals) / f"{gate.gate}.json"
            searches[gate] = search_of(self.program, gate, tokens, self._setting, book, self._say)[0]
        return grid(searches, ratios, calibrations, self._say)

    def rows(self, cases: Sequence[Case]) -> list[dict[str, Any]]:
        """Return one JSON-safe row per case; infinities become the text "inf"."""
        rows = []
        for number, case in enumerate(cases, 1):
            name = json.dumps(case.to_json(), sort_keys=True)
            if name not in self._rows:
                self._say(f"{number} of {len(cases)}: {case.name}")
                self._rows[name] = self.judge.measure(case).row
                self._write()
            rows.append(self._rows[name])
        return rows

    def _read(self) -> dict[str, dict[str, Any]]:
        if self._journal is None or not self._journal.exists():
            return {}
        hint = "give the journal of an interrupted evaluation, or a new folder"
        data = read_json(self._journal, "journal", InputError, constants=True, hint=hint)
        if not isinstance(data, dict) or not isinstance(data.get("rows"), dict):
            raise InputError("the file is no journal of an evaluation", where=str(self._journal), hint=hint)
        return data["rows"] if data.get("key") == self._key else {}

    def _write(self) -> None:
        if self._journal is not None:
            scratch = self._journal.with_name(self._journal.name + ".part")
            text = json.dumps({"key": self._key, "rows": self._rows}, sort_keys=True, indent=0)
            scratch.write_text(text + "\n", "utf-8")
            os.replace(scratch, self._journal)


__all__ = [
    "CALIBRATIONS",
    "Case",
    "HeldOut",
    "Judge",
    "Result",
    "SinkWindow",
    "Study",
    "entry_point",
    "load_cases",
    "save_cases",
]
