"""What replay costs in quality on the shipped decoders: docs/measurements/quality.md and its pictures.

--train      trains the gates of examples/*/gates, and decoders and gates of examples/*/tuned
--calibrate  chooses the thresholds of their cases.json
--hindsight  searches decisions that bound every gate
--docs       measures the shipped decoders on held-out videos

The first three take long. Interrupted training and measurements continue from build/quality.
"""

import argparse
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from replay_quality import caches, hindsight
from replay_quality.decoders import CALIBRATION_SEED, DECODERS, HELD_OUT, HELD_OUT_SEED, MARGINS, ROOT, Decoder
from replay_quality.document import write_document
from replay_quality.training import train

import fastcar_compile as fc
from fastcar_compile.tune.evaluate import Case, Study, load_cases, save_cases
from fastcar_compile.tune.evaluate.cases import random_case
from fastcar_compile.tune.evaluate.plots import draw

HINDSIGHT_RATIOS = (0.8,)
WITH_WINDOW = (("tas", 0.5), ("learned", 0.5), ("learned", 0.8))


def study_of(decoder: Decoder, folder: Path, say: Callable[[str], None]) -> Study:
    """Return a study of the decoder on the held-out videos."""
    held_out = decoder.videos(HELD_OUT, HELD_OUT_SEED)
    options: dict[str, Any] = {"detokenize": decoder.video().pixels, "journal": folder / "rows.json"}
    return Study(decoder.model(), held_out, decoder=decoder.name, progress=say, **options)


def calibrate(decoder: Decoder, folder: Path, say: Callable[[str], None], gates: list[str]) -> None:
    """Replace the cases of these gates in the example's cases.json."""
    file, study = decoder.folder / "cases.json", study_of(decoder, folder, say)
    cases: list[Case] = []
    for gate in gates:
        videos = decoder.videos(decoder.calibration_videos, CALIBRATION_SEED)
        ratios = decoder.grid[gate]
        asked = [round(ratio + MARGINS[gate] * (1 - ratio), 3) for ratio in ratios]
        found = study.plan(videos, [decoder.config(gate)], asked, ("calibrated", "uniform"), journals=folder)[1:]
        nominal = dict(zip(asked, ratios, strict=True))
        cases += [replace(case, target=nominal[case.target]) for case in found if case.target is not None]
    if file.exists():
        cases += load_cases(file, decoder.weights(), set(decoder.grid) - set(gates))
    order = list(MARGINS)
    cases.sort(key=lambda case: (order.index(case.gate), case.target, case.calibration))
    layers = decoder.model().config.num_hidden_layers
    save_cases([Case("dense"), *cases, *(random_case(ratio, layers) for ratio in decoder.ratios)], file)


def look_back(decoder: Decoder, say: Callable[[str], None]) -> None:
    """Write the example's hindsight.json: the best decisions found on some of the held-out videos."""
    gate = fc.TrainedGate.load(decoder.gate_file("learned"))
    videos = decoder.videos(hindsight.HINDSIGHT_VIDEOS, HELD_OUT_SEED)
    found = [hindsight.hindsight(decoder.model(), gate, videos, ratio, say) for ratio in HINDSIGHT_RATIOS]
    hindsight.save(found, decoder.hindsight_file)


def cases_of(decoder: Decoder) -> list[Case]:
    """Return the shipped cases, with the dense decoder and WITH_WINDOW also under every window."""
    cases = load_cases(decoder.folder / "cases.json", decoder.weights())
    chosen = [
        c for c in cases if c.replay is None or (c.calibration == "calibrated" and (c.gate, c.target) in WITH_WINDOW)
    ]
    return cases + [case.with_attention(window) for window in decoder.windows for case in chosen]


def parsed() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", action="store_true", help="train the gates; calibrate them afterwards")
    parser.add_argument("--calibrate", action="store_true", help="choose the thresholds")
    parser.add_argument("--gates", help="gates to calibrate, separated by commas; default: all of the decoder")
    parser.add_argument("--hindsight", action="store_true", help="search the best decisions")
    parser.add_argument("--docs", action="store_true", help="write docs/measurements/quality.md and its pictures")
    parser.add_argument("--decoder", choices=[d.name for d in DECODERS], help="default: all")
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "quality", help="folder of the measurements")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    if options.docs and options.decoder:
        parser.error("--docs writes about all decoders: omit --decoder")
    options.gates = options.gates.split(",") if options.gates else list(MARGINS)
    if unknown := set(options.gates) - set(MARGINS):
        parser.error(f"unknown gate {min(unknown)}: choose from {', '.join(MARGINS)}")
    return options


def main() -> None:
    """Run the requested parts."""
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
            calibrate(decoder, folder, say, [gate for gate in options.gates if gate in decoder.grid])
        if options.hindsight:
            look_back(decoder, say)
        if options.docs or not (options.train or options.calibrate or options.hindsight):
            found[decoder.name] = measure(decoder, folder, say, options.docs)
    if found:
        (options.work / "rows.json").write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")
    if options.docs:
        bounds = {d.name: hindsight.load(d.hindsight_file) for d in DECODERS if d.hindsight_file.exists()}
        videos = {d.name: d.videos(HELD_OUT, HELD_OUT_SEED) for d in DECODERS}
        kv_types = {d.name: caches.dense_nll(d.model(), videos[d.name]) for d in DECODERS if not d.tuned}
        write_document(ROOT / "docs" / "measurements" / "quality.md", found, bounds, kv_types)


def measure(decoder: Decoder, folder: Path, say: Callable[[str], None], pictures: bool) -> list[dict[str, Any]]:
    """Return the rows of the shipped cases on the held-out videos."""
    cases, study = cases_of(decoder), study_of(decoder, folder, say)
    rows = study.rows(cases)
    if pictures:
        draw(study.judge, cases, rows, ROOT / "docs" / "images" / "quality" / decoder.name)
    return rows


if __name__ == "__main__":
    main()
