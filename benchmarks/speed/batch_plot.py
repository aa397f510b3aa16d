"""Pictures of batches and prompts: the roofline with all measured points, and bars of three sizes."""

from pathlib import Path
from typing import Any

import numpy as np

from fastcar_compile.support.packages import pyplot
from speed.batch_plan import BATCH_PEERS
from speed.engines import OURS
from speed.plot import BLUES, COLOURS, TITLES
from speed.report import Row, shown
from speed.sizes import BATCH, DENSE, PREFILL

BARS = ((BATCH, 8), (BATCH, 32), (PREFILL, 512))
MARKERS = {BATCH: "o", PREFILL: "s"}


def plot_roofline(rows: list[Row], path: Path) -> None:
    """Draw GMAC/s over MAC/byte, one panel per precision. The suffix of `path` gives the format."""
    measured = [r for r in rows if "missing" not in r and "gigamacs" in r]
    groups = [g for g in BATCH_PEERS if any(r["group"] == g for r in measured)]
    if not groups:
        return
    figure, axes = pyplot().subplots(1, len(groups), figsize=(3.9 * len(groups), 4.4), squeeze=False, sharey=True)
    for axis, group in zip(axes[0], groups, strict=True):
        _roofs(axis, [r for r in measured if r["group"] == group])
        axis.set_title(TITLES[group])
        axis.set_xlabel("MAC per byte")
    axes[0][0].set_ylabel("billions of multiply-accumulates per second")
    handles = {h.get_label(): h for axis in axes[0] for h in axis.get_legend_handles_labels()[0]}
    figure.legend(handles.values(), handles.keys(), loc="lower center", ncols=8, fontsize=8, frameon=False)
    figure.text(0.5, 0.085, "circles: steps of 1 to 32 rows; squares: prompts", ha="center", fontsize=8)
    figure.tight_layout(rect=(0, 0.12, 1, 1))
    _save(figure, path)


def _roofs(axis: Any, rows: list[Row]) -> None:
    """Draw both roofs as their medians, and a point per row: a circle for a batch, a square for a prompt."""
    read, multiplied = (float(np.median([r[name] for r in rows])) for name in ("gigabytes", "gigamacs"))
    intensities = [r["macs_per_byte"] for r in rows]
    x = np.geomspace(min(intensities) / 1.5, max(intensities) * 1.5, 200)
    axis.loglog(x, np.minimum(x * read, multiplied), color="black", linewidth=1, label="roofline")
    for scale in (axis.xaxis, axis.yaxis):
        scale.set_major_locator(pyplot().matplotlib.ticker.LogLocator(subs=(1, 2, 5) if scale is axis.yaxis else (1,)))
        scale.set_major_formatter("{x:g}")
    axis.yaxis.set_minor_formatter("")
    for row in rows:
        own = row["engine"] == OURS
        colour = BLUES[0] if own and row["variant"] == DENSE else BLUES[2] if own else COLOURS[row["engine"]]
        label = ("ours, dense" if row["variant"] == DENSE else "ours, replay") if own else row["engine"]
        speed = row["macs"] / row["ms"] / 1e6
        size = 28 if own else 16
        axis.scatter(
            row["macs_per_byte"],
            speed,
            color=colour,
            marker=MARKERS[row["workload"]],
            s=size,
            label=label,
            zorder=2 + own,
        )
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)


def plot_bars(rows: list[Row], path: Path) -> None:
    """Draw milliseconds of three sizes by precision, ours and peers, and the roofline's bound of each."""
    measured = [r for r in rows if "missing" not in r]
    panels = [(size, group, _bars(measured, size, group)) for size in BARS for group in BATCH_PEERS]
    panels = [panel for panel in panels if panel[2]]
    sizes = [s for s in BARS if any(p[0] == s for p in panels)]
    groups = [g for g in BATCH_PEERS if any(p[1] == g for p in panels)]
    if not panels:
        return
    figure, axes = pyplot().subplots(
        len(sizes), len(groups), figsize=(3.6 * len(groups), 3.5 * len(sizes)), squeeze=False
    )
    for axis in axes.flat:
        axis.axis("off")
    for size, group, found in panels:
        axis = axes[sizes.index(size)][groups.index(group)]
        axis.axis("on")
        _draw(axis, found)
        what = "batch" if size[0] == BATCH else "prompt of"
        axis.set_title(f"{TITLES[group]}, {what} {size[1]}", fontsize=10)
    for line in axes:
        line[0].set_ylabel("ms")
    figure.text(0.5, 0.004, "dashed: the roofline's bound of that step or prompt", ha="center", fontsize=8)
    figure.tight_layout(rect=(0, 0.015, 1, 1))
    _save(figure, path)


def _bars(rows: list[Row], size: tuple[str, int], group: str) -> list[Row]:
    """Return our rows of a size, dense first, then the peers."""
    workload, number = size
    name = "prompt" if workload == PREFILL else "batch"
    found = [r for r in rows if r["workload"] == workload and r[name] == number and r["group"] == group]
    return sorted(found, key=lambda r: (r["engine"] != OURS, r["coupled"]))


def _draw(axis: Any, rows: list[Row]) -> None:
    for i, row in enumerate(rows):
        own = row["engine"] == OURS
        colour = BLUES[min(i, len(BLUES) - 1)] if own else COLOURS[row["engine"]]
        axis.bar(i, row["ms"], color=colour, width=0.8)
        axis.text(i, row["ms"], shown(row["ms"]), ha="center", va="bottom", fontsize=7)
        if "bound_ms" in row:
            axis.plot([i - 0.45, i + 0.45], [row["bound_ms"]] * 2, color="black", linestyle="--", linewidth=1)
    axis.set_xticks(range(len(rows)), [_label(r) for r in rows], rotation=60, ha="right", fontsize=7)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)


def _label(row: Row) -> str:
    if row["engine"] != OURS:
        return f"{row['engine']} {row['precision']}"
    if row["variant"] == DENSE:
        return "ours, dense"
    return f"ours, replay {row['variant']}{' coupled' if row['coupled'] else ''}"


def _save(figure: Any, path: Path) -> None:
    figure.savefig(path, dpi=110, metadata={"Software": None} if path.suffix == ".png" else None)
    pyplot().close(figure)
