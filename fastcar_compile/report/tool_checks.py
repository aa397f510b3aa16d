"""Figures of a kernel's reports beside those of the model."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal

from fastcar_compile.codegen.hls.model.expected import Expected
from fastcar_compile.report.tool_reports import ToolLoop, ToolReports


@dataclass(frozen=True)
class Check:
    """A figure of a tool and the model's. what: of what, with its unit; worse: beyond what is allowed."""

    kind: Literal["loop", "clock", "resource"]
    what: str
    model: float
    tool: float
    source: str
    worse: bool

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        return asdict(self)


def compared(expected: Expected, found: ToolReports, tolerance: float) -> list[Check]:
    """Return every figure that both have.

    Args:
        tolerance: share by which a depth or a resource may be more than the model's.
    """
    return [*_clocks(expected, found), *_resources(expected, found, tolerance), *_loops(expected, found, tolerance)]


def _clocks(expected: Expected, found: ToolReports) -> Iterator[Check]:
    if found.period_ns is not None:
        asked = 1e3 / expected.clock_mhz
        yield Check("clock", "period, ns", round(asked, 3), found.period_ns, "Vitis HLS", found.period_ns > asked)
    if found.slack_ns is not None:
        yield Check("clock", "worst slack, ns", 0.0, found.slack_ns, "Vivado", found.slack_ns < 0)
    if found.clock_mhz is not None:
        # The binary has whole megahertz.
        slow = found.clock_mhz < int(expected.clock_mhz)
        yield Check("clock", "clock, MHz", expected.clock_mhz, found.clock_mhz, "xclbin", slow)


def _resources(expected: Expected, found: ToolReports, tolerance: float) -> Iterator[Check]:
    for source, used in (("Vitis HLS", found.hls), ("Vivado, device", found.placed)):
        for name, model in expected.resources.items():
            if name in used:
                # What is placed has the platform in it.
                worse = source == "Vitis HLS" and used[name] > model * (1 + tolerance)
                yield Check("resource", name, model, used[name], source, worse)


def _loops(expected: Expected, found: ToolReports, tolerance: float) -> Iterator[Check]:
    for loop in found.loops:
        place = _place(expected, loop)
        if place is None:
            continue
        (interval, depth), name = expected.loops[place], ".".join(place)
        yield Check("loop", f"{name}: interval", interval, loop.interval, "Vitis HLS", loop.interval > interval)
        if depth is not None and loop.depth is not None:
            # The model's depth does not count the clock in which an iteration starts.
            worse = loop.depth > (depth + 1) * (1 + tolerance)
            yield Check("loop", f"{name}: depth", depth + 1, loop.depth, "Vitis HLS", worse)


def _place(expected: Expected, loop: ToolLoop) -> tuple[str, str] | None:
    """Return the function and label of a loop in the sources; HLS adds template arguments to a module's name."""
    found = [place for place in expected.loops if place[1] == loop.label and place[0] in loop.function]
    return max(found, key=lambda place: len(place[0]), default=None)
