"""What replay costs in quality on the shipped decoders: docs/quality.md and its pictures.

`--calibrate` chooses the thresholds of examples/*/cases.json anew (long); `--docs` measures those that are shipped on
held-out videos. Both go on from build/quality where they were interrupted.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from quality_document import write_document
from transformers import AutoModelForCausalLM

import fastcar_compile as fc
from fastcar_compile.calibrate import Evaluator, program_of, rules_of
from fastcar_compile.calibrate.heads import choose_heads
from fastcar_compile.evaluate import Case, SinkWindow, Study, load_cases, save_cases
from fastcar_compile.evaluate.pictures import draw

ROOT = Path(__file__).parents[1]
HELD_OUT_SEED, CALIBRATION_SEED = 1, 2
"""Of videos; those that the decoders were trained on have seeds from 10 million."""

HELD_OUT, CALIBRATION, HEAD_VIDEOS = 16, 16, 6
RATIOS = {"input_delta": (0.5, 0.8, 0.85), "tas": (0.5,)}


@dataclass(frozen=True)
class Decoder:
    """A shipped decoder.

    Attributes:
        windows: attention windows to compare with and without replay.
    """

    name: str
    windows: tuple[SinkWindow, ...]

    @property
    def folder(self) -> Path:
        """Of the example."""
        return ROOT / "examples" / self.name

    def model(self) -> Any:
        """float32, in evaluation mode."""
        return AutoModelForCausalLM.from_pretrained(
            self.folder / "model", local_files_only=True, dtype=torch.float32
        ).eval()

    def video(self) -> Any:
        """The example's video.py."""
        spec = importlib.util.spec_from_file_location(f"{self.name}_video", self.folder / "video.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    def videos(self, count: int, seed: int) -> np.ndarray:
        """int64 [count, T], BOS first."""
        video = self.video()
        return video.with_bos(video.tokenize(video.make_videos(count, seed)))


DECODERS = (
    Decoder("moving_shapes", (SinkWindow(256, 16), SinkWindow(640, 16))),
    Decoder("bouncing_digits", (SinkWindow(101, 16), SinkWindow(256, 16))),
)


def heads_of(decoder: Decoder, folder: Path, say: Callable[[str], None]) -> list[Any]:
    """Query heads for TAS, from a few calibration videos; every layer is kept in the folder as soon as it is known."""
    kept, model = folder / "heads.json", decoder.model()
    chosen = json.loads(kept.read_text()) if kept.exists() else []
    layers, count = model.config.num_hidden_layers, model.config.num_attention_heads
    if len(chosen) < layers:
        videos = decoder.videos(HEAD_VIDEOS, CALIBRATION_SEED)
        evaluator = Evaluator(program_of(model, HEAD_VIDEOS), videos, rules_of(fc.ReplayConfig(), layers))
        for heads in choose_heads(evaluator, [count] * layers, say, first=len(chosen)):
            chosen.append(heads)
            kept.write_text(json.dumps(chosen) + "\n")
    return chosen


def study_of(decoder: Decoder, folder: Path, say: Callable[[str], None]) -> Study:
    """On the held-out videos."""
    held_out = decoder.videos(HELD_OUT, HELD_OUT_SEED)
    options: dict[str, Any] = {"detokenize": decoder.video().pixels, "journal": folder / "rows.json"}
    return Study(decoder.model(), held_out, decoder=decoder.name, progress=say, **options)


def calibrate(decoder: Decoder, folder: Path, say: Callable[[str], None]) -> None:
    """Write the example's cases.json."""
    videos, study = decoder.videos(CALIBRATION, CALIBRATION_SEED), study_of(decoder, folder, say)
    cases = study.plan(videos, [fc.ReplayConfig(gate="input_delta")], RATIOS["input_delta"], journals=folder)
    by_tas = fc.ReplayConfig(gate="tas", heads=heads_of(decoder, folder, say))
    cases += study.plan(videos, [by_tas], RATIOS["tas"], ("calibrated", "uniform"), journals=folder)[1:]
    save_cases(cases, decoder.folder / "cases.json")


def cases_of(decoder: Decoder) -> list[Case]:
    """The shipped ones; the dense decoder and half and 80 % replay also in every window."""
    cases = load_cases(decoder.folder / "cases.json")
    chosen = [c for c in cases if c.replay is None or (c.calibration == "calibrated" and c.target in (0.5, 0.8))]
    return cases + [case.with_attention(window) for window in decoder.windows for case in chosen]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calibrate", action="store_true", help="choose the thresholds anew")
    parser.add_argument("--docs", action="store_true", help="write docs/quality.md and its pictures")
    parser.add_argument("--decoder", choices=[d.name for d in DECODERS], help="default: all")
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "quality", help="where measurements are kept")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    if options.docs and options.decoder:
        parser.error("--docs writes about all decoders: leave --decoder away")
    torch.set_num_threads(options.threads)
    found = {}
    for decoder in DECODERS:
        if options.decoder not in (None, decoder.name):
            continue
        folder = options.work / decoder.name
        folder.mkdir(parents=True, exist_ok=True)
        say: Callable[[str], None] = lambda line, name=decoder.name: print(f"{name}: {line}", flush=True)  # noqa: E731
        if options.calibrate:
            calibrate(decoder, folder, say)
        cases = cases_of(decoder)
        study = study_of(decoder, folder, say)
        found[decoder.name] = study.rows(cases)
        if options.docs:
            draw(study.judge, cases, found[decoder.name], ROOT / "docs" / "images" / "quality" / decoder.name)
    (options.work / "rows.json").write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")
    if options.docs:
        write_document(ROOT / "docs" / "quality.md", found)


if __name__ == "__main__":
    main()
