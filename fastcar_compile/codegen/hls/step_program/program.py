"""A decode step as a list of instructions: little-endian binary, JSON, reader (docs/reference/step_program.md)."""

from __future__ import annotations

import dataclasses
import struct
import zlib
from dataclasses import dataclass, fields
from enum import IntEnum
from functools import cache
from typing import Any, get_type_hints

from fastcar_compile.codegen.hls.step_program.instructions import (
    INSTRUCTION_WORDS,
    KINDS,
    Decide,
    DecideRows,
    End,
    Instruction,
    Load,
    Opcode,
    Place,
    Sizes,
)
from fastcar_compile.errors import UserError

# Instructions from their words, and the C++ header with the number of every word.


def decode(words: tuple[int, ...]) -> Instruction | None:
    """Return the instruction of these words; None: an unknown opcode, place or gate, or more words than its own."""
    kind = KINDS.get(words[0] & 0xFF)
    # Byte 1 of the first word is reserved; a set bit there is from a newer format.
    if kind is None or words[0] >> 8 & 0xFF:
        return None
    types = _types(kind)
    given, rest = words[1 : len(types) + 1], words[len(types) + 1 :]
    named = [(wanted, word) for wanted, word in zip(types, given, strict=True) if issubclass(wanted, IntEnum)]
    # Words behind the fields have to be zero: one instruction has one encoding, and so one CRC.
    if any(rest) or any(word not in list(wanted) for wanted, word in named):
        return None
    return kind(words[0] >> 16, *(_value(wanted, word) for wanted, word in zip(types, given, strict=True)))


@cache
def _types(kind: type[Instruction]) -> tuple[type, ...]:
    """Return the types of the fields behind `layer`."""
    hints = get_type_hints(kind)
    return tuple(hints[field.name] for field in dataclasses.fields(kind)[1:])


def _value(kind: type, word: int) -> Any:
    return struct.unpack("<f", struct.pack("<I", word))[0] if kind is float else kind(word)


def cpp_constants() -> str:
    """Return the C++ header of opcodes, places, and the word of every field (hls_templates/fastcar_step_fields.hpp)."""
    opcodes = [f"    OP_{opcode.name} = {opcode.value}," for opcode in Opcode]
    places = [f"    {place.name}_ROWS = {place.value}," for place in Place]
    enums = [("StepOpcode", opcodes), ("Place", places)]
    for kind in KINDS.values():
        names = [field.name.upper() for field in dataclasses.fields(kind)[1:]]
        words = [f"    {kind.opcode.name}_{name} = {number}," for number, name in enumerate(names, 1)]
        enums.append((f"{kind.__name__}Field", [*words, f"    {kind.opcode.name}_WORDS = {len(names) + 1},"]))
    body = "\n\n".join(f"enum {name} {{\n" + "\n".join(lines) + "\n};" for name, lines in enums)
    return _CONSTANTS.format(body=body, words=INSTRUCTION_WORDS)


_CONSTANTS = """\
// Words of the instructions of a decode step. Written by fastcar_compile/codegen/hls/step_program/program.py; a test compares them.
#ifndef FASTCAR_STEP_FIELDS_HPP
#define FASTCAR_STEP_FIELDS_HPP

namespace fastcar {{
namespace step {{

static const int INSTRUCTION_WORDS = {words};

{body}

}}  // namespace step
}}  // namespace fastcar

#endif
"""


MAGIC = 0x50545346
"""The bytes "FSTP"."""

VERSION = 1
HEADER_WORDS = 16
MAX_INSTRUCTIONS = 65535


class StepOp(IntEnum):
    """Values of the kernel's argument `op`."""

    LOAD_PROGRAM = 0
    LOAD_TABLE = 1
    RUN = 2


class StepStatus(IntEnum):
    """How a step ended; the kernel writes it into its report."""

    DONE = 0
    NOT_LOADED = 1
    """There is no program, or no control table for one that decides."""
    NOT_HELD = 2
    """An instruction needs more than the kernel has, or the controller refused it."""


class Status(IntEnum):
    """Result of loading a program. The checks run in this order; the first that fails is reported."""

    OK = 0
    TOO_SHORT = 1
    BAD_MAGIC = 2
    BAD_VERSION = 3
    BAD_LENGTH = 4
    BAD_CRC = 5
    BAD_HEADER = 6
    BAD_INSTRUCTION = 7


