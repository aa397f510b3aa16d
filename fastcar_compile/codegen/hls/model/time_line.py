"""The time line of one decode step, instruction by instruction: as events and, with matplotlib, as a picture.

The events have Chrome's trace format, which chrome://tracing, ui.perfetto.dev and the inspection page show.
"""

import json
from pathlib import Path
from typing import Any

from fastcar_compile.codegen.hls.model.step import Step
from fastcar_compile.codegen.hls.model.system import Estimate
from fastcar_compile.support.packages import pyplot

LANES = {
    "host": ("launch", "host", "attention"),
    "call": ("call",),
    "controller": ("drs",),
    "array": ("memory", "ports", "compute"),
    "rows in and out": ("edge",),
    "attention": ("attend",),
    "vector": ("vector",),
}
"""Lane -> what its spans wait for: the host; the calls and instructions of the engine; and what they consist of."""

LANE_OF = {unit: lane for lane, units in enumerate(LANES.values()) for unit in units}

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
OTHER_COLOUR = "#5b9a58"
HEAD_LAYERS = 3
"""Layers shown in full beside the whole token."""


def trace_events(step: Step) -> list[dict[str, Any]]:
    """Return the lanes and spans of a step as events, times in microseconds; the category is what a span waits for."""
    spans = [*step.segments, *step.calls]
    used = {LANE_OF[span.unit] for span in spans}
    names = [
        {"name": "thread_name", "ph": "M", "pid": 1, "tid": lane, "args": {"name": name}}
        for lane, name in enumerate(LANES)
        if lane in used
    ]
    return names + [
        {"name": span.name, "cat": span.unit, "ph": "X", "pid": 1, "tid": LANE_OF[span.unit]}
        | {"ts": round(1e6 * span.start, 4), "dur": round(1e6 * span.seconds, 4)}
        | {"args": {"layer": span.layer, "bytes": span.bytes}}
        for span in spans
    ]


def write_time_line(estimate: Estimate, path: Path) -> None:
    """Write the step nearest to the mean as a file that Chrome and Perfetto open."""
    what = f"{estimate.shape} {estimate.quant} on {estimate.target}, predicted, {estimate.replay_ratio:.1%} replay"
    note = {"estimate": what, "what_if": list(estimate.what_if)}
    events = trace_events(estimate.step)
    path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms", "otherData": note}) + "\n")


def plot_time_line(estimate: Estimate, path: Path) -> None:
    """Draw the whole token above, its first layers below; the file's ending chooses the format."""
    plt = pyplot()
    last = max((s.start + s.seconds for s in estimate.step.segments if s.layer < HEAD_LAYERS), default=0.0)
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
    for span in (*estimate.step.segments, *estimate.step.calls):
        if span.start >= end:
            continue
        start, length, lane = span.start * 1e3, span.seconds * 1e3, LANE_OF[span.unit]
        colour = COLOURS.get(span.unit, OTHER_COLOUR)
        axis.broken_barh([(start, length)], (lane - 0.4, 0.8), facecolors=colour, edgecolor=colour, linewidth=0.4)
        if labels and length > 0.03 * end * 1e3:
            axis.text(start + length / 2, lane, span.name, ha="center", va="center", fontsize=7, color="white")
    axis.set_yticks(range(len(LANES)), LANES)
    axis.set_xlim(0, end * 1e3)
    axis.set_ylim(len(LANES) - 0.5, -0.5)
