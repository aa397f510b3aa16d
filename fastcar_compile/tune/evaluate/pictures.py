"""All pictures of a study, in one folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fastcar_compile.tune.evaluate import plots
from fastcar_compile.tune.evaluate.cases import Case
from fastcar_compile.tune.evaluate.measure import Judge

SHOWN_RATIO = 0.8
"""The case of each gate nearest to this replay ratio is drawn in detail."""


def shown(cases: Sequence[Case]) -> list[Case]:
    """Return one case per gate and attention: calibrated ones first, then the nearest to SHOWN_RATIO."""
    best: dict[Any, tuple[Any, Case]] = {}
    for case in cases:
        if case.replay is None or case.gate == "random":
            continue
        distance = 1.0 if case.target is None else abs(case.target - SHOWN_RATIO)
        rank, key = (case.calibration != "calibrated", distance), (case.gate, case.attention)
        if key not in best or rank < best[key][0]:
            best[key] = (rank, case)
    return [case for _, case in best.values()]


def label(case: Case, row: dict[str, Any]) -> str:
    """Return the case's text in a legend."""
    parts = [case.gate, case.calibration, f"{row['replay_ratio']:.0%}"] if case.replay is not None else ["dense"]
    parts += [] if case.attention is None else [str(case.attention)]
    return ", ".join(parts)


def draw(judge: Judge, cases: Sequence[Case], rows: Sequence[dict[str, Any]], folder: Path, video: int = 0) -> None:
    """Write quality.png, drift.png, heat-*.png (full attention only), and strips.png if there is a detokeniser.

    Args:
        cases: as `Study.rows` takes them. rows: as it returns them. video: the video that the strips show.

    Raises:
        UserError: no case replays, or matplotlib is missing.
    """
    folder.mkdir(parents=True, exist_ok=True)
    plots.quality(rows, folder / "quality.png")
    named = dict(zip(cases, rows, strict=True))
    chosen = shown(cases)
    dense = [case for case in cases if case.replay is None]
    lines = [*dense, *chosen]
    plots.drift([named[c] for c in lines], [label(c, named[c]) for c in lines], folder / "drift.png")
    replays = {}
    for case in (c for c in chosen if c.attention is None):
        result, text = judge.measure(case), label(case, named[case])
        plots.heat(result.places, f"{result.row['decoder']}: {text}", folder / f"heat-{case.name}.png")
        if judge.truth is not None:
            replays[text.replace(", ", "\n")] = judge.pixels(result.predicted)[video]
    if judge.truth is not None and replays:
        pixels = judge.pixels(judge.measure(Case("dense")).predicted)[video]
        decoder = str(rows[0]["decoder"])
        plots.strips(judge.truth[video], pixels, replays, decoder, folder / "strips.png")
