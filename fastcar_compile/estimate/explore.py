"""Design-space exploration: of every engine that fits the board, the one with the least predicted time per token."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from fastcar_compile.codegen.hls import design as mlp_design
from fastcar_compile.codegen.hls import engine_design
from fastcar_compile.codegen.hls.design import (
    WORD_BYTES,
    MlpDesign,
    StageShape,
    choose_design,
    designs,
    with_prefetch,
)
from fastcar_compile.codegen.hls.drs_cost import controller_usage
from fastcar_compile.codegen.hls.engine_design import EngineDesign, choose_engine, engines
from fastcar_compile.codegen.hls.linear_spec import EngineSpec, LinearSpec
from fastcar_compile.codegen.hls.resources import Usage
from fastcar_compile.codegen.hls.spec import BoardBudget, MlpSpec
from fastcar_compile.drs.table import AttentionShape, Limits
from fastcar_compile.errors import TargetError
from fastcar_compile.estimate.engine import memory_rate
from fastcar_compile.targets import Target

MAX_CORES = 8
"""More cores share one weight stream without more bandwidth; each costs its own copy of the buffers."""

Design = MlpDesign | EngineDesign


@dataclass(frozen=True)
class Exploration:
    """The chosen design and why it is no faster.

    Attributes:
        seconds_per_step: predicted time of the engine's work in a step in which everything computes.
        bound_by: "memory" (DRAM bandwidth), "ports" (AXI ports times clock), "compute" (scaling of the sums), or the
            resource that a faster design would need more of (LUT, FF, DSP, BRAM36, URAM).
        tried: designs compared. rejected: of those, the ones that do not fit.
        faster: why the fastest design that does not fit was refused; empty when none is faster.
    """

    design: Design
    seconds_per_step: float
    bound_by: str
    tried: int
    rejected: int
    faster: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Plain values for the manifest and the report; without the design."""
        return {name: getattr(self, name) for name in ("seconds_per_step", "bound_by", "tried", "rejected", "faster")}


def mlp_of(design: Design) -> MlpDesign:
    """The MLP's part of a design."""
    return design.mlp if isinstance(design, EngineDesign) else design


def design_from_json(data: Mapping[str, Any]) -> Design:
    """A design from a manifest."""
    return EngineDesign.from_json(data) if "linears" in data else MlpDesign.from_json(data)


def explore(
    spec: MlpSpec, target: Target, attention: AttentionShape, linears: Sequence[LinearSpec] = ()
) -> Exploration:
    """Compare cores, ports, tile lengths and tile memories.

    Args:
        spec: the MLP; its `cores` are chosen here.
        attention: heads that the TAS unit is built for; the engine has to leave room for it.
        linears: every other linear of a step that the engine computes, in call order; none: a kernel for MLPs alone.

    Raises:
        CompileError: there is no kernel for this MLP, or nothing fits the board; the text has the numbers.
        TargetError: the target has no fabric.
    """
    budget = _beside(budget_of(target), controller_usage_of(attention))
    spec = replace(spec, cores=1)
    least = choose_engine(EngineSpec(spec, tuple(linears)), budget) if linears else choose_design(spec, budget)
    found = [(_seconds(d, target), d) for d in _candidates(spec, tuple(linears), budget)]
    seconds, design = min(((s, d) for s, d in found if not _excess(d)), key=lambda f: (f[0], _share(f[1])))
    assert seconds <= _seconds(least, target)
    beyond = [(s, d) for s, d in found if _excess(d) and s < seconds * 0.999]
    faster = _excess(min(beyond, key=lambda item: item[0])[1]) if beyond else []
    return Exploration(
        design=_with_prefetch(design),
        seconds_per_step=seconds,
        bound_by=faster[0].split()[0] if faster else _bound(mlp_of(design), target),
        tried=len(found),
        rejected=sum(bool(_excess(d)) for _s, d in found),
        faster=tuple(faster),
    )


def _candidates(spec: MlpSpec, linears: tuple[LinearSpec, ...], budget: BoardBudget) -> Iterator[Design]:
    for cores in range(1, min(spec.batch, MAX_CORES) + 1):
        one = replace(spec, cores=cores)
        yield from engines(EngineSpec(one, linears), budget) if linears else designs(one, budget)


def _with_prefetch(design: Design) -> Design:
    """The prefetch buffer takes what the chosen design leaves; no design is chosen for it."""
    if isinstance(design, EngineDesign):
        return replace(design, mlp=with_prefetch(design.mlp))
    return with_prefetch(design)


def _excess(design: Design) -> list[str]:
    return engine_design.excess(design) if isinstance(design, EngineDesign) else mlp_design.excess(design)


def _seconds(design: Design, target: Target) -> float:
    """Time of the engine in a step in which everything computes: clocks, and waiting for memory beyond them."""
    mlp = mlp_of(design)
    if isinstance(design, EngineDesign):
        cycles = mlp.spec.layers * design.mlp_cycles + sum(design.cycles(name) for name in design.linears)
        words = mlp.spec.layers * mlp.port_words + sum(s.port_words for s in design.linears.values())
    else:
        cycles, words = mlp.spec.layers * mlp.cycles, mlp.spec.layers * mlp.port_words
    clock = mlp.budget.clock_mhz * 1e6
    streamed = words * mlp.ports * WORD_BYTES / memory_rate(target, mlp.ports)
    return cycles / clock + max(0.0, streamed - words / clock)


def _bound(mlp: MlpDesign, target: Target) -> str:
    if memory_rate(target, mlp.ports) < mlp.ports * WORD_BYTES * mlp.budget.clock_mhz * 1e6:
        return "memory"
    return "ports" if all(_fetches(s, mlp.rows_per_core) for s in (mlp.gate_up, mlp.down)) else "compute"


def _fetches(stage: StageShape, rows: int) -> bool:
    """Whether fetching a tile is the slowest of what happens to it."""
    return stage.head_words + stage.tile_words >= stage.scale_cycles(rows)


def _share(design: Design) -> float:
    budget, usage = mlp_of(design).budget, design.usage
    memories = usage.bram36 / budget.bram36 + (usage.uram / budget.uram if budget.uram else 0.0)
    return usage.dsp / budget.dsp + usage.lut / budget.lut + memories


def budget_of(target: Target) -> BoardBudget:
    """What a design may use of a target.

    Raises:
        TargetError: the target has no fabric.
    """
    if target.fabric is None:
        raise TargetError(f"{target.name} has no fabric to place an engine on", hint="choose a board (fastcar targets)")
    return BoardBudget(
        part=target.part or "",
        clock_mhz=target.fabric.clock_mhz,
        axi_ports=sum(m.ports for m in target.weight_memories),
        axi_bits=min(m.width_bits for m in target.weight_memories),
        **target.budget(),
    )


def controller_usage_of(attention: AttentionShape) -> Usage:
    """Resources of the TAS unit and DRS controller beside the engine."""
    return controller_usage(Limits(cores=MAX_CORES, key_words=attention.key_words))


def _beside(budget: BoardBudget, usage: Usage) -> BoardBudget:
    return replace(budget, **{name: max(0, getattr(budget, name) - used) for name, used in asdict(usage).items()})


def resources_of(design: Design, attention: AttentionShape, target: Target) -> dict[str, Any]:
    """Per resource: estimated use of engine and controller, the device's limit for a design, and the share of it."""
    limits, controller = target.budget(), asdict(controller_usage_of(attention))
    used = {name: count + controller[name] for name, count in asdict(design.usage).items()}
    return {
        name: {"used": count, "limit": limits[name], "share": count / limits[name] if limits[name] else 0.0}
        for name, count in used.items()
    }
