"""What replay costs the shipped decoders in quality, on videos that neither they nor their gates have seen.

    python benchmarks/quality.py --docs                     # the drawn videos: docs/measurements/quality.md
    python benchmarks/quality.py --game --docs              # the game: docs/measurements/doom.md
    python benchmarks/quality.py --decoder doom --quant w8a8 --kv int8
    python benchmarks/quality.py --decoder doom --draft FILE           # a draft, beside the shipped gates
    OMP_NUM_THREADS=1 python benchmarks/quality.py --calibrate         # docs/measurements/calibration.md

The thresholds are those of examples/*/cases.json, which `fastcar evaluate --save-cases` writes. Finished rows are kept
in build/quality, so an interrupted run continues. The game needs the extra `doom`; its play is recorded once.
"""

import argparse
import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pages import MEASUREMENTS, ROOT, markdown, write_table
from subjects import DATA, DRAWN, GAME, KINDS, Subject, subject_of

import fastcar_compile as fc
from fastcar_compile.ir.pass_manager import run_pipeline
from fastcar_compile.passes.caches import TYPES, QuantizeKvCache
from fastcar_compile.tune.calibrate import PRECISIONS, program_of, search_of
from fastcar_compile.tune.evaluate import Case, Study, load_cases

LIMITS = (1.05, 1.10)
"""NLL relative to dense that replay may cost."""

PATH = (0.4, 0.5, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95, 0.98, 1.0)
"""Replay of a draft that its thresholds are chosen for."""

TARGETS = {"input_delta": 0.8, "learned": 0.8, "tas": 0.5}
GAME_TARGETS = {"input_delta": 0.4, "learned": 0.4, "tas": 0.15}
"""Replay that gates are calibrated for; of the game, what it can replay within the greater limit."""

CHANCE = 0.8
"""Replay of the row of gate `random` that is shown."""

MEANS = ("replay_ratio", "mlp_weights_spared", "nll", "nll_dense", "token_agreement", "ssim")
Row = dict[str, Any]
Say = Callable[[str], None]


def study_of(subject: Subject, options: argparse.Namespace, say: Say) -> Study:
    """Return a study of the decoder, quantised as the command line asks, on its held-out videos."""
    videos, groups = subject.measured()
    passes = [] if options.kv == "float32" else [QuantizeKvCache(options.kv)]
    program = run_pipeline(program_of(subject.model(), videos.shape, quant=options.quant), passes)
    setting, label = subject.setting, f"{subject.title}-{options.quant}-{options.kv}".replace("/", "-")
    return Study(
        program,
        videos,
        decoder=subject.title,
        prompt=setting.prompt,
        counted=setting.counted,
        groups=groups,
        detokenize=subject.detokenize(),
        journal=options.work / f"{label}.json",
        progress=say,
    )


def cases_of(subject: Subject) -> list[Case]:
    """Return the shipped cases. One threshold for all layers ("uniform") is worse than calibrated ones."""
    cases = load_cases(subject.folder / "cases.json", subject.gate_weights())
    return [case for case in cases if case.calibration != "uniform"]


def drafted(subject: Subject, path: Path) -> list[Case]:
    """Return cases of a draft, whose thresholds are chosen along PATH on calibration videos."""
    videos, config = subject.calibration(6), fc.ReplayConfig(draft=fc.Draft.load(path))
    search = search_of(program_of(subject.model(), videos.shape), config, videos, subject.setting)[0]
    found = zip(search.path(PATH), PATH, strict=True)
    return [Case("draft", config.model_copy(update={"threshold": values}), target) for values, target in found]


def weighted(row: Row, shares: dict[str, float]) -> Row:
    """Return the row with means of its kinds of motion, each with its share of all play; as it is without shares."""
    present = [kind for kind in shares if kind in row.get("groups", {})]
    if not present:
        return row
    weights = np.array([shares[kind] for kind in present])
    weights, groups = weights / weights.sum(), [row["groups"][kind] for kind in present]
    means = {name: float(weights @ [float(group[name]) for group in groups]) for name in MEANS}
    errors = weights @ [10 ** (-float(group["psnr"]) / 10) for group in groups]
    return row | means | {"psnr": -10 * math.log10(errors) if errors else math.inf}


