"""What an instruction of a decode step is: places, opcodes, and the words of its fields (docs/reference/drs_table.md)."""

import struct
from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, ClassVar

from fastcar_compile.codegen.hls.control_table.table import PROGRAM_WORDS
from fastcar_compile.codegen.hls.step_program.cache_layout import Sizes

LANES = 4
"""float32 values in a memory word of 128 bits."""


class Place(IntEnum):
    """Where rows are: on chip, or in the output or input buffer."""

    X = 0
    """The residual stream."""
    A = 1
    """What the next product reads."""
    Y = 2
    """What a product gives."""
    Q = 3
    K = 4
    OUTPUT = 5
    INPUT = 6
    """Of short programs: the rows begin behind the list of rows; those of the output at word 0."""


ROWS_ON_CHIP = 5
"""Places on chip."""


class Opcode(IntEnum):
    """The first byte of an instruction."""

    LOAD = 1
    NORM = 2
    LINEAR = 3
    MLP = 4
    ROTATE = 5
    APPEND_KEYS = 6
    APPEND_VALUES = 7
    ATTEND = 8
    ADD = 9
    DECIDE = 10
    REPLAY = 11
    END = 12
    DECIDE_ROWS = 13
    RECALL = 14
    DRAFT = 15
    REPLAY_DRAFT = 16
    LAYER_NORM = 17
    STORE = 18


@dataclass(frozen=True)
class Instruction(ABC):
    """An instruction; `layer` is for reports. Fields follow in order, a word each; a float is a float32."""

    opcode: ClassVar[Opcode]
    layer: int

    @property
    def words(self) -> tuple[int, ...]:
        """The 32-bit words: opcode and layer, then the fields, then zeros."""
        words = [self.opcode | self.layer << 16, *map(_word, list(vars(self).values())[1:])]
        return (*words, *[0] * (PROGRAM_WORDS - len(words)))

    def to_json(self) -> dict[str, Any]:
        """Return the fields by name; a place and a gate by their names."""
        named = {key: value.name if isinstance(value, IntEnum) else value for key, value in vars(self).items()}
        return {"opcode": self.opcode.name, **named}

    @abstractmethod
    def fits(self, room: Sizes) -> bool:
        """Return whether the fields are in range, and nothing is read or written outside of its buffer."""


def _word(value: int | float) -> int:
    # A Python float is a float32 word; an integer, a place or a gate is its value.
    # An int in a float field would be encoded as an integer.
    return struct.unpack("<I", struct.pack("<f", value))[0] if isinstance(value, float) else int(value)


def on_chip(*places: int) -> bool:
    """Return whether these are places on chip, all of them different."""
    return all(place < ROWS_ON_CHIP for place in places) and len(set(places)) == len(places)


def in_memory(source: int, target: int) -> bool:
    """Return whether rows come from the input and go to the output, as those of a short program."""
    return (source, target) == (Place.INPUT, Place.OUTPUT)
