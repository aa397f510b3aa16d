"""The time line of one token as a picture. Needs matplotlib (extra "evaluate")."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fastcar_compile.errors import BackendError
from fastcar_compile.estimate.system import Estimate

LANES = {
    "engine": ("memory", "ports", "compute"),
    "rows in and out": ("edge",),
    "attention": ("attention", "attend"),
    "vector": ("vector",),
    "DRS": ("drs",),
}
COLOURS = {
    "memory": "#2f6db3",
    "ports": "#4f9bd9",
    "compute": "#7b52ab",
    "edge": "#8c8c8c",
    "attention": "#e0912f",
    "attend": "#e0912f",
    "vector": "#3f9c8f",
    "drs": "#b8433c",
}
HOST_COLOUR = "#5b9a58"
HEAD_LAYERS = 3
"""Layers shown in full beside the whole token."""


def pyplot() -> Any:
    """Return matplotlib.pyplot without a display.

    Raises:
        BackendError: matplotlib is not installed.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise BackendError("a plot needs matplotlib", hint='pip install "fastcar_compile[evaluate]"') from error
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    return plt


def plot_time_line(estimate: Estimate, path: Path) -> None:
    """Draw the whole token above, its first layers below; the file's ending chooses the format."""
    plt = pyplot()
    last = max((s["start"] + s["seconds"] for s in estimate.time_line if s["layer"] < HEAD_LAYERS), default=0.0)
    figure, axes = plt.subplots(2, 1, figsize=(11, 5), constrained_layout=True)
    _draw(axes[0], estimate, estimate.seconds_per_step, labels=False)
    _draw(axes[1], estimate, last, labels=True)
    asked = f"what if (not emitted): {'; '.join(estimate.what_if)}\n" if estimate.what_if else ""
    axes[0].set_title(
        f"{asked}{estimate.shape} {estimate.quant} on {estimate.target}: "
        f"{estimate.tokens_per_second:.2f} {estimate.unit}s/s predicted, "
        f"{estimate.replay_ratio:.0%} replay, bound by {estimate.bound_by}",
        fontsize=10,
    )
    axes[1].set_title(f"the first {HEAD_LAYERS} layers", fontsize=10)
    axes[1].set_xlabel("ms")
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _draw(axis: Any, estimate: Estimate, end: float, *, labels: bool) -> None:
    lanes = {unit: lane for lane, units in enumerate(LANES.values()) for unit in units}
    for segment in estimate.time_line:
        if segment["start"] >= end:
            continue
        unit = segment["unit"]
        lane = lanes.get(unit, len(LANES))
        start, length = segment["start"] * 1e3, segment["seconds"] * 1e3
        colour = COLOURS.get(unit, HOST_COLOUR)
        axis.broken_barh([(start, length)], (lane - 0.4, 0.8), facecolors=colour, edgecolor=colour, linewidth=0.4)
        if labels and length > 0.03 * end * 1e3:
            axis.text(start + length / 2, lane, segment["name"], ha="center", va="center", fontsize=7, color="white")
    axis.set_yticks(range(len(LANES) + 1), [*LANES, "host"])
    axis.set_xlim(0, end * 1e3)
    axis.set_ylim(len(LANES) + 0.5, -0.5)
