"""What both models answer: the fields that an estimate and a simulation have in common, and the runs behind them."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, is_dataclass
from typing import Any, ClassVar

import numpy as np

from fastcar_compile.codegen.hls.design.dram import measured_cap
from fastcar_compile.estimate.question import Question
from fastcar_compile.estimate.rows import Mapping, passes_of
from fastcar_compile.estimate.run import Run
from fastcar_compile.estimate.step import Board, Step


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """A prediction for one step. Times in seconds; the mean of all forwards.

    Attributes:
        unit: what `tokens_per_second` counts: "token", or "backbone position" where the head is no part of the decoder.
        what_if: what was asked for that the compiler does not emit, as texts; empty: this is an emitted design.
        table_load_seconds: of loading the control table, once per session and not part of a step.
        measured_utilisation: bytes moved over the whole step, against the measured bandwidth of the weight memories.
        prefill_positions_per_second: of a kernel of whole steps, whose prompt is one launch and one weight stream per
            position; None: the host sequences the calls.
        speedup_over_dense: over `comparison["dense"]`.
        comparison: tokens per second of others on the same board and array. dense: the decoder compiled without replay:
            no gate, no caches. nothing_replays: as predicted, but every decision is to compute.
            static_mapping: row b on core b mod C; of the closed form only.
        passes_by_mapping: mapping -> passes of the busiest core, mean over forwards and layers; 0 where all replay.
        time_line: the segments of one step whose replays are nearest to the mean.
    """

    what_if: tuple[str, ...]
    target: str
    shape: str
    unit: str
    quant: str
    offload: str
    batch: int
    context: int
    replay_ratio: float
    tokens_per_second: float
    seconds_per_step: float
    table_load_seconds: float
    measured_utilisation: float
    prefill_positions_per_second: float | None
    speedup_over_dense: float
    comparison: dict[str, float]
    passes_by_mapping: dict[str, float]
    time_line: list[dict[str, Any]]

    LEFT_OUT: ClassVar[frozenset[str]] = frozenset()
    """Fields that are no plain values."""

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        return {f.name: _plain(getattr(self, f.name)) for f in fields(self) if f.name not in self.LEFT_OUT}


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return asdict(value) if is_dataclass(value) and not isinstance(value, type) else value


@dataclass(frozen=True)
class Runs:
    """The forwards of a question, and the same ones on others that it is compared with.

    Args:
        step: as asked. dense: of the decoder compiled without replay. nothing_replays: every decision is to compute.
        static: with the static mapping; None: it was not run. table: seconds of loading the control table.
    """

    step: Run
    dense: Run
    nothing_replays: Run
    static: Run | None
    table: float

    @classmethod
    def of(cls, question: Question, board: Board, mapping: Mapping = Mapping.DRS, *, static: bool = False) -> Runs:
        """Return the runs of a question on its board."""
        trace, attended = question.decisions, question.attended
        computing = np.zeros_like(trace)
        nothing = Run.of(board, computing, attended, mapping)
        table = Step()
        table.call("load table", 0, board, board.engine.table_call())
        return cls(
            Run.of(board, trace, attended, mapping),
            Run.of(board.dense, computing, attended, mapping) if board.gate is not None else nothing,
            nothing,
            Run.of(board, trace, attended, Mapping.STATIC) if static else None,
            table.seconds,
        )

    def common(self, question: Question, cores: int) -> dict[str, Any]:
        """Return the fields of `Prediction`."""
        work, trace = question.workload, question.decisions
        others = {"dense": self.dense, "nothing_replays": self.nothing_replays, "static_mapping": self.static}
        return {
            "what_if": question.what_if,
            "target": question.target.name,
            "shape": work.shape.name,
            "unit": work.shape.unit,
            "quant": work.quant,
            "offload": work.offload,
            "batch": work.batch,
            "context": work.context,
            "replay_ratio": float(trace.mean()),
            "tokens_per_second": work.batch / self.step.seconds,
            "seconds_per_step": self.step.seconds,
            "table_load_seconds": self.table,
            "measured_utilisation": self.step.bytes / self.step.seconds / measured_cap(question.target),
            "prefill_positions_per_second": 1 / self.dense.seconds if question.kernel else None,
            "speedup_over_dense": self.dense.seconds / self.step.seconds,
            "comparison": {name: work.batch / run.seconds for name, run in others.items() if run is not None},
            "passes_by_mapping": {mapping.value: float(passes_of(trace, cores, mapping).mean()) for mapping in Mapping},
            "time_line": [asdict(segment) for segment in self.step.typical.segments],
        }
