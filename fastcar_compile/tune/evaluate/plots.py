"""Pictures of a study: quality against replay, places of replay, and frames. The same input gives the same bytes."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fastcar_compile.errors import UserError
from fastcar_compile.support.packages import pyplot
from fastcar_compile.tune.evaluate import Case, Judge

_DPI = 110
_STYLES = {"calibrated": "-", "uniform": "--", "random": ":"}
_MARKERS = {"calibrated": "o", "uniform": "s", "random": "x"}
_COLOURS = ("#1b6ca8", "#d1495b", "#3a7d44", "#8d5a97", "#b07d2b")
_RANDOM = "#777777"


def save_figure(plt: Any, figure: Any, path: Path) -> None:
    """Save a figure without version and time, so that the bytes depend on the picture only."""
    figure.savefig(path, dpi=_DPI, metadata={"Software": None})
    plt.close(figure)


def quality(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw NLL relative to dense against the replay ratio of t >= F: a colour per gate, a style per calibration.

    Args:
        rows: of one decoder. Rows with sparse attention are left out. path: a .png file.

    Raises:
        UserError: no row replays, or matplotlib is missing.
    """
    series: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for row in rows:
        if row["gate"] != "none" and row["sparse_attention"] == "none" and isinstance(row["nll"], float):
            point = (100 * row["replay_ratio"], row["nll"] / row["nll_dense"])
            series.setdefault((row["gate"], row["calibration"]), []).append(point)
    if not series:
        raise UserError("no row replays: there is nothing to plot", hint="evaluate a case with a gate")
    plt = pyplot()
    gates = [g for g in dict.fromkeys(gate for gate, _ in series) if g != "random"]
    figure, axes = plt.subplots(figsize=(7.2, 4.6), layout="constrained")
    for (gate, calibration), points in series.items():
        colour = _RANDOM if gate == "random" else _COLOURS[gates.index(gate) % len(_COLOURS)]
        style, label = _STYLES.get(calibration, "-."), gate if gate == calibration else f"{gate}, {calibration}"
        marker = _MARKERS.get(calibration, "D")
        axes.plot(*zip(*sorted(points), strict=True), style, color=colour, marker=marker, markersize=5, label=label)
    axes.axhline(1.0, color="black", linewidth=0.8)
    title = f"{rows[0]['decoder']}: dense NLL {rows[0]['nll_dense']:.4f} nats per token"
    axes.set(yscale="log", ylabel="NLL / dense NLL (held-out, teacher-forced)", title=title)
    axes.set_xlabel("replayed share of the forwards t ≥ F, %")
    highest = axes.get_ylim()[1]
    fine = (1.1, 1.2) if highest < 5 else ()
    ticks = [t for t in (1, *fine, 1.5, 2, 3, 5, 10, 20, 50, 100) if t <= highest]
    axes.set_yticks(ticks, [f"{t:g}×" for t in ticks])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    save_figure(plt, figure, path)


def heat(places: np.ndarray, title: str, path: Path) -> None:
    """Draw the share of the videos that replayed, by layer and forward number.

    Args:
        places: float64 [L, frames, F], NaN where no forward ran.
    """
    plt = pyplot()
    layers, frames, stride = places.shape
    figure, axes = plt.subplots(figsize=(9, 0.9 + 0.45 * layers), layout="constrained")
    flat = places.reshape(layers, frames * stride)
    image = axes.imshow(100 * flat, aspect="auto", interpolation="nearest", cmap="viridis", vmin=0, vmax=100)
    axes.set_yticks(range(layers), [f"layer {i}" for i in range(layers)])
    axes.set_xticks(np.arange(frames) * stride - 0.5, [f"frame {i + 1}" for i in range(frames)], ha="left")
    for start in range(1, frames):
        axes.axvline(start * stride - 0.5, color="white", linewidth=0.8)
    axes.set_title(title, fontsize=10)
    figure.colorbar(image, ax=axes, label="replayed, %")
    save_figure(plt, figure, path)


def drift(rows: Sequence[Mapping[str, Any]], labels: Sequence[str], path: Path) -> None:
    """Draw the NLL by frame, from the second frame on, one line per row."""
    plt = pyplot()
    figure, axes = plt.subplots(figsize=(9.6, 4.0), layout="constrained")
    for row, label in zip(rows, labels, strict=True):
        values = row["nll_by_frame"][1:]
        axes.plot(range(2, len(values) + 2), values, marker="o", markersize=4, label=label)
    axes.set(xlabel="frame", ylabel="NLL, nats per token", title=rows[0]["decoder"])
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
    save_figure(plt, figure, path)


def strips(truth: np.ndarray, dense: np.ndarray, replays: Mapping[str, np.ndarray], decoder: str, path: Path) -> None:
    """Draw frames of one video from the second on: true, dense, and each case with its difference from dense.

    Args:
        truth, dense: float [frames, height, width, channels] from 0 to 1, 1 or 3 channels. replays: label -> the same.
    """
    plt = pyplot()
    rows: list[tuple[str, np.ndarray, str]] = [("true", truth, "gray"), ("dense", dense, "gray")]
    for label, frames in replays.items():
        rows += [(label, frames, "gray"), ("difference\nfrom dense", np.abs(frames - dense), "inferno")]
    count = len(truth) - 1
    figure, grid = plt.subplots(
        len(rows), count, figsize=(1.15 * count + 1.6, 1.2 * len(rows) + 0.4), layout="constrained", squeeze=False
    )
    for line, (label, frames, colours) in zip(grid, rows, strict=True):
        for axes, frame in zip(line, frames[1:], strict=True):
            plain = frame.shape[-1] != 3
            shown = frame.mean(-1) if plain or colours == "inferno" else frame
            axes.imshow(shown, cmap=colours, vmin=0, vmax=1, interpolation="nearest")
            axes.set(xticks=[], yticks=[])
        line[0].set_ylabel(label, rotation=0, ha="right", va="center", fontsize=8)
    for index, axes in enumerate(grid[0]):
        axes.set_title(f"frame {index + 2}", fontsize=8)
    figure.suptitle(f"{decoder}: most likely symbols given the true past", fontsize=10)
    save_figure(plt, figure, path)


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


def draw(judge: Judge, cases: Sequence[Case], rows: Sequence[dict[str, Any]], folder: Path) -> None:
    """Write quality.png, drift.png, heat-*.png (full attention only), and strips.png if there is a detokeniser.

    Args:
        cases: as `Study.rows` takes them. rows: as it returns them.

    Raises:
        UserError: no case replays, or matplotlib is missing.
    """
    folder.mkdir(parents=True, exist_ok=True)
    quality(rows, folder / "quality.png")
    named = dict(zip(cases, rows, strict=True))
    chosen = shown(cases)
    lines = [*(case for case in cases if case.replay is None), *chosen]
    drift([named[c] for c in lines], [label(c, named[c]) for c in lines], folder / "drift.png")
    replays = {}
    for case in (c for c in chosen if c.attention is None):
        result, text = judge.measure(case), label(case, named[case])
        heat(result.places, f"{result.row['decoder']}: {text}", folder / f"heat-{case.name}.png")
        if judge.truth is not None:
            replays[text.replace(", ", "\n")] = judge.pixels(result.predicted)[0]
    if judge.truth is not None and replays:
        pixels = judge.pixels(judge.measure(Case("dense")).predicted)[0]
        decoder = str(rows[0]["decoder"])
        strips(judge.truth[0], pixels, replays, decoder, folder / "strips.png")
