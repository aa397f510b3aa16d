"""A step in Chrome's trace event format: open it in chrome://tracing or ui.perfetto.dev."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fastcar_compile.simulation.network import Result
from fastcar_compile.simulation.simulate import Simulation

HOST, ENGINE = 1, 2
HOST_LANES = ("launch", "host", "attention")
"""Units of the time line that are the host's."""

ENGINE_LANES = ("drs", "edge", "memory", "ports", "compute", "attend", "vector")
"""Those that are the fabric's."""


def chrome_trace(simulation: Simulation) -> dict[str, Any]:
    """Return the step nearest to the mean; times in microseconds.

    The processes of a call stand in detail where it starts first. Where the same call starts again, every process is
    one span from its start to its end.
    """
    events = [_named(HOST, None, "host and calls"), _named(ENGINE, None, "engine, process by process")]
    lanes = {unit: number for number, unit in enumerate((*HOST_LANES, *ENGINE_LANES))}
    events += [_named(HOST, number, unit) for unit, number in lanes.items()]
    for segment in simulation.typical.segments:
        span = (segment.start, segment.seconds)
        events.append(_event(segment.name, HOST, lanes[segment.unit], span, {"layer": segment.layer}))
    names = list(simulation.processes)
    events += [_named(ENGINE, number, name) for number, name in enumerate(names)]
    seen = set[int]()
    for start, call in simulation.typical.calls:
        result = simulation.calls[call]
        events += _call_events(result, names, start, simulation.clock_hz, detail=id(result) not in seen)
        seen.add(id(result))
    what = f"{simulation.shape} {simulation.quant} on {simulation.target}, predicted"
    note = {"simulation": what, "what_if": list(simulation.what_if)}
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": note}


def write_trace(simulation: Simulation, path: Path) -> None:
    """Write the trace as JSON."""
    path.write_text(json.dumps(chrome_trace(simulation)) + "\n")


def _call_events(
    result: Result, names: list[str], start: float, clock_hz: float, *, detail: bool
) -> list[dict[str, Any]]:
    events = []
    for number, name in enumerate(names):
        process = result.processes.get(name)
        if process is None:
            continue
        if not detail:
            events.append(_event("as before", ENGINE, number, (start, process.end / clock_hz), {"busy": process.busy}))
            continue
        for span in process.spans:
            at = (start + span.start / clock_hz, (span.end - span.start) / clock_hz)
            events.append(_event(span.state, ENGINE, number, at, {}))
    return events


def _event(name: str, pid: int, tid: int, span: tuple[float, float], args: dict[str, Any]) -> dict[str, Any]:
    start, seconds = (round(1e6 * value, 4) for value in span)
    return {"name": name, "ph": "X", "pid": pid, "tid": tid, "ts": start, "dur": seconds, "args": args}


def _named(pid: int, tid: int | None, name: str) -> dict[str, Any]:
    kind = "process_name" if tid is None else "thread_name"
    return {"name": kind, "ph": "M", "pid": pid, "tid": tid or 0, "args": {"name": name}}
