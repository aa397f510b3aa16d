"""Time lines of the cycle model as the page holds them: every call once, however often a step starts it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from fastcar_compile.estimate.call import AttendCall, Call, LoopCall
from fastcar_compile.inspection.models import CallKind, CallProcess, CallStart, Span, StepLine
from fastcar_compile.simulation.network import ProcessResult, Result
from fastcar_compile.simulation.network import Span as ClockSpan
from fastcar_compile.simulation.time_line import TimeLine

DECIMALS = 10
"""Of seconds on the page: a tenth of a nanosecond."""


class Calls:
    """The distinct calls of time lines, and the names of what processes do."""

    def __init__(self) -> None:
        self.kinds: list[CallKind] = []
        self.states: list[str] = []
        self._known: dict[Call, int] = {}
        self._places: dict[str, int] = {}

    def step(self, line: TimeLine, title: str, note: str) -> StepLine:
        """Return a step; its calls are added to `kinds`."""
        segments = line.step.segments
        return StepLine(
            title=title,
            note=note,
            replay=line.replay,
            seconds=round(line.step.seconds, DECIMALS),
            spans=tuple(
                Span(
                    name=s.name,
                    layer=s.layer,
                    unit=s.unit,
                    start=round(s.start, DECIMALS),
                    seconds=round(s.seconds, DECIMALS),
                    bytes=s.bytes,
                )
                for s in segments
            ),
            calls=tuple(
                CallStart(
                    name=call_name(c.call),
                    layer=c.layer,
                    start=round(c.start, DECIMALS),
                    seconds=round(c.seconds, DECIMALS),
                    kind=None if c.result is None else self._kind(c.call, c.result),
                )
                for c in line.calls
            ),
        )

    def _kind(self, call: Call, result: Result) -> int:
        if call not in self._known:
            self._known[call] = len(self.kinds)
            processes = tuple(self._process(name, process) for name, process in result.processes.items())
            self.kinds.append(CallKind(name=call_name(call), clocks=round(result.clocks), processes=processes))
        return self._known[call]

    def _process(self, name: str, process: ProcessResult) -> CallProcess:
        return CallProcess(
            name=name,
            busy=round(process.busy),
            stalls={cause: round(clocks) for cause, clocks in process.stalls.items()},
            spans=tuple(self._spans(process.spans)),
        )

    def _spans(self, spans: Iterable[ClockSpan]) -> Iterator[int]:
        last = 0
        for span in spans:
            start, end = round(span.start), round(span.end)
            if end > start:
                yield from (start - last, end - start, self._state(span.state))
                last = end

    def _state(self, state: str) -> int:
        if state not in self._places:
            self._places[state] = len(self.states)
            self.states.append(state)
        return self._places[state]


def call_name(call: Call) -> str:
    """Return what a call is for: its products, its rows where several can compute, and what is special in it."""
    if isinstance(call, LoopCall):
        return call.name
    if isinstance(call, AttendCall):
        return f"{call.name}, {call.work.positions} positions"
    products = [named.name for named in call.products]
    if not products:
        return call.control_name
    names = "MLP" if len(products) > 1 else products[0]
    return f"{names}, {call.load.rows} row{'s' if call.load.rows > 1 else ''}"


def step_lines(lines: Sequence[TimeLine], share: str) -> tuple[tuple[StepLine, ...], Calls]:
    """Return the steps with their calls. share: what decided which rows replay, of the second one."""
    calls = Calls()
    found: list[StepLine] = []
    for line in lines:
        if line.replay:
            note = f"{share} The step nearest to the mean is shown."
            found.append(calls.step(line, f"{line.replay:.1%} replay", note))
        else:
            found.append(calls.step(line, "dense", "The decoder compiled without replay."))
    return tuple(found), calls