def cost(row: Row) -> float:
    """Return the NLL relative to the dense one."""
    return float(row["nll"]) / row["nll_dense"]


def method(row: Row) -> str:
    """Return the name of a row's gate in tables."""
    own = row["calibration"] in ("calibrated", "random", "dense")
    return row["gate"] if own else row["calibration"].partition(" within ")[0]


def percent(share: float, digits: int = 1) -> str:
    """Return a share as text."""
    return f"{100 * share:.{digits}f} %"


def rows_table(rows: Sequence[Row]) -> str:
    """Return dense rows, calibrated ones and chance at one ratio; the points of a curve are in `most_table`."""
    columns = ("decoder", "gate", "chosen for", "replay", "NLL", "of dense", "agreement", "PSNR", "SSIM")
    lines = []
    for row in rows:
        within = row["calibration"].partition(" within ")[2]
        chance = row["calibration"] == "random" and row["target_replay"] == CHANCE
        if not (chance or within or row["calibration"] in ("dense", "calibrated")):
            continue
        wanted = within or ("" if row["target_replay"] is None else percent(row["target_replay"], 0))
        figures = percent(row["replay_ratio"]), f"{float(row['nll']):.4f}", f"{cost(row):.2f}x"
        pictures = percent(row["token_agreement"], 2), f"{float(row['psnr']):.1f} dB", f"{row['ssim']:.3f}"
        gate = "dense" if row["gate"] == "none" else f"`{method(row)}`"
        lines.append((row["decoder"], gate, wanted, *figures, *pictures))
    return markdown(columns, lines)


def most(rows: Sequence[Row], limit: float, what: str = "replay_ratio") -> float:
    """Return the highest share at a cost within the limit: between two measured points the cost is a straight line."""
    points = [(0.0, 1.0), *sorted((row[what], cost(row)) for row in rows)]
    best = max(share for share, costs in points if costs <= limit)
    for (share, costs), (next_share, next_costs) in pairwise(points):
        if costs <= limit < next_costs:
            best = max(best, share + (limit - costs) / (next_costs - costs) * (next_share - share))
    return best


def most_table(rows: Sequence[Row]) -> str:
    """Return replay within each limit by decoder and gate, of all frames and of each kind of motion."""
    kinds = [kind for kind in KINDS if kind in rows[0].get("groups", {})]
    columns = ("decoder", "gate", *(f"all, {limit:.2f}x" for limit in LIMITS), *kinds)
    lines = []
    for decoder, name in dict.fromkeys((row["decoder"], method(row)) for row in rows if row["gate"] != "none"):
        own = [row for row in rows if (row["decoder"], method(row)) == (decoder, name)]
        cells = [percent(most(own, limit), 0) for limit in LIMITS]
        if own[0]["calibration"] == "draft":
            spared = [percent(most(own, limit, "mlp_weights_spared"), 0) for limit in LIMITS]
            cells = [f"{cell}, net bytes {net}" for cell, net in zip(cells, spared, strict=True)]
        for kind in kinds:  # of the first decoder: the unseen map has few frames of a kind
            shown = [row["groups"][kind] for row in own] if decoder == rows[0]["decoder"] else []
            cells.append(" / ".join(percent(most(shown, limit), 0) for limit in LIMITS if shown))
        lines.append((decoder, f"`{name}`", *cells))
    return markdown(columns, lines)


def measure(subjects: Sequence[Subject], options: argparse.Namespace) -> None:
    """Print the tables of decoders, and write them into their page on request."""
    rows: list[Row] = []
    for subject in subjects:
        study = study_of(subject, options, partial(print, f"{subject.title}:", flush=True))
        cases = cases_of(subject) + ([] if options.draft is None else drafted(subject, options.draft))
        shares = subject.shares()
        rows += [weighted(row, shares) for row in study.rows(cases)]
    tables = {"rows": rows_table(rows), "most": most_table(rows)}
    print("\n".join(tables.values()))
    if options.docs and options.game:
        write_table(MEASUREMENTS / "doom.md", "most", tables["most"])
    if options.docs:
        write_table(MEASUREMENTS / ("doom.md" if options.game else "quality.md"), "rows", tables["rows"])


