"""What replay costs in quality on the shipped decoders: docs/quality.md and its pictures.

`--train` trains the gates of examples/*/gates anew, and decoders and gates of examples/*/tuned; `--calibrate` chooses
the thresholds of their cases.json anew, `--hindsight` looks for decisions that no gate could better (all three long);
`--docs` measures what is shipped on held-out videos. Training and measurements go on from build/quality where they were
interrupted.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import quality_hindsight
import torch
from quality_document import write_document
from transformers import AutoModelForCausalLM

import fastcar_compile as fc
from fastcar_compile.calibrate import Evaluator, program_of, rules_of, search_of
from fastcar_compile.calibrate.heads import choose_heads
from fastcar_compile.calibrate.train import FIRST_PRICE
from fastcar_compile.evaluate import Case, SinkWindow, Study, load_cases, save_cases
from fastcar_compile.evaluate.cases import random_case
from fastcar_compile.evaluate.pictures import draw
from fastcar_compile.gates import GateWeights

ROOT = Path(__file__).parents[1]
HELD_OUT_SEED, CALIBRATION_SEED, TRAINING_SEED = 1, 2, 3
"""Of videos; those that the decoders were trained on have seeds from 10 million."""

HELD_OUT, BATCH = 32, 4
RATIOS = (0.5, 0.8, 0.85)
HINDSIGHT_RATIOS = (0.8,)
WITH_WINDOW = (("tas", 0.5), ("learned", 0.5), ("learned", 0.8))


MARGINS = {"input_delta": 0.0, "bound": 0.0, "tas": 0.06, "learned": 0.12}
"""Per gate how much less may compute, relatively, where its thresholds are chosen: on other videos more may."""


@dataclass(frozen=True)
class Round:
    """Of training: steps of BATCH videos, the share of t >= F that shall replay, softness after the first round, and
    the rate of the decoder's own weights, if they are tuned with the gate."""

    steps: int
    target: float
    softness: float = 0.5
    rate: float = 0.0


