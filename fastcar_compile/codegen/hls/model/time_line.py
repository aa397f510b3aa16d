"""The time line of one decode step, instruction by instruction, as events.

They have Chrome's trace format, which chrome://tracing, ui.perfetto.dev and the inspection page show.
"""

import json
from pathlib import Path
from typing import Any

from fastcar_compile.codegen.hls.model.step import StepCost
from fastcar_compile.codegen.hls.model.system import Estimate

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


def trace_events(step: StepCost) -> list[dict[str, Any]]:
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