def calibrate(subject: Subject, gate: str, count: int) -> None:
    """Print a row: the time of a calibration, and what its thresholds and the shipped ones replay of other videos."""
    own, others, config = subject.calibration(count), subject.held_out(), subject.config(gate)
    setting, target = subject.setting, (GAME_TARGETS if subject.name == GAME[0] else TARGETS)[gate]
    options: dict[str, Any] = {"target_replay": target, "prompt": setting.prompt, "counted": setting.counted}
    begun, used = time.perf_counter(), time.process_time()
    found = fc.calibrate(subject.model(), own, replay=config, **options)
    seconds = f"{time.process_time() - used:.0f}", f"{time.perf_counter() - begun:.0f}"
    assert found.expected is not None
    search = search_of(program_of(subject.model(), others.shape), config, others, setting)[0]
    new = search.outcome(found.values)
    old = search.outcome(shipped(subject, gate, target).thresholds(len(found.values)))
    expected = f"{percent(found.expected.low)} to {percent(found.expected.high)}"
    cells = [f"{percent(new.replay)}", expected, f"{math.exp(new.loss):.3f}x"]
    cells += [f"{math.exp(old.loss):.3f}x at {percent(old.replay)}"]
    print(f"| {subject.name} | `{gate}` {percent(target, 0)} | {' | '.join((*seconds, *cells))} |", flush=True)


def shipped(subject: Subject, gate: str, target: float) -> fc.ReplayConfig:
    """Return the shipped config of a gate: calibrated for the target, or for the greater limit."""
    end = f" within {LIMITS[-1]:.2f}x"
    for case in cases_of(subject):
        fits = (case.calibration, case.target) == ("calibrated", target) or case.calibration.endswith(end)
        if case.replay is not None and case.gate == gate and fits and "trained" not in case.calibration:
            return case.replay
    raise SystemExit(f"{subject.folder}: no shipped thresholds of {gate}")


def parsed() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--game", action="store_true", help="the game decoder in place of those of drawn videos")
    parser.add_argument("--decoder", choices=(*DRAWN, *GAME), help="one decoder")
    parser.add_argument("--quant", choices=PRECISIONS, default="none")
    parser.add_argument("--kv", choices=("float32", *TYPES), default="float32")
    parser.add_argument("--draft", type=Path, help="a draft of the decoder, .safetensors")
    parser.add_argument("--calibrate", action="store_true", help="measure calibrations in place of the shipped cases")
    parser.add_argument("--count", type=int, default=32, help="calibration videos")
    parser.add_argument("--data", type=Path, default=DATA, help="recorded play")
    parser.add_argument("--docs", action="store_true", help="write the page's tables")
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "quality", help="folder of finished rows")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    if options.docs and (options.decoder, options.quant, options.kv, options.draft) != (None, "none", "float32", None):
        parser.error("--docs writes about all decoders as they are shipped")
    return options


def main() -> None:
    """Measure, print, and write the requested tables."""
    options = parsed()
    torch.set_num_threads(options.threads)
    options.work.mkdir(parents=True, exist_ok=True)
    several = GAME if options.game else DRAWN[:2] if options.calibrate else DRAWN
    names = [options.decoder] if options.decoder else several
    subjects = [subject_of(name, options.data) for name in names]
    if not options.calibrate:
        measure(subjects, options)
        return
    columns = ("decoder", "gate, target", "CPU seconds", "seconds", "held out", "expected", "NLL", "shipped")
    print(markdown(columns, []), end="")
    for subject in subjects:
        for gate in TARGETS:
            calibrate(subject, gate, options.count)


if __name__ == "__main__":
    main()