_EXPLAINED = {
    Status.TOO_SHORT: f"it is shorter than its header of {4 * HEADER_WORDS} bytes",
    Status.BAD_MAGIC: 'it does not begin with "FSTP"',
    Status.BAD_VERSION: f"this program reads version {VERSION}",
    Status.BAD_LENGTH: "its length is not the one in its header",
    Status.BAD_CRC: "its CRC-32 does not match its content",
    Status.BAD_HEADER: "a header field is out of range",
    Status.BAD_INSTRUCTION: "an instruction is unknown or reaches outside of a buffer, or the last one is not END",
}


@dataclass(frozen=True)
class StepProgram:
    """A decode step, or short programs: END is the last instruction."""

    sizes: Sizes
    instructions: tuple[Instruction, ...]

    @property
    def whole(self) -> bool:
        """Whether it is a decode step with its rows on chip; else short programs, whose rows are in memory."""
        return isinstance(self.instructions[0], Load)

    def entries(self, kind: type[Instruction]) -> list[int]:
        """Return the numbers of the instructions of a kind, in order."""
        return [number for number, instruction in enumerate(self.instructions) if isinstance(instruction, kind)]

    @property
    def decides(self) -> bool:
        """Whether it needs a control table."""
        return any(isinstance(instruction, Decide | DecideRows) for instruction in self.instructions)

    def to_bytes(self) -> bytes:
        """Return the binary form; same program, same bytes."""
        count = len(self.instructions)
        sizes = [getattr(self.sizes, field.name) for field in fields(self.sizes)]
        words = [HEADER_WORDS + count * INSTRUCTION_WORDS, count, *sizes]
        words += [word for instruction in self.instructions for word in instruction.words]
        body = struct.pack(f"<{len(words)}I", *words)
        return struct.pack("<3I", MAGIC, VERSION, zlib.crc32(body)) + body

    def to_json(self) -> dict[str, Any]:
        """Return the same content as plain values."""
        sizes = {field.name: getattr(self.sizes, field.name) for field in fields(self.sizes)}
        return {"version": VERSION, **sizes, "instructions": [i.to_json() for i in self.instructions]}


def check(data: bytes, capacity: int = MAX_INSTRUCTIONS) -> Status:
    """Return the first check of a program that fails, or OK, for an engine that holds `capacity` instructions."""
    if len(data) < 4 * HEADER_WORDS:
        return Status.TOO_SHORT
    magic, version, crc, words, count = struct.unpack_from("<5I", data)
    if magic != MAGIC:
        return Status.BAD_MAGIC
    if version != VERSION:
        return Status.BAD_VERSION
    # The length is checked before the CRC: the engine reads as many words for the CRC as the header says.
    if words * 4 != len(data) or words > HEADER_WORDS + capacity * INSTRUCTION_WORDS:
        return Status.BAD_LENGTH
    if zlib.crc32(data[12:]) != crc:
        return Status.BAD_CRC
    length = words == HEADER_WORDS + count * INSTRUCTION_WORDS
    if not (_sizes(data).is_valid() and count >= 1 and length):
        return Status.BAD_HEADER
    return Status.BAD_INSTRUCTION if _instructions(data) is None else Status.OK


def _sizes(data: bytes) -> Sizes:
    # Byte 20 is word 5: magic, version, CRC, length and count stand before the sizes.
    return Sizes(*struct.unpack_from(f"<{len(fields(Sizes))}I", data, 20))


def _instructions(data: bytes) -> tuple[Instruction, ...] | None:
    """Return the instructions of a program whose header is checked; None where one is not valid."""
    sizes, found = _sizes(data), list[Instruction]()
    for words in struct.iter_unpack(f"<{INSTRUCTION_WORDS}I", data[4 * HEADER_WORDS :]):
        instruction = decode(words)
        if instruction is None or not instruction.fits(sizes):
            return None
        found.append(instruction)
    # END stands last, so every launch meets one.
    return tuple(found) if isinstance(found[-1], End) else None


def read_program(data: bytes) -> StepProgram:
    """Read and check a binary program.

    Raises:
        UserError: it is damaged or of another version; the text names the check that failed.
    """
    status = check(data)
    instructions = _instructions(data) if status is Status.OK else None
    if instructions is None:
        text = f"the step program is not valid: {status.name}, {_EXPLAINED[status]}"
        raise UserError(text, hint="compile the model again")
    return StepProgram(_sizes(data), instructions)
