"""How long the engine takes for a call, in closed form: a start of it, or an instruction of a step.

Loops come from the loop tables (codegen/hls/design/loops.py, controller.py). The cycle model of the tests
(tests/cycle_model) runs the same loops against each other; a test holds the two within 5 % of each other.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fastcar_compile.artifact.engine import WORD_BYTES, DraftProducts, EngineProduct, float_words
from fastcar_compile.codegen.hls.control_table.table import DrsTable
from fastcar_compile.codegen.hls.design import loops
from fastcar_compile.codegen.hls.design.controller import ControlOp, ControlWork, control_loops
from fastcar_compile.codegen.hls.design.design import Design
from fastcar_compile.codegen.hls.design.memory import EngineMemory, attend_clocks, memory_of
from fastcar_compile.codegen.hls.design.spec import LinearSpec
from fastcar_compile.codegen.hls.design.step_loops import AttendWork, Repeated
from fastcar_compile.codegen.hls.design.usage import FIFO_WORDS
from fastcar_compile.config.targets import Target
from fastcar_compile.errors import count_text


@dataclass(frozen=True)
class NamedProduct:
    """A product of a call by name; `inner`: its values stay in the cores."""

    name: str
    product: EngineProduct
    inner: bool = False


CONTROL_NAMES = {ControlOp.GATE: "TAS, DRS", ControlOp.TABLE: "load table"}
"""Names of the controller's span where the call is made for its sake."""


@dataclass(frozen=True)
class EngineCall:
    """What one start of the engine has to do: the controller first, then the array.

    An instruction LINEAR or MLP of a step program is the same region, with rows on chip.

    Args:
        control: what the controller does. products: one, or the two of an MLP; none: the array has nothing to do.
        load: of the array. last_load: of its last product, where that has fewer rows: a draft, which has two for each
            that replays. ports: weight ports, 128 bits each. fifo_words: words of a port's FIFO; an AXI port has one for all that
            it carries.
        rows_on_chip, results_on_chip: whether rows come from the chip and stay there.
    """

    control: ControlWork
    products: tuple[NamedProduct, ...]
    load: loops.LoadLoop
    ports: int
    rows_on_chip: bool = False
    results_on_chip: bool = False
    last_load: loops.LoadLoop | None = None
    fifo_words: int = FIFO_WORDS

    def load_of(self, number: int) -> loops.LoadLoop:
        """Return what the array does in a product."""
        return self.last_load if self.last_load is not None and number == len(self.products) - 1 else self.load

    def before(self, number: int) -> tuple[loops.Loop, ...]:
        """Return the loops before a product's tiles: quantisation, and of a draft the difference of its rows."""
        product, load = self.products[number].product, self.load_of(number)
        drafted = loops.subtract_loops(product.inputs, load.rows) if load is not self.load else ()
        return (*drafted, *loops.quantize_loops(product, load))

    @property
    def title(self) -> str:
        """What the call is for: its products, and the rows that compute."""
        products = [named.name for named in self.products]
        if not products:
            return self.control_name
        if self.last_load is not None:
            return f"draft, {count_text(self.last_load.rows, 'row')}"
        return f"{'MLP' if len(products) > 1 else products[0]}, {count_text(self.load.rows, 'row')}"

    @property
    def control_name(self) -> str:
        """The controller's span on the time line."""
        return CONTROL_NAMES.get(self.control.op, "control")

    def product_bytes(self, number: int) -> int:
        """Return the bytes of weights and scales that all ports read from the memory for a product."""
        return self.products[number].product.port_words * self.ports * WORD_BYTES


@dataclass(frozen=True)
class LoopCall:
    """An instruction of a step program whose loops run one after the other."""

    name: str
    parts: tuple[Repeated, ...]

    @property
    def title(self) -> str:
        """What the instruction does."""
        return self.name

    @property
    def bytes(self) -> int:
        """Bytes that it moves."""
        words = sum(part.times * sum(loop.trips for loop in part.loops if loop.moves) for part in self.parts)
        return words * WORD_BYTES


