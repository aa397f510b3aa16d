"""The pictures of docs/measurements/doom.md. The same results give the same bytes."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from fastcar_compile.tune.evaluate import plots
from replay_doom.curves import WHOLE, Row, curve
from replay_doom.sequences import KINDS
from replay_doom.setup import DELTA, HEADS, LEARNED, LIMITS, MEAN, RANDOMLY, Variant

SHOWN_COST = 2.2
"""Highest NLL relative to dense that is drawn."""

STYLES = {MEAN: "#1b6ca8", HEADS: "#3a9bdc", DELTA: "#d1495b", LEARNED: "#3a7d44", RANDOMLY: "#777"}
TUNED_STYLE = {LEARNED: "#3a7d44", RANDOMLY: "#777"}
COLOURS = 128
"""Colours of a stored strip: it is a third as large as with all of them."""


def quality(rows: Mapping[str, Sequence[Row]], path: Path) -> None:
    """Draw cost against replay of all frames, and of each kind of motion: gates of the trained and the tuned decoder.

    Args:
        rows: decoder -> its rows.
    """
    plt = plots.pyplot()
    groups = [WHOLE, *(kind for kind in KINDS if kind in rows["trained"][0]["groups"])]
    figure, grid = plt.subplots(1, len(groups), figsize=(3.5 * len(groups), 4.4), layout="constrained", sharey=True)
    for axes, group in zip(grid, groups, strict=True):
        for name, styles, line in (("trained", STYLES, "-"), ("tuned", TUNED_STYLE, "--")):
            for variant, colour in styles.items():
                _line(axes, rows.get(name, []), variant, group, (colour, line, name))
        for limit in LIMITS:
            axes.axhline(limit, color="black", linewidth=0.6, linestyle=":")
        axes.set(ylim=(0.97, SHOWN_COST), yscale="log", xlabel="replayed share of the forwards t ≥ F, %")
        ticks = (1, *LIMITS, 1.2, 1.5, 2)
        axes.set_yticks(ticks, [f"{tick:g}×" for tick in ticks])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
        axes.set_title({WHOLE: "all frames"}.get(group, group))
    grid[0].set_ylabel("NLL / dense NLL (held-out, true past)")
    figure.legend(*grid[0].get_legend_handles_labels(), loc="outside lower center", ncols=5, fontsize=8)
    plots.save_figure(plt, figure, path)


def _line(axes: Any, rows: Sequence[Row], variant: Variant, group: str, style: tuple[str, str, str]) -> None:
    points = curve(rows, variant, group)
    if len(points) == 1:
        return
    colour, line, decoder = style
    label = variant.name if decoder == "trained" else f"{variant.name} (tuned)"
    share, cost = [100 * p.replay for p in points], [p.cost for p in points]
    axes.plot(share, cost, line, color=colour, marker=".", markersize=5, linewidth=1.2, label=label)


def drift(found: Mapping[str, Mapping[str, Any]], path: Path) -> None:
    """Draw PSNR by generated frame, against the dense rollout and against the recorded game, of both decoders."""
    plt = plots.pyplot()
    figure, grid = plt.subplots(1, 2, figsize=(11, 4), layout="constrained", sharey=True)
    for axes, against in zip(grid, ("dense", "true"), strict=True):
        for decoder, results in found.items():
            for name, result in results.items():
                errors = np.array(result["errors"][against])
                if not errors.any():
                    continue
                label = f"{name}{'' if decoder == 'trained' else ' (tuned)'}"
                label += f", {result['replay_ratio']:.0%} replayed" if result["replay_ratio"] else ""
                frames = np.arange(1, len(errors) + 1)
                axes.plot(frames, -10 * np.log10(np.maximum(errors, 1e-6)), label=label, linewidth=1.2)
        axes.set(xlabel="generated frame", ylabel="PSNR, dB")
        axes.set_title(f"against the {'dense rollout' if against == 'dense' else 'recorded game'}")
        axes.grid(alpha=0.3)
        axes.legend(fontsize=7)
    plots.save_figure(plt, figure, path)


def similarity(found: Mapping[str, Sequence[Mapping[str, float]]], path: Path) -> None:
    """Draw how well each score ranks the change of MLP outputs, layer by layer, for each kind of motion."""
    plt = plots.pyplot()
    groups = [name for name in (*KINDS, WHOLE) if found[name][0]]
    scores = [name for name in found[groups[-1]][0] if name != "output change"]
    figure, grid = plt.subplots(1, len(groups), figsize=(2.6 * len(groups), 3.4), layout="constrained", sharey=True)
    for axes, group in zip(grid, groups, strict=True):
        for score in scores:
            axes.plot([layer[score] for layer in found[group]], marker="o", markersize=4, label=score)
        axes.axhline(0, color="black", linewidth=0.8)
        axes.set(xlabel="layer", xticks=range(len(found[group])), ylim=(-0.6, 1))
        axes.set_title({WHOLE: "all frames"}.get(group, group))
        axes.grid(alpha=0.3)
    grid[0].set_ylabel("rank correlation with the\nchange of the MLP's output")
    figure.legend(*grid[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=8)
    plots.save_figure(plt, figure, path)


def strip(rows: Mapping[str, np.ndarray], path: Path) -> None:
    """Write rows of frames uint8 [frames, 64, 64, 3], one per label, as a PNG of few colours."""
    from common.strips import strip as drawn  # of the examples
    from measure import SHOWN_SIZE

    path.parent.mkdir(parents=True, exist_ok=True)
    image: Image.Image = drawn(rows, SHOWN_SIZE)
    image.quantize(COLOURS, dither=Image.Dither.NONE).save(path, format="PNG", optimize=True)
