"""Design-space exploration: of every engine that fits the board, the one with the least predicted time per token."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from fastcar_compile.codegen.hls.design import MlpDesign, choose_design, designs, excess
from fastcar_compile.codegen.hls.spec import BoardBudget, MlpSpec
from fastcar_compile.errors import TargetError
from fastcar_compile.estimate.engine import Engine
from fastcar_compile.estimate.host import HostModel
from fastcar_compile.estimate.shapes import DecoderShape, Quant
from fastcar_compile.estimate.step import Board, simulate_step
from fastcar_compile.targets import Target

MAX_CORES = 8
"""More cores share one weight stream without more bandwidth; each costs its own copy of the buffers."""

_NO_HOST = HostModel(1.0, 1e18, 1e18, 1e18, 0.0, "none: only the engine is compared")


@dataclass(frozen=True)
class Exploration:
    """The chosen design and why it is no faster.

    Attributes:
        seconds_per_layer: predicted time of the engine's work of one dense layer.
        bound_by: "memory" (DRAM bandwidth), "ports" (AXI ports times clock), or the resource that a faster design
            would need more of (LUT, FF, DSP, BRAM36).
        tried: designs compared. rejected: of those, the ones that do not fit.
        faster: why the fastest design that does not fit was refused; empty when none is faster.
    """

    design: MlpDesign
    seconds_per_layer: float
    bound_by: str
    tried: int
    rejected: int
    faster: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Plain values for the manifest and the report; without the design."""
        return {name: value for name, value in asdict(self).items() if name != "design"}


def explore(shape: DecoderShape, quant: Quant, batch: int, target: Target) -> Exploration:
    """Compare cores, ports and tile lengths for a dense decode step of `batch` rows.

    Raises:
        CompileError: there is no kernel for this MLP, or nothing fits the board; the text has the numbers.
        TargetError: the target has no fabric.
    """
    budget = budget_of(target)
    found = [(_seconds(d, shape, quant, target), d) for d in _candidates(shape, quant, batch, budget)]
    fitting = [(*time, d) for time, d in found if not excess(d)]
    if not fitting:
        choose_design(_spec(shape, quant, batch, 1), budget)  # raises, with the numbers of the smallest design
    seconds, bound, design = min(fitting, key=lambda item: (item[0], _share(item[2])))
    beyond = [(time[0], d) for time, d in found if excess(d) and time[0] < seconds * 0.999]
    faster = excess(min(beyond, key=lambda item: item[0])[1]) if beyond else []
    return Exploration(
        design=design,
        seconds_per_layer=seconds,
        bound_by=faster[0].split()[0] if faster else bound,
        tried=len(found),
        rejected=len(found) - len(fitting),
        faster=tuple(faster),
    )


def _candidates(shape: DecoderShape, quant: Quant, batch: int, budget: BoardBudget) -> Iterator[MlpDesign]:
    for cores in range(1, min(batch, MAX_CORES) + 1):
        yield from designs(_spec(shape, quant, batch, cores), budget)


def _spec(shape: DecoderShape, quant: Quant, batch: int, cores: int) -> MlpSpec:
    return MlpSpec(
        hidden=shape.hidden,
        intermediate=shape.intermediate,
        batch=batch,
        layers=shape.layers,
        cores=cores,
        activation=shape.activation,
        gated=shape.gated,
        quant="w4a8" if quant == "w4a8" else "w8a8",
    )


def _seconds(design: MlpDesign, shape: DecoderShape, quant: Quant, target: Target) -> tuple[float, str]:
    """Time of the engine for one layer, all rows computing, and what bounds most of it."""
    one = shape.model_copy(update={"layers": 1, "vocab": 0})
    engine, rows = Engine.of(design, target), design.spec.batch
    board = Board(engine, _NO_HOST, one, quant, rows, fabric_linears=True, fabric_attention=False, kv_bytes=0)
    step = simulate_step(board, [engine.load((False,) * rows, drs=True)], 1, prefetch=False)
    streams = {unit: step.busy[unit] for unit in ("memory", "ports", "compute") if unit in step.busy}
    return step.seconds, max(streams, key=lambda unit: streams[unit])


def _share(design: MlpDesign) -> float:
    budget, usage = design.budget, design.usage
    return usage.dsp / budget.dsp + usage.bram36 / budget.bram36 + usage.lut / budget.lut


def budget_of(target: Target) -> BoardBudget:
    """What a design may use of a target.

    Raises:
        TargetError: the target has no fabric.
    """
    if target.fabric is None:
        raise TargetError(f"{target.name} has no fabric to place an engine on", mend="choose a board (fastcar targets)")
    return BoardBudget(
        part=target.part or "",
        clock_mhz=target.fabric.clock_mhz,
        axi_ports=sum(m.ports for m in target.weight_memories),
        axi_bits=min(m.width_bits for m in target.weight_memories),
        **target.budget(),
    )


def resources_of(design: MlpDesign, target: Target) -> dict[str, Any]:
    """Per resource: estimated use, the limit (device times utilisation limit) and the use's share of it."""
    limits = target.budget()
    return {
        name: {"used": used, "limit": limits[name], "share": used / limits[name] if limits[name] else 0.0}
        for name, used in asdict(design.usage).items()
    }
