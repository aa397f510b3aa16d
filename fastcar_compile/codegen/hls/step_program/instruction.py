"""What an instruction of a decode step is: its fields, what has to hold of each, in Python and in C++ (docs/reference/drs_table.md)."""

import re
import struct
from dataclasses import dataclass, fields
from enum import IntEnum
from functools import cache
from types import CodeType
from typing import Annotated, Any, ClassVar, get_type_hints

from fastcar_compile.codegen.hls.control_table.table import PROGRAM_WORDS, network_words
from fastcar_compile.codegen.hls.design.step_loops import Repeated, VectorWork
from fastcar_compile.codegen.hls.step_program.cache_layout import BLOCK, Sizes, counts
from fastcar_compile.gates.draft import GAINS
from fastcar_compile.gates.registry import GateKind
from fastcar_compile.ir.types import StateRole

LANES = 4
"""float32 values in a memory word of 128 bits."""

BLOCK_WORDS = BLOCK // LANES
"""Memory words of a block of float32 values."""

GAIN_WORDS = 2 * GAINS // LANES
"""Memory words of a draft's table: its edges, padded with a zero, then its gains."""

MAX_CHANNELS = 1 << 18


class Place(IntEnum):
    """Where rows are: on chip, or in the output or input buffer."""

    X = 0  # the residual stream
    A = 1  # what the next product reads
    Y = 2  # what a product gives, and q, k and v side by side
    OUTPUT = 3
    INPUT = 4  # of short programs: the rows begin behind the list of rows; those of the output at word 0


# What has to hold of a field is an expression of `{}`, the field, of the other fields and of the sizes of a program
# (`Sizes`). Python evaluates it, and the kernel's loader has it with the words of C++: so there are no chains of comparisons,
# and brackets around an `and` in an `or`.


@dataclass(frozen=True)
class At:
    """The field is the first of so many words of a buffer. size: that of the buffer; words: an expression; state: what they keep."""

    size: str
    words: str = "1"
    state: StateRole | None = None

    def format(self, name: str) -> str:
        """Return what has to hold of a field of this name."""
        return f"{name} + {self.words} <= {self.size}"


Count = Annotated[int, "counts({})"]
XWords = Annotated[int, "counts({})", "{} <= x_words"]
Bit = Annotated[int, "{} <= 1"]
Gate = Annotated[GateKind, f"{{}} >= {min(GateKind).value}", f"{{}} <= {max(GateKind).value}"]
Weights = Annotated[int, At("weight_words")]


# By opcode, of the modules that are imported.
DECLARED: dict[int, type["Instruction"]] = {}


@dataclass(frozen=True)
class Instruction:
    """An instruction; `layer` is for reports. Fields follow in order, a word each; a float is a float32."""

    opcode: ClassVar[int]
    name: ClassVar[str]
    kernel: ClassVar[str]
    """What the kernel executes, in C++; or a process of fastcar_step.cpp."""
    rules: ClassVar[tuple[str, ...]] = ()
    """What has to hold besides of fields together."""
    layer: int

    def __init_subclass__(cls, opcode: int = 0, name: str = "") -> None:
        """Name a class by an opcode; one without is for others to share. name: as the class, if not given."""
        if opcode:
            cls.opcode, cls.name = opcode, name or re.sub(r"(?<!^)(?=[A-Z])", "_", cls.__name__).upper()
            DECLARED[opcode] = cls

    def states(self) -> dict[StateRole, int]:
        """Return the first words of what is kept from step to step."""
        noted = ((name, note) for name, own in field_notes(type(self)).items() for note in own)
        return {at.state: getattr(self, name) for name, at in noted if isinstance(at, At) and at.state}

    def loops(self, work: VectorWork) -> tuple[Repeated, ...]:
        """Return what iterates in the kernel, of an instruction without a product."""
        return tuple(part for part in self._parts(work) if part.times > 0)

    def _parts(self, _work: VectorWork) -> tuple[Repeated, ...]:
        return ()

    @property
    def words(self) -> tuple[int, ...]:
        """The 32-bit words: opcode and layer, then the fields, then zeros."""
        words = [self.opcode | self.layer << 16, *map(_word, list(vars(self).values())[1:])]
        return (*words, *[0] * (PROGRAM_WORDS - len(words)))

    def to_json(self) -> dict[str, Any]:
        """Return the fields by name; a place and a gate by their names."""
        named = {key: value.name if isinstance(value, IntEnum) else value for key, value in vars(self).items()}
        return {"opcode": self.name, **named}

    def fits(self, room: Sizes) -> bool:
        """Return whether the fields are in range, and nothing is read or written outside of its buffer."""
        return all(self._value(rule, room) for rule in rules_of(type(self)))

    def extent(self, name: str, room: Sizes) -> slice:
        """Return the words of a buffer of which this field is the first."""
        (words,) = (note.words for note in field_notes(type(self))[name] if isinstance(note, At))
        first = getattr(self, name)
        return slice(first, first + self._value(words, room))

    def _value(self, text: str, room: Sizes) -> Any:
        return eval(_compiled(text), {**FUNCTIONS, **room.named, **vars(self)})


def _word(value: int | float) -> int:
    # A Python float is a float32 word; an integer, a place or a gate is its value.
    # An int in a float field would be encoded as an integer.
    return struct.unpack("<I", struct.pack("<f", value))[0] if isinstance(value, float) else int(value)


def reads_query(gate: GateKind) -> bool:
    """Return whether a gate reads q."""
    return gate.reads_query


def in_memory(source: Place, target: Place) -> bool:
    """Return whether rows come from the input and go to the output, as those of a short program."""
    return (source, target) == (Place.INPUT, Place.OUTPUT)


def on_chip(source: Place, target: Place) -> bool:
    """Return whether a product reads and gives rows on chip."""
    return (source, target) == (Place.A, Place.Y)


def network_words_of(units: int, count: int) -> int:
    """Return the memory words of a network for rows of `count` words."""
    return network_words(units, LANES * count)


FUNCTIONS = {own.__name__: own for own in (counts, in_memory, network_words_of, on_chip, reads_query)}
"""What expressions call besides functions of the sizes; fastcar_step_program.hpp has all of them in C++."""


@cache
def _compiled(text: str) -> CodeType:
    return compile(text, "<instruction>", "eval")


@cache
def field_notes(kind: type[Instruction]) -> dict[str, tuple[str | At, ...]]:
    """Return what has to hold of each field behind `layer`, in order."""
    hints = get_type_hints(kind, include_extras=True)
    return {field.name: getattr(hints[field.name], "__metadata__", ()) for field in fields(kind)[1:]}


@cache
def rules_of(kind: type[Instruction]) -> tuple[str, ...]:
    """Return what has to hold of an instruction: of each field, and of fields together."""
    return (*(note.format(name) for name, given in field_notes(kind).items() for note in given), *kind.rules)
