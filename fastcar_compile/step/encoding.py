"""Instructions from their words, and the C++ header with the number of every word."""

from __future__ import annotations

import dataclasses
import struct
from enum import IntEnum
from functools import cache
from typing import Any, get_type_hints

from fastcar_compile.step.instructions import INSTRUCTION_WORDS, KINDS, Instruction, Opcode, Place


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
// Words of the instructions of a decode step. Written by fastcar_compile/step/encoding.py; a test compares them.
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
