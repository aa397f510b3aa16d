"""One decode step in two layers of detail: the host's segments and calls, and the processes inside of the calls.

`fastcar simulate` runs every forward of its decisions by the cycle model. Here the closed form chooses the forward, and
the cycle model runs the calls of that one alone, each of them once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast

import numpy as np

from fastcar_compile.codegen.hls.design.control_loops import ControlShape
from fastcar_compile.codegen.hls.design.design import Design
from fastcar_compile.estimate.call import Call, CallPart
from fastcar_compile.estimate.engine import ClosedForm
from fastcar_compile.estimate.question import Question
from fastcar_compile.estimate.run import Run
from fastcar_compile.estimate.step import Board, Step
from fastcar_compile.simulation.engine import CycleModel
from fastcar_compile.simulation.network import Result
from fastcar_compile.targets import Target

MOST_TILES = 6_000
"""Tiles of all calls that are simulated for time lines: a few seconds of work. The calls of a 7B decoder fit."""


@dataclass(frozen=True)
class StartedCall:
    """One start of the engine, or an instruction, in a step; seconds.

    result: what its processes did; None: it is in closed form.
    """

    start: float
    seconds: float
    layer: int
    call: Call
    result: Result | None


@dataclass(frozen=True)
class TimeLine:
    """A decode step. replay: share of all decisions that replay. step: its segments. calls: in order."""

    replay: float
    step: Step
    calls: tuple[StartedCall, ...]
    clock_hz: float


class _Bounded(CycleModel):
    """Simulates calls until their tiles are too many together; the others are in closed form."""

    def __init__(self, design: Design, target: Target, control: ControlShape) -> None:
        super().__init__(design, target, control)
        self.left = MOST_TILES
        self._closed = ClosedForm(design, target, control)

    def parts(self, call: Call) -> tuple[CallPart, ...]:
        """Return the spans of a call."""
        if call.tiles > self.left:
            return self._closed.parts_of(call)
        self.left -= call.tiles
        return super().parts(call)


def time_lines(question: Question) -> tuple[TimeLine, ...]:
    """Return the step of the decoder compiled without replay; then, where something replays, that of the question.

    Of the question's forwards it is the one that is nearest to their mean.
    """
    simulated, closed = question.board(_Bounded), question.board(ClosedForm)
    dense = np.zeros_like(question.decisions)
    found = [_line(simulated.dense, Run.of(closed.dense, dense, question.attended), 0.0)]
    if question.decisions.any():
        run = Run.of(closed, question.decisions, question.attended)
        found.append(_line(simulated, run, float(question.decisions.mean())))
    return tuple(found)


def _line(board: Board, run: Run, replay: float) -> TimeLine:
    step = run.forward.on(board)
    return TimeLine(replay, step, tuple(_calls(board, step)), board.engine.clock_hz)


def _calls(board: Board, step: Step) -> Iterator[StartedCall]:
    engine = cast("CycleModel", board.engine)
    layers = {segment.start: segment.layer for segment in step.segments}
    for start, call in step.calls:
        seconds = sum(part.seconds for part in engine.parts_of(call))
        yield StartedCall(start, seconds, layers[start], call, engine.results.get(call))