@dataclass(frozen=True)
class AttendCall:
    """The instruction ATTEND of a step program."""

    work: AttendWork
    name: str = "attention"

    @property
    def title(self) -> str:
        """What the instruction does, and the positions that it reads."""
        return f"{self.name}, {self.work.positions} positions"

    @property
    def bytes(self) -> int:
        """Bytes of keys and values that it reads."""
        return self.work.words * self.work.ports * WORD_BYTES


Call = EngineCall | LoopCall | AttendCall


@dataclass(frozen=True)
class CallPart:
    """A span of a call on the time line.

    unit: what it waits for: drs: TAS unit and controller; memory, ports, compute: the array; edge: rows in and out;
    attend: attention in the fabric; vector: the loops of an instruction without a weight or cache stream.
    """

    name: str
    unit: str
    seconds: float
    bytes: float = 0.0


class Engine:
    """The engine of a design on a board, and how long its calls take. control: sizes of its control table.

    Stages of tiles overlap at the pace of the slowest, or of a weight stream that is slower than that.
    """

    def __init__(self, design: Design, target: Target, control: DrsTable) -> None:
        self.design, self.target, self.control = design, target, control
        self.memory = memory_of(design, target)
        self._known: dict[Call, tuple[CallPart, ...]] = {}

    @property
    def clock_hz(self) -> float:
        """Clocks per second."""
        return self.design.budget.clock_mhz * 1e6

    @property
    def cores(self) -> int:
        """Cores of the array."""
        return self.design.mlp.cores

    def load(self, rows: int, passes: int) -> loops.LoadLoop:
        """Return what the array does for so many rows. passes: of the core that has most of them."""
        return loops.LoadLoop(rows, passes, self.cores, self.design.scale_rows, self.design.engine == "rtl")

    def array_call(
        self, linears: Sequence[LinearSpec], load: loops.LoadLoop, *, on_chip: bool = False, stays: bool = False
    ) -> EngineCall:
        """Return one start for a linear or for the two of an MLP: the controller only places the rows.

        Args:
            on_chip: it is an instruction of a step program, with its rows on chip. stays: so are its results.
        """
        last = len(linears) - 1
        products = tuple(NamedProduct(x.name, self._product(x), i < last) for i, x in enumerate(linears))
        work = ControlWork(ControlOp.PLACE, self.control)
        fifo = (self.design.step_fifo_words if on_chip else FIFO_WORDS) // self.design.axi_words
        return EngineCall(work, products, load, self.design.ports, on_chip, stays, fifo_words=fifo)

    def draft_call(self, products: DraftProducts, load: loops.LoadLoop) -> EngineCall:
        """Return the request of a draft. `load`: of its first product, of x and of the recalled x."""
        named = NamedProduct("draft", products.first, inner=True), NamedProduct("outer", products.outer)
        last = self.design.load(load.rows // 2)
        work = ControlWork(ControlOp.PLACE, self.control)
        fifo = self.design.step_fifo_words // self.design.axi_words
        return EngineCall(work, named, load, self.design.ports, True, True, last, fifo)

    def control_call(self, op: ControlOp) -> EngineCall:
        """Return one start for a decision, or the one that loads the control table."""
        return EngineCall(ControlWork(op, self.control), (), self.load(0, 0), self.design.ports)

    def parts_of(self, call: Call) -> tuple[CallPart, ...]:
        """Return the spans of a call; a call that is known is not timed again."""
        if call not in self._known:
            self._known[call] = self.parts(call)
        return self._known[call]

    def _product(self, linear: LinearSpec) -> EngineProduct:
        """Return how this engine computes a linear: as it is emitted, else with the tiles that its buffers hold."""
        own = {(p.inputs, p.channels): p for p in self.design.products}
        return own.get((linear.inputs, linear.channels)) or self.design.fit(linear)

    def parts(self, call: Call) -> tuple[CallPart, ...]:
        """Return the spans of a call."""
        if isinstance(call, AttendCall):
            clocks = attend_clocks(call.work, self.memory)
            return (CallPart(call.name, "attend", clocks / self.clock_hz, call.bytes),)
        if isinstance(call, LoopCall):
            clocks = sum(part.times * loop_clocks(part.loops, self.memory) for part in call.parts)
            return (CallPart(call.name, "vector", clocks / self.clock_hz, call.bytes),)
        decided = loop_clocks(control_loops(call.control), self.memory) / self.clock_hz
        return CallPart(call.control_name, "drs", decided), *(self._array(call) if call.products else ())

    def _array(self, call: EngineCall) -> tuple[CallPart, ...]:
        parts, gap = list[CallPart](), _load_clocks(call, self.memory)
        left = _write_clocks(call)
        for number, named in enumerate(call.products):
            gap += sum(loop.cycles for loop in call.before(number))
            clocks, unit = _product_clocks(call, number, self.memory, gap)
            parts.append(CallPart(f"{named.name} rows", "edge", gap / self.clock_hz))
            parts.append(CallPart(named.name, unit, clocks / self.clock_hz, call.product_bytes(number)))
            left, gap = left - gap - clocks, 0.0
        if left > 0:
            parts.append(CallPart("rows out", "edge", left / self.clock_hz))
        return tuple(parts)


def loop_clocks(serial: Iterable[loops.Loop], memory: EngineMemory) -> float:
    """Return the clocks of loops that run one after the other; one that moves words waits for the first."""
    free = 1 - memory.refreshing
    return sum(
        loop.cycles if not loop.moves else loop.interval * loop.trips / free + loop.depth + memory.latency
        for loop in serial
    )


def _load_clocks(call: EngineCall, memory: EngineMemory) -> float:
    """Return the clocks until the rows of x are in the cores; each is a burst that waits for the memory."""
    inputs, rows = call.products[0].product.inputs, call.load.rows
    places, loaded = loops.places_loop().cycles, loops.load_loop(inputs, call.load).cycles
    if call.rows_on_chip:
        return float(places + loaded)
    words = rows * float_words(inputs)
    # The weights' FIFOs fill meanwhile: until they are full, all ports share the memory.
    shared = 0.0 if memory.rows_apart else min(words, call.fifo_words + memory.window)
    moved = shared / min(1.0, memory.rate / (call.ports + 1)) + words - shared
    return float(max(max(places, memory.latency) + loaded, moved + rows * memory.latency))


def _write_clocks(call: EngineCall) -> float:
    """Return the clocks that the process works that writes the rows of every tile."""
    last = call.products[-1]
    load = call.load_of(len(call.products) - 1)
    return float(last.product.tiles * loops.tile_loops(last.product, load).send.trips)


def _product_clocks(call: EngineCall, number: int, memory: EngineMemory, gap: float) -> tuple[float, str]:
    """Return the clocks of a product's tiles, and what bounds them.

    Args:
        gap: clocks before the first tile, in which the FIFOs fill.
    """
    named, load = call.products[number], call.load_of(number)
    product = named.product
    rate = min(1 - memory.refreshing, memory.rate / call.ports)
    stages = [loop.cycles for loop in loops.tile_loops(product, load, inner=named.inner).stages]
    pace, tail = max(stages), float(sum(stages[1:]))
    ahead = min(gap * rate, call.fifo_words + memory.window)
    # Full FIFOs ask for nothing until a burst has room, whose first word comes a latency later.
    idle = memory.burst + memory.latency if ahead < gap * rate else 0.0
    left = product.port_words - ahead
    streamed = (left / rate + idle if left > 0 else 0.0) + tail
    flowing = float((product.tiles - 1) * pace + sum(stages))
    if streamed > flowing:
        return streamed, "memory"
    return flowing, "ports" if pace == stages[0] else "compute"
