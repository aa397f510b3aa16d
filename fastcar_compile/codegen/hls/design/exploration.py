"""Design-space exploration: of every engine that fits the board, the one with the least predicted time per token."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache, partial
from typing import Any

from fastcar_compile.artifact.accelerator_section import ExplorationPart
from fastcar_compile.artifact.engine import (
    WORD_BITS,
    WORD_BYTES,
    BoardBudget,
    EngineKind,
    EngineProduct,
    MlpSpec,
    Usage,
)
from fastcar_compile.codegen.hls.control_table.table import Limits
from fastcar_compile.codegen.hls.design.controller import controller_usage
from fastcar_compile.codegen.hls.design.design import Design
from fastcar_compile.codegen.hls.design.loops import product_cycles, tail_cycles, tile_loops
from fastcar_compile.codegen.hls.design.memory import attend_clocks, bank_excess, memory_of, memory_rate, require_banks
from fastcar_compile.codegen.hls.design.spec import (
    DraftSpec,
    LinearSpec,
    StepSpec,
    check_drafts,
    check_linears,
    check_mlp,
)
from fastcar_compile.codegen.hls.design.step_loops import AttendWork
from fastcar_compile.codegen.hls.design.step_usage import short_usage, step_usage
from fastcar_compile.codegen.hls.design.usage import ROW_PORTS
from fastcar_compile.codegen.hls.step_program.cache_layout import MAX_PORTS
from fastcar_compile.config.targets import MEASURED, Target
from fastcar_compile.errors import CompileError, TargetError

MAX_CORES = 16
"""Cores of the array, at most. Design choice: half of the most rows, so that a dense step of them takes two passes."""

EVERY_COUNT = 8
"""Up to here every number of AXI ports is tried, beyond it every second one."""

TILE_WORD_CHOICES = (2048, 1024, 512, 256, 128, 64)
"""Words of one tile on one port: a few BRAM depths, then smaller."""

URAM_TILE_WORD_CHOICES = (2048, 1024)
"""The same where tiles are in UltraRAM: half a block or less. Longer tiles only lengthen the first and the last."""

NEARLY = 1.05
"""A larger array may take this much longer for one row than the fastest: it has to find more scales."""

WORTH_PORTS = 2.0
"""How much longer a dense step may take for the sake of the ports that serve one row best. Design choice."""

AS_FAST = 1.001
"""Designs within a thousandth of the fastest count as equally fast."""


@dataclass(frozen=True)
class Exploration:
    """The chosen design and why it is no faster.

    Attributes:
        seconds_per_step: predicted time of the engine's work in a step in which everything computes.
        bound_by: "memory" (DRAM bandwidth), "ports" (AXI ports times clock), "compute" (scaling of the sums), or the
            resource that a faster design would need more of (LUT, FF, DSP, BRAM36, URAM, banks).
        tried: designs compared. rejected: of those, the ones that do not fit.
        faster: why the fastest design that does not fit was refused; empty when none is faster. beyond: its time.
    """

    design: Design
    seconds_per_step: float
    bound_by: str
    tried: int
    rejected: int
    faster: tuple[str, ...]
    beyond: float = 0.0

    @property
    def slow(self) -> str:
        """What to tell of several rows that take over twice as long as on the fastest design that does not fit; "": nothing."""
        mlp = self.design.mlp
        if mlp.batch == 1 or self.seconds_per_step <= WORTH_PORTS * self.beyond:
            return ""
        times = [f"{1e3 * s:,.3g} ms" for s in (self.seconds_per_step, self.beyond)]
        return (
            f"{mlp.batch} row(s) on {mlp.cores} core(s) and {self.design.ports} weight port(s) take {times[0]} a step; a design that "
            f"does not fit, for {', '.join(self.faster)}, takes {times[1]}. Fewer rows may decode more tokens"
        )

    @property
    def part(self) -> ExplorationPart:
        """The reasons for the manifest and the report, without the design."""
        return ExplorationPart(**{name: getattr(self, name) for name in ExplorationPart.model_fields})


@dataclass(frozen=True)
class KernelSpec:
    """What one kernel has to do.

    Args:
        mlp: that all layers share; its `cores` are chosen by the exploration.
        controller: what the gate's unit and the controller have to hold, on any number of cores; the engine leaves room for them.
        linears: every other linear of a step that the engine computes, in call order.
        step: the rest of a step; None: the host computes it. drafts: of its layers.
        engine: see Design.
    """

    mlp: MlpSpec
    controller: Limits
    linears: Sequence[LinearSpec] = ()
    step: StepSpec | None = None
    drafts: Sequence[DraftSpec] = ()
    engine: EngineKind = "hls"


def explore(
    wanted: KernelSpec, target: Target, cores: Sequence[int] | None = None, *, banks: bool = True
) -> Exploration:
    """Compare ports, cores, tile lengths and tile memories.

    First come the weight ports that serve one row best; the array of a larger batch has no fewer, unless it would take
    more than twice as long when every row computes. Of the arrays that fit and serve one row nearly as fast as the
    fastest does, that is taken which is fastest when every row computes, and of equally fast ones the one with most cores.

    The time of a kernel of whole steps has its attention over half of the cache, the mean of a video, with the query
    heads and rows side by side that take the least time of those that fit beside the array.

    Args:
        cores: numbers of cores to compare; None: those of `core_choices`.
        banks: whether the memory banks behind every weight port have to hold its part of the weights.

    Raises:
        CompileError: there is no kernel for this MLP or a linear, or nothing fits; the text has the numbers.
        TargetError: the target has no fabric.
    """
    mlp, others = wanted.mlp, (wanted.linears, wanted.drafts)
    short = Usage() if wanted.step else short_usage(mlp.layers, len(wanted.linears))
    budget = _beside(budget_of(target), controller_usage(wanted.controller) + short)
    numbers = cores or core_choices((2 if wanted.drafts else 1) * mlp.batch)
    room = _Room(target, wanted.step, banks=banks)
    # One row on one core shows how many ports a single sequence can use.
    alone = [
        (step_seconds(d, target), d) for d in designs(replace(mlp, batch=1, cores=1), budget, *others, wanted.engine)
    ]
    ports = min(((s, _share(d), d.ports) for s, d in alone if not room.excess(d)), default=(0.0, 0.0, 1))[2]
    every = [d for n in numbers for d in designs(replace(mlp, cores=n), budget, *others, wanted.engine)]
    fitting = [room.attending(d) for d in every if not room.excess(d)]
    if not fitting:
        # Where no design fits the banks, the banks are the reason; else the least design shows what the fabric lacks.
        require_banks(target, [room.of_banks(d) for d in every if not room.of_fabric(d)])
        least = min(every, key=lambda d: (d.mlp.cores, d.ports, d.buffers.tile_words))
        raise _too_large(least, room.of_fabric(least), whole=wanted.step is not None)
    seconds, design = _best(fitting, ports, room)
    short = _with_short_tiles(design, target)
    # Shorter heads of tiles may move from block RAM to LUTs.
    design = design if room.of_fabric(short, max(1, short.group), short.share) else short
    # Designs with fewer ports were given up for one row's sake, so they are no reason why the chosen one is no faster.
    found = [d for d in every if d.ports >= design.ports]
    beside = [(room.seconds(replace(d, group=design.group, share=design.share)), room.excess(d)) for d in found]
    refused = [(s, texts) for s, texts in beside if texts]
    beyond, faster = min(((s, t) for s, t in refused if s < seconds / AS_FAST), default=(seconds, []))
    return Exploration(
        design=design,
        seconds_per_step=seconds,
        bound_by=faster[0].split()[0].rstrip(":") if faster else _bound(design, target),
        tried=len(found),
        rejected=len(refused),
        faster=tuple(faster),
        beyond=beyond,
    )


class _Room:
    """What a board has for designs, which mostly have the same streams, and the same units beside the array."""

    def __init__(self, target: Target, step: StepSpec | None, *, banks: bool) -> None:
        self._target, self._step, self._banks = target, step, banks
        self._bank_excess = cache(partial(bank_excess, target))
        self._units: dict[tuple[int, ...], Usage] = {}

    def seconds(self, design: Design, rows: int | None = None) -> float:
        """Return the engine's time in a step in which `rows` rows compute, or every row, with its attention."""
        seconds = step_seconds(design, self._target, rows)
        if self._step is None:
            return seconds
        own, share, mlp = self._step, design.share, design.mlp
        work = AttendWork(
            rows=share * -(-(rows or mlp.batch) // share),
            key_heads=own.key_heads,
            queries=own.queries,
            group=design.group,
            blocks=own.blocks,
            ports=design.ports,
            positions=-(-own.positions // 2),
            share=share,
        )
        clock = design.budget.clock_mhz * 1e6
        return seconds + mlp.layers * attend_clocks(work, memory_of(design, self._target)) / clock

    def attending(self, design: Design) -> tuple[float, Design]:
        """Return the time of a design with what runs side by side in its attention, and this design."""
        sides = [] if self._step is None else [s for s in self._step.sides() if not self.of_fabric(design, *s)]
        made = [replace(design, group=group, share=share) for group, share in sides] or [design]
        timed = [(self.seconds(d), d) for d in made]
        least = min(s for s, _d in timed)
        # Of equally fast ones the first, which has the fewest heads and rows side by side.
        return next((s, d) for s, d in timed if s <= least * AS_FAST)

    def excess(self, design: Design) -> list[str]:
        """Return what a design needs more of than the board has: of the fabric, and of the banks behind a port."""
        text = self.of_banks(design)
        return [*self.of_fabric(design), *([f"banks: {text}"] if text else [])]

    def of_banks(self, design: Design) -> str | None:
        """Return how the banks fall short of a design's weights and caches; None: they do not."""
        if not self._banks:
            return None
        caches = self._step.cache_bytes(design.mlp, design.ports) if self._step else 0
        return self._bank_excess(ports=design.axi_weight_ports, stream_bytes=design.weight_bytes + caches)

    def of_fabric(self, design: Design, group: int = 1, share: int = 1) -> list[str]:
        """Return what it needs more of than the fabric has, with so many query heads of so many rows side by side."""
        if self._step is None:
            return design.excess()
        key = design.ports, design.mlp.batch, group, share
        if key not in self._units:
            self._units[key] = step_usage(design, self._step.buffers(design.mlp, group, share))
        # The format of a step program has at most MAX_PORTS weight ports.
        ports = [f"ports {design.ports} of {MAX_PORTS}"] if design.ports > MAX_PORTS else []
        return ports + (design.usage + self._units[key]).over(design.budget)


def _with_short_tiles(design: Design, target: Target) -> Design:
    """Return the design with the linears' tiles as short as makes them fastest: the last tile's stages end without a word streamed."""
    memory, load = memory_of(design, target), design.load()
    rate = min(1 - memory.refreshing, memory.rate / design.ports)

    @cache
    def best(product: EngineProduct) -> EngineProduct:
        cuts = [product, *(product.cut(product.tile_words // parts) for parts in (2, 4))]
        return min(cuts, key=lambda own: max(product_cycles(own, load), own.port_words / rate + tail_cycles(own, load)))

    return replace(design, linears={name: best(product) for name, product in design.linears.items()})


def core_choices(batch: int) -> list[int]:
    """Return the fewest cores for every number of passes over a batch, at most `MAX_CORES`."""
    return sorted({cores for passes in range(1, batch + 1) if (cores := -(-batch // passes)) <= MAX_CORES})


def _best(fitting: Sequence[tuple[float, Design]], ports: int, room: _Room) -> tuple[float, Design]:
    """Return the design to take, and its time when every row computes; see `explore`."""
    fastest = min(s for s, _d in fitting)
    counts = sorted({d.ports for _s, d in fitting}, reverse=True)
    kept, least = list(fitting), fastest
    for count in [n for n in counts if n <= ports] or counts[-1:]:
        enough = [(s, d, room.seconds(d, 1)) for s, d in fitting if d.ports == count]
        once = min(row for _s, _d, row in enough)
        kept = [(s, d) for s, d, row in enough if row <= once * NEARLY]
        least = min(s for s, _d in kept)
        if least <= fastest * WORTH_PORTS:
            break
    as_fast = [(s, d) for s, d in kept if s <= least * AS_FAST]
    return min(as_fast, key=lambda item: (-item[1].mlp.cores, _share(item[1])))


def designs(
    mlp: MlpSpec,
    budget: BoardBudget,
    linears: Sequence[LinearSpec] = (),
    drafts: Sequence[DraftSpec] = (),
    engine: EngineKind = "hls",
) -> Iterator[Design]:
    """Yield every design that the board has ports for, most ports and longest tiles first, whether or not it fits.

    Raises:
        CompileError: there is no kernel for this MLP, a linear or a draft, or the board has too few ports.
    """
    check_mlp(mlp, drafts=bool(drafts))
    check_linears(linears)
    check_drafts(mlp.batch, drafts)
    if budget.axi_bits < WORD_BITS or budget.axi_ports < ROW_PORTS + 1:
        raise CompileError(
            f"{budget.part} has {budget.axi_ports} memory port(s) of {budget.axi_bits} bits; "
            f"the engine needs {ROW_PORTS + 1} of {WORD_BITS}",
            hint="choose a board with more or wider memory ports",
        )
    memories = [(words, True) for words in URAM_TILE_WORD_CHOICES if budget.uram]
    memories += [(words, False) for words in TILE_WORD_CHOICES]
    for axi_ports in range(budget.axi_ports - ROW_PORTS, 0, -1):
        # Beyond EVERY_COUNT one more port changes little, and every design costs time to try.
        if axi_ports > EVERY_COUNT and axi_ports % 2:
            continue
        ports = axi_ports * budget.axi_words
        for words, uram in memories:
            made = _design(mlp, budget, linears, ports, words, uram)
            own = {d.name: d.products(mlp, ports).cut(words) for d in drafts}
            yield replace(made, drafts=own, engine=engine)


def _design(
    mlp: MlpSpec, budget: BoardBudget, linears: Sequence[LinearSpec], ports: int, words: int, uram: bool
) -> Design:
    bits, parts = mlp.weight_bits, 2 if mlp.gated else 1
    first = EngineProduct(mlp.hidden, parts * mlp.intermediate, ports, bits=bits, bias=mlp.up_bias)
    second = EngineProduct(mlp.intermediate, mlp.hidden, ports, bits=bits, bias=mlp.down_bias)
    others = {n.name: _cut(n.inputs, n.channels, ports, bits, n.biased, words) for n in linears}
    made = Design(mlp, budget, ports, first.cut(words), second.cut(words), others, uram)
    return replace(made, axi_words=budget.axi_words)


@lru_cache(maxsize=4096)
def _cut(inputs: int, channels: int, ports: int, bits: int, biased: bool, words: int) -> EngineProduct:
    """Return a linear's product; layers have equal ones."""
    return LinearSpec("", inputs, channels, biased).product(ports, bits).cut(words)


def _too_large(least: Design, excess: Sequence[str], *, whole: bool) -> CompileError:
    mlp = least.mlp
    widest = max(least.linears, key=lambda name: least.linears[name].inputs, default=None)
    also = f" and linears of up to {least.linears[widest].inputs} inputs ({widest})" if widest else ""
    kind = "a kernel of whole steps" if whole else "an engine"
    return CompileError(
        f"{kind} for an MLP of {mlp.hidden} / {mlp.intermediate}{also}, {mlp.batch} row(s) on {mlp.cores} core(s) "
        f"does not fit {least.budget.part}: {', '.join(excess)} (estimates, least design: {least.ports} port, "
        f"{least.lanes} lanes)",
        hint="use a larger board or a smaller batch"
        + (", or offload='linears'" if whole else ", or offload='mlp'" if least.linears else ""),
    )


def step_seconds(design: Design, target: Target, rows: int | None = None) -> float:
    """Return the array's time in a step in which `rows` rows compute, or every row: clocks, and waiting beyond them."""
    clock, words = design.budget.clock_mhz * 1e6, design.step_words
    streamed = words * design.ports * WORD_BYTES / memory_rate(target, design.ports)
    # The clocks already have a word per clock on every port. Memory adds only the time beyond that.
    return design.step_cycles(design.load(rows)) / clock + max(0.0, streamed - words / clock)


def _bound(design: Design, target: Target) -> str:
    if memory_rate(target, design.ports) < design.ports * WORD_BYTES * design.budget.clock_mhz * 1e6:
        return "memory"
    tiles = [tile_loops(product, design.load()) for product in (design.gate_up, design.down)]
    fetching = all(loops.fetch.trips >= max(stage.trips for stage in loops.stages) for loops in tiles)
    return "ports" if fetching else "compute"


def _share(design: Design) -> float:
    budget, usage = design.budget, design.usage
    memories = usage.bram36 / budget.bram36 + (usage.uram / budget.uram if budget.uram else 0.0)
    return usage.dsp / budget.dsp + usage.lut / budget.lut + memories


def budget_of(target: Target) -> BoardBudget:
    """Return what a design may use of a target.

    Raises:
        TargetError: the target has no fabric.
    """
    if target.fabric is None:
        hint = f"give a board: --target zcu102; see `fastcar targets`. A CPU is measured: {MEASURED}"
        raise TargetError(f"{target.name} has no fabric to place an engine on", hint=hint)
    return BoardBudget(
        part=target.part or "",
        clock_mhz=target.fabric.clock_mhz,
        axi_ports=sum(m.ports for m in target.weight_memories),
        axi_bits=min(m.width_bits for m in target.weight_memories),
        **target.budget(),
    )


def _beside(budget: BoardBudget, usage: Usage) -> BoardBudget:
    # A controller that is larger than the board leaves nothing, and then no design fits.
    return replace(budget, **{name: max(0, getattr(budget, name) - used) for name, used in vars(usage).items()})


def resources_of(design: Design, wanted: KernelSpec, target: Target) -> dict[str, Any]:
    """Return per resource the estimated use of the kernel, the limit for a design, and the share of it."""
    limits, used = target.budget(), design.usage + controller_usage(wanted.controller)
    if wanted.step is None:
        used += short_usage(design.mlp.layers, len(design.linears))
    else:
        used += step_usage(design, wanted.step.buffers(design.mlp, design.group, design.share))
    return {
        name: {"used": count, "limit": limits[name], "share": count / limits[name] if limits[name] else 0.0}
        for name, count in vars(used).items()
    }
