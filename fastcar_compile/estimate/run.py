"""All forwards of a trace on a board."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fastcar_compile.estimate.engine import RowLoad
from fastcar_compile.estimate.instructions import run_program
from fastcar_compile.estimate.rows import Decisions, Mapping, passes_of
from fastcar_compile.estimate.step import STREAMING, Board, Step, simulate_step


@dataclass(frozen=True)
class Forward:
    """What a step depends on: the arguments of `simulate_step`."""

    loads: tuple[RowLoad, ...]
    attended: float

    def on(self, board: Board) -> Step:
        """Return the step of this forward on a board."""
        if board.kernel is not None:
            return run_program(board, board.kernel, self.loads, self.attended)
        return simulate_step(board, self.loads, self.attended)


@dataclass(frozen=True)
class Run:
    """All forwards of a trace: means per step, and the step nearest to the mean with the forward that it is of."""

    seconds: float
    bytes: float
    weight_bytes: float
    busy: dict[str, float]
    typical: Step
    forward: Forward

    @property
    def streaming(self) -> float:
        """Seconds in which the array or the weight ports work."""
        return sum(self.busy.get(unit, 0.0) for unit in STREAMING)

    @classmethod
    def of(
        cls,
        board: Board,
        trace: Decisions,
        attended: NDArray[np.integer],
        mapping: Mapping = Mapping.DRS,
    ) -> Run:
        """Return the means; forwards of equal load are simulated once, at their mean of attended positions."""
        loads = np.stack([(~trace).sum(-1), passes_of(trace, board.engine.cores, mapping)], axis=-1)
        keys = loads.reshape(len(trace), -1)
        kinds, kind_of, counts = np.unique(keys, axis=0, return_inverse=True, return_counts=True)
        means = np.bincount(kind_of.reshape(-1), attended) / counts
        forwards = [
            Forward(tuple(map(RowLoad, kind[::2], kind[1::2])), mean_attended)
            for kind, mean_attended in zip(kinds.tolist(), means, strict=True)
        ]
        steps = [forward.on(board) for forward in forwards]
        share = counts / counts.sum()

        def mean(values: list[float]) -> float:
            return float(np.dot(share, values))

        seconds = mean([s.seconds for s in steps])
        typical = min(range(len(steps)), key=lambda n: abs(steps[n].seconds - seconds))
        units = sorted({unit for s in steps for unit in s.busy})
        return cls(
            seconds,
            mean([s.bytes for s in steps]),
            mean([s.weight_bytes for s in steps]),
            {unit: mean([s.busy.get(unit, 0.0) for s in steps]) for unit in units},
            steps[typical],
            forwards[typical],
        )
