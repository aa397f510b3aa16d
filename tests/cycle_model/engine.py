"""The engine's calls by the cycle model."""

from cycle_model.attend import attend_network
from cycle_model.call import ARRAY, CONTROL, engine_network, loop_network
from cycle_model.kernel import simulate_network
from cycle_model.network import Result
from fastcar_compile.codegen.hls.control_table.table import DrsTable
from fastcar_compile.codegen.hls.design.design import Design
from fastcar_compile.codegen.hls.model.engine import AttendCall, Call, CallPart, Engine, EngineCall, LoopCall
from fastcar_compile.codegen.hls.model.question import Question
from fastcar_compile.codegen.hls.model.system import SystemRun
from fastcar_compile.config.targets import Target


class CycleModel(Engine):
    """Runs a call's network once and remembers what it did.

    Attributes:
        results: every call that was simulated, in order, and what its network did.
    """

    def __init__(self, design: Design, target: Target, control: DrsTable) -> None:
        super().__init__(design, target, control)
        self.results: dict[Call, Result] = {}

    def parts(self, call: Call) -> tuple[CallPart, ...]:
        """Return the spans of a call: the controller; then until the first tile of each product, and from then on."""
        if isinstance(call, AttendCall):
            result = simulate_network(attend_network(call.work, self.memory))
            return self._whole(call, result, "attend", call.work.passes)
        if isinstance(call, LoopCall):
            return self._whole(call, simulate_network(loop_network(call, self.memory)), "vector")
        result = simulate_network(engine_network(call, self.memory))
        self.results[call] = result
        decided = result.processes[CONTROL].end
        parts = [CallPart(call.control_name, "drs", decided / self.clock_hz)]
        if call.products:
            parts += self._products(call, result, decided)
        return tuple(part for part in parts if part.seconds > 0)

    def _whole(self, call: AttendCall | LoopCall, result: Result, unit: str, times: int = 1) -> tuple[CallPart, ...]:
        self.results[call] = result
        return (CallPart(call.name, unit, times * result.clocks / self.clock_hz, call.bytes),)

    def _products(self, call: EngineCall, result: Result, before: float) -> list[CallPart]:
        starts = [result.processes[ARRAY].starts[named.name] for named in call.products]
        ends = [*starts[1:], result.clocks]
        parts, unit = list[CallPart](), "compute"
        for number, (start, end) in enumerate(zip(starts, ends, strict=True)):
            name = call.products[number].name
            parts.append(CallPart(f"{name} rows", "edge", (start - before) / self.clock_hz))
            parts.append(CallPart(name, unit, (end - start) / self.clock_hz, call.product_bytes(number)))
            before = end
        return parts


def simulated(question: Question) -> tuple[SystemRun, CycleModel]:
    """Run all forwards of a question by the cycle model; return them and the engine, which has every call's result."""
    board = question.board(CycleModel)
    assert isinstance(board.engine, CycleModel)
    return SystemRun.of(board, question.decisions, question.attended), board.engine
