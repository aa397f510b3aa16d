"""Pictures of DRS: how many rows compute in every layer, and what every core does. The same input, the same bytes."""

from collections.abc import Mapping as Map
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastcar_compile.codegen.hls.model.question import Decisions, Mapping, passes_of
from fastcar_compile.support.packages import pyplot

DPI = 110
MAPPING_TITLES = {Mapping.STATIC: "static mapping", Mapping.DRS: "DRS"}


def save(figure: Any, path: Path) -> None:
    """Save a figure; neither version nor time is written."""
    figure.savefig(path, dpi=DPI, metadata={"Software": None} if path.suffix == ".png" else {"Date": None})
    pyplot().close(figure)


def draw_active_rows(inputs: Map[str, Decisions], path: Path) -> None:
    """Draw, per input, how often how many rows compute in every layer.

    Args:
        inputs: title -> decisions bool [forwards, layers, rows].
    """
    plt = pyplot()
    figure, axes = plt.subplots(1, len(inputs), figsize=(4.2 * len(inputs), 3.4), squeeze=False, layout="constrained")
    image = None
    for axis, (title, decisions) in zip(axes[0], inputs.items(), strict=True):
        active = (~decisions).sum(-1)
        rows = decisions.shape[-1]
        shares = np.array([np.bincount(layer, minlength=rows + 1) for layer in active.T]) / len(active)
        image = axis.imshow(shares, aspect="auto", origin="lower", cmap="viridis", vmin=0, vmax=1)
        axis.set_title(f"{title}: {decisions.mean():.0%} replay", fontsize=10)
        axis.set_xlabel("active rows")
        axis.xaxis.get_major_locator().set_params(integer=True)
        axis.yaxis.get_major_locator().set_params(integer=True)
    axes[0][0].set_ylabel("layer")
    figure.colorbar(image, ax=axes[0].tolist(), label="share of the forwards")
    save(figure, path)


def draw_cores(decisions: Decisions, cores: int, forward: int, title: str, path: Path) -> None:
    """Draw one forward as a time line per core, static mapping above DRS: a box is one row in one layer.

    Args:
        decisions: bool [forwards, layers, rows].
    """
    plt = pyplot()
    figure, axes = plt.subplots(2, 1, figsize=(10, 4.8), sharex=True, layout="constrained")
    colours = plt.get_cmap("tab20")
    for axis, mapping in zip(axes, (Mapping.STATIC, Mapping.DRS), strict=True):
        passes = passes_of(decisions[forward : forward + 1], cores, mapping)[0]
        starts = np.concatenate([[0], np.cumsum(passes)])
        for layer, start in enumerate(starts[:-1].tolist()):
            for core, rows in enumerate(places_of(~decisions[forward, layer], cores, mapping)):
                for number, row in enumerate(rows):
                    axis.broken_barh([(start + number, 1)], (core - 0.42, 0.84), facecolors=colours(row % 20))
            axis.axvline(start, color="#999999", linewidth=0.4)
        axis.set_title(f"{title}, {MAPPING_TITLES[mapping]}: {starts[-1]} passes", fontsize=10)
        axis.set_ylabel("core")
        axis.set_yticks(range(cores))
    axes[1].set_xlabel("passes over the tiles of a layer; lines separate layers, colours are rows, white is idle")
    save(figure, path)


def typical_forward(decisions: Decisions, cores: int) -> int:
    """Return the forward whose passes under both mappings are nearest to the mean."""
    both = np.stack([passes_of(decisions, cores, mapping).sum(-1) for mapping in Mapping])
    return int(np.abs(both - both.mean(-1, keepdims=True)).sum(0).argmin())


def places_of(computing: NDArray[np.bool_], cores: int, mapping: Mapping) -> list[list[int]]:
    """Return per core the rows that it computes, pass by pass, of computing rows bool [rows]."""
    rows: list[list[int]] = [[] for _ in range(cores)]
    for number, row in enumerate(np.flatnonzero(computing).tolist()):
        rows[(number if mapping is Mapping.DRS else row) % cores].append(row)
    return rows