@dataclass(frozen=True)
class Decoder:
    """A shipped decoder.

    Attributes:
        name: its folder below examples/; "EXAMPLE/tuned" is EXAMPLE's decoder, tuned for replay.
        windows: attention windows to compare with and without replay.
        calibration_videos: how many thresholds are chosen on.
        training: per gate the rounds of its training.
        from_heads: the training of `tas` goes on from heads that are chosen one by one.
        gates: what is calibrated and measured.
        ratios: of replay.
    """

    name: str
    windows: tuple[SinkWindow, ...]
    calibration_videos: int
    training: dict[str, tuple[Round, ...]]
    from_heads: bool = False
    gates: tuple[str, ...] = tuple(MARGINS)
    ratios: tuple[float, ...] = RATIOS

    @property
    def folder(self) -> Path:
        """Of model, gates and cases."""
        return ROOT / "examples" / self.name

    @property
    def example(self) -> str:
        """Whose videos it decodes."""
        return self.name.split("/")[0]

    @property
    def tuned(self) -> bool:
        """For replay."""
        return self.name != self.example

    def model(self) -> Any:
        """float32, in evaluation mode."""
        return AutoModelForCausalLM.from_pretrained(
            self.folder / "model", local_files_only=True, dtype=torch.float32
        ).eval()

    def video(self) -> Any:
        """The example's video.py."""
        folder = ROOT / "examples" / self.example
        spec = importlib.util.spec_from_file_location(f"{self.example}_video", folder / "video.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    def videos(self, count: int, seed: int) -> np.ndarray:
        """int64 [count, T], BOS first."""
        video = self.video()
        return video.with_bos(video.tokenize(video.make_videos(count, seed)))

    def gate_file(self, gate: str) -> Path:
        """Of a trained gate."""
        return self.folder / "gates" / f"{gate}.safetensors"

    @property
    def hindsight_file(self) -> Path:
        """What the best decisions reach; not there where the goals are reached without."""
        return self.folder / "hindsight.json"

    def weights(self) -> GateWeights:
        """Of gate `learned`."""
        return GateWeights.load(self.gate_file("learned"))

    def config(self, gate: str) -> fc.ReplayConfig:
        """The gate, trained where it can be."""
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


TUNED_GATES, TUNED_RATIOS = ("input_delta", "tas", "learned"), (*RATIOS, 0.9)
TUNED = (
    replace(
        DECODERS[0],
        name="moving_shapes/tuned",
        training={"learned": (Round(400, 0.9, rate=1e-3),), "tas": (Round(80, 0.52), Round(60, 0.52, 0.3))},
        gates=TUNED_GATES,
        ratios=TUNED_RATIOS,
    ),
    replace(
        DECODERS[1],
        name="bouncing_digits/tuned",
        training={"learned": (Round(600, 0.9, rate=1e-3),), "tas": (Round(100, 0.52), Round(60, 0.52, 0.3))},
        from_heads=False,
        gates=TUNED_GATES,
        ratios=TUNED_RATIOS,
    ),
)
DECODERS += TUNED
BY_NAME = {decoder.name: decoder for decoder in DECODERS}


def train(decoder: Decoder, folder: Path, say: Callable[[str], None]) -> None:
    """Write the decoder's trained gates, and its weights if it is a tuned one; every round goes on from the one
    before."""
    for gate, rounds in decoder.training.items():
        found = first_gate(decoder, gate, say)
        for number, one in enumerate(rounds):
            videos = decoder.videos(one.steps * BATCH, TRAINING_SEED + number)
            options: dict[str, Any] = {
                "gate": gate,
                "target_replay": one.target,
                "steps": one.steps,
                "batch": BATCH,
                "start": found,
                "softness": one.softness,
                "checkpoint": folder / f"{gate}-{number}.safetensors",
                "progress": say,
            }
            if one.rate:
                tuned = fc.tune_decoder(BY_NAME[decoder.example].model(), videos, rate=one.rate, **options)
                model: Any = tuned.model
                model.save_pretrained(decoder.folder / "model")
                found = tuned.gate
            else:
                found = fc.train_gate(decoder.model(), videos, **options)
        assert found is not None
        decoder.gate_file(gate).parent.mkdir(parents=True, exist_ok=True)
        found.save(decoder.gate_file(gate))


def first_gate(decoder: Decoder, gate: str, say: Callable[[str], None]) -> fc.TrainedGate | None:
    """What the training of a gate begins with; None: with an untrained one."""
    if gate == "learned" and decoder.tuned:
        return fc.TrainedGate.load(BY_NAME[decoder.example].gate_file(gate))
    if gate == "tas" and decoder.from_heads:
        return chosen_heads(decoder, say)
    return None


def chosen_heads(decoder: Decoder, say: Callable[[str], None]) -> fc.TrainedGate:
    """`tas` of heads chosen one by one, with thresholds for half of the replay."""
    model, videos = decoder.model(), decoder.videos(decoder.calibration_videos, CALIBRATION_SEED)
    layers, heads = model.config.num_hidden_layers, model.config.num_attention_heads
    program = program_of(model, len(videos))
    evaluator = Evaluator(program, videos, rules_of(fc.ReplayConfig(gate="tas"), layers))
    chosen = [dict(pairs) for pairs in choose_heads(evaluator, [heads] * layers, say)]
    weights = torch.tensor([[pairs.get(head, 0.0) for head in range(heads)] for pairs in chosen])
    weights /= weights.abs().sum(1, keepdim=True)
    replay = fc.ReplayConfig(gate="tas", heads=[dict(enumerate(row.tolist())) for row in weights])
    search, key = search_of(program, replay, videos, progress=say)
    values = search.for_replay(0.5)
    found = search.outcome(values)
    nll = search.dense_nll * math.exp(found.damage)
    thresholds = tuple(0.0 if value is None else value for value in values)
    tensors = tuple({"heads": row} for row in weights)
    return fc.TrainedGate("tas", tensors, thresholds, 0.5, found.replay, nll, search.dense_nll, FIRST_PRICE, key)


def study_of(decoder: Decoder, folder: Path, say: Callable[[str], None]) -> Study:
    """On the held-out videos."""
    held_out = decoder.videos(HELD_OUT, HELD_OUT_SEED)
    options: dict[str, Any] = {"detokenize": decoder.video().pixels, "journal": folder / "rows.json"}
    return Study(decoder.model(), held_out, decoder=decoder.name, progress=say, **options)


def calibrate(decoder: Decoder, folder: Path, say: Callable[[str], None], gates: list[str]) -> None:
    """Write the example's cases.json anew for these gates; those of others stay."""
    file, study = decoder.folder / "cases.json", study_of(decoder, folder, say)
    cases: list[Case] = []
    for gate in gates:
        videos = decoder.videos(decoder.calibration_videos, CALIBRATION_SEED)
        asked = [round(ratio + MARGINS[gate] * (1 - ratio), 3) for ratio in decoder.ratios]
        found = study.plan(videos, [decoder.config(gate)], asked, ("calibrated", "uniform"), journals=folder)[1:]
        cases += [replace(case, target=decoder.ratios[asked.index(case.target)]) for case in found]
    if file.exists():
        cases += load_cases(file, decoder.weights(), set(decoder.gates) - set(gates))
    order = list(MARGINS)
    cases.sort(key=lambda case: (order.index(case.gate), case.target, case.calibration))
    layers = decoder.model().config.num_hidden_layers
    save_cases([Case("dense"), *cases, *(random_case(ratio, layers) for ratio in decoder.ratios)], file)


def look_back(decoder: Decoder, say: Callable[[str], None]) -> None:
    """Write the example's hindsight.json: the best decisions on some of the held-out videos."""
    gate = fc.TrainedGate.load(decoder.gate_file("learned"))
    videos = decoder.videos(quality_hindsight.HINDSIGHT_VIDEOS, HELD_OUT_SEED)
    found = [quality_hindsight.hindsight(decoder.model(), gate, videos, ratio, say) for ratio in HINDSIGHT_RATIOS]
    quality_hindsight.save(found, decoder.hindsight_file)


def cases_of(decoder: Decoder) -> list[Case]:
    """The shipped ones; the dense decoder and WITH_WINDOW also in every window."""
    cases = load_cases(decoder.folder / "cases.json", decoder.weights())
    chosen = [
        c for c in cases if c.replay is None or (c.calibration == "calibrated" and (c.gate, c.target) in WITH_WINDOW)
    ]
    return cases + [case.with_attention(window) for window in decoder.windows for case in chosen]


def parsed() -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--train", action="store_true", help="train the gates anew; then calibrate them")
    parser.add_argument("--calibrate", action="store_true", help="choose the thresholds anew")
    parser.add_argument("--gates", help="to calibrate, separated by commas; default: all that the decoder has")
    parser.add_argument("--hindsight", action="store_true", help="look for the best decisions anew")
    parser.add_argument("--docs", action="store_true", help="write docs/quality.md and its pictures")
    parser.add_argument("--decoder", choices=[d.name for d in DECODERS], help="default: all")
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "quality", help="where measurements are kept")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    if options.docs and options.decoder:
        parser.error("--docs writes about all decoders: leave --decoder away")
    options.gates = options.gates.split(",") if options.gates else list(MARGINS)
    if unknown := set(options.gates) - set(MARGINS):
        parser.error(f"unknown gate {min(unknown)}: choose from {', '.join(MARGINS)}")
    return options


