"""The engine's calls by the cycle model."""

from __future__ import annotations

from fastcar_compile.codegen.hls.design.design import Design
from fastcar_compile.codegen.hls.design.product import WORD_BYTES
from fastcar_compile.estimate.call import CallPart, EngineCall
from fastcar_compile.estimate.engine import EngineModel
from fastcar_compile.simulation.call import ARRAY, engine_network
from fastcar_compile.simulation.kernel import simulate_network
from fastcar_compile.simulation.network import Result
from fastcar_compile.targets import Target


class CycleModel(EngineModel):
    """Runs a call's network once and remembers what it did.

    Attributes:
        results: every call that was simulated, in order, and what its network did.
    """

    def __init__(self, design: Design, target: Target) -> None:
        super().__init__(design, target)
        self.results: dict[EngineCall, Result] = {}

    def parts(self, call: EngineCall) -> tuple[CallPart, ...]:
        """Return the spans of a call: until the first tile of each product is multiplied, and from then on."""
        result = simulate_network(engine_network(call, self.memory), watch=ARRAY, spans=True)
        self.results[call] = result
        starts = [result.processes[ARRAY].starts[named.name] for named in call.products]
        ends = [*starts[1:], result.clocks]
        parts, unit = [], bound_of(result)
        before = 0.0
        for named, start, end in zip(call.products, starts, ends, strict=True):
            parts.append(CallPart(f"{named.name} rows", "edge", (start - before) / self.clock_hz))
            moved = named.product.port_words * call.ports * WORD_BYTES
            parts.append(CallPart(named.name, unit, (end - start) / self.clock_hz, moved))
            before = end
        return tuple(part for part in parts if part.seconds > 0)


def bound_of(result: Result) -> str:
    """Return what bounds a call: memory, ports (a word per clock each), or compute: a stage that works more."""
    processes = result.processes
    waits = processes["read_weights"].stalls
    memory, full = (sum(v for k, v in waits.items() if k.startswith(kind)) for kind in ("memory", "FIFO full"))
    stages = {name: processes[name].busy for name in ("fetch_tile", ARRAY, "scale_tile", "finish_tile", "send_tile")}
    slowest = max(stages, key=lambda name: stages[name])
    if slowest != "fetch_tile" and stages[slowest] > 1.01 * stages["fetch_tile"]:
        return "compute"
    return "memory" if memory > full else "ports"
