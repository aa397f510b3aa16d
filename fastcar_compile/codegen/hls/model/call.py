"""What the closed form and the cycle model are asked about: a start of the engine, or an instruction of a step."""

from __future__ import annotations

from dataclasses import dataclass

from fastcar_compile.codegen.hls.design.control_loops import ControlOp, ControlWork
from fastcar_compile.codegen.hls.design.loops import Load
from fastcar_compile.codegen.hls.design.product import WORD_BYTES, Product
from fastcar_compile.codegen.hls.design.step_loops import AttendWork, Repeated
from fastcar_compile.codegen.hls.design.usage import FIFO_WORDS, STEP_FIFO_WORDS
from fastcar_compile.errors import count_text


@dataclass(frozen=True)
class NamedProduct:
    """A product of a call by name; `inner`: its values stay in the cores."""

    name: str
    product: Product
    inner: bool = False


CONTROL_NAMES = {ControlOp.GATE: "TAS, DRS", ControlOp.TABLE: "load table"}
"""Names of the controller's span where the call is made for its sake."""


@dataclass(frozen=True)
class EngineCall:
    """What one start of the engine has to do: the controller first, then the array.

    An instruction LINEAR or MLP of a step program is the same region, with rows on chip.

    Args:
        control: what the controller does. products: one, or the two of an MLP; none: the array has nothing to do.
        load: of the array. ports: weight ports, 128 bits each.
        rows_on_chip, results_on_chip: whether rows come from the chip and stay there.
    """

    control: ControlWork
    products: tuple[NamedProduct, ...]
    load: Load
    ports: int
    rows_on_chip: bool = False
    results_on_chip: bool = False

    @property
    def title(self) -> str:
        """What the call is for: its products, and the rows that compute."""
        products = [named.name for named in self.products]
        if not products:
            return self.control_name
        return f"{'MLP' if len(products) > 1 else products[0]}, {count_text(self.load.rows, 'row')}"

    @property
    def fifo_words(self) -> int:
        """Words of a weight port's FIFO."""
        return STEP_FIFO_WORDS if self.rows_on_chip else FIFO_WORDS

    @property
    def control_name(self) -> str:
        """The controller's span on the time line."""
        return CONTROL_NAMES.get(self.control.op, "control")

    @property
    def words(self) -> int:
        """128-bit words of weights that the array takes of one port."""
        return sum(p.product.port_words for p in self.products)

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
    def words(self) -> int:
        """128-bit words that it moves."""
        return sum(part.times * sum(loop.trips for loop in part.loops if loop.moves) for part in self.parts)


@dataclass(frozen=True)
class AttendCall:
    """The instruction ATTEND of a step program."""

    work: AttendWork
    name: str = "attention"

    @property
    def title(self) -> str:
        """What the instruction does, and the positions that it reads."""
        return f"{self.name}, {self.work.positions} positions"


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