def main() -> None:
    """What the command line asks for."""
    options = parsed()
    torch.set_num_threads(options.threads)
    found = {}
    for decoder in DECODERS:
        if options.decoder not in (None, decoder.name):
            continue
        folder = options.work / decoder.name
        folder.mkdir(parents=True, exist_ok=True)
        say: Callable[[str], None] = lambda line, name=decoder.name: print(f"{name}: {line}", flush=True)  # noqa: E731
        if options.train:
            train(decoder, folder, say)
        if options.calibrate:
            calibrate(decoder, folder, say, [gate for gate in options.gates if gate in decoder.gates])
        if options.hindsight:
            look_back(decoder, say)
        if options.docs or not (options.train or options.calibrate or options.hindsight):
            found[decoder.name] = measure(decoder, folder, say, options.docs)
    if found:
        (options.work / "rows.json").write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")
    if options.docs:
        bounds = {d.name: quality_hindsight.load(d.hindsight_file) for d in DECODERS if d.hindsight_file.exists()}
        write_document(ROOT / "docs" / "quality.md", found, bounds)


def measure(decoder: Decoder, folder: Path, say: Callable[[str], None], pictures: bool) -> list[dict[str, Any]]:
    """Rows of the shipped cases on the held-out videos."""
    cases, study = cases_of(decoder), study_of(decoder, folder, say)
    rows = study.rows(cases)
    if pictures:
        draw(study.judge, cases, rows, ROOT / "docs" / "images" / "quality" / decoder.name)
    return rows


if __name__ == "__main__":
    main()
