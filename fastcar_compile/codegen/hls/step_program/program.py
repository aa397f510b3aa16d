"""The program of a control table: its words, JSON, reader (docs/reference/drs_table.md)."""

import ast
import dataclasses
import struct
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from enum import IntEnum
from functools import cache
from typing import Any, get_type_hints

from fastcar_compile.codegen.hls.control_table import reader, table
from fastcar_compile.codegen.hls.control_table.reader import Header, header_of, require
from fastcar_compile.codegen.hls.control_table.simulator import CHAIN, RESULT_WORDS, SCORES
from fastcar_compile.codegen.hls.control_table.table import PROGRAM_WORDS, DrsTable, Limits, Status
from fastcar_compile.codegen.hls.step_program.cache_layout import SIZE_RULES, Sizes
from fastcar_compile.codegen.hls.step_program.instruction import (
    FUNCTIONS,
    GAIN_WORDS,
    ROWS_ON_CHIP,
    field_notes,
    rules_of,
)
from fastcar_compile.codegen.hls.step_program.instructions import (
    KINDS,
    End,
    Instruction,
    Load,
    Opcode,
    Place,
)
from fastcar_compile.codegen.hls.step_program.rows import ACTIVE_BIT, NO_STEP
from fastcar_compile.errors import UserError
from fastcar_compile.gates.draft import GAINS
from fastcar_compile.gates.registry import GateKind

# Instructions from their words, and the number of every word for C++.


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


Constants = dict[str, int]

TABLE_LIMITS = (
    *("MAGIC", "VERSION", "HEADER_WORDS", "PROGRAM_WORDS", "MAX_ROWS", "MAX_LAYERS", "MAX_TABLE_WORDS", "MAX_COUNT"),
    *("MAX_PRODUCTS", "MAX_CHAIN", "MAX_UNITS", "UNLIMITED", "COUPLE_CFG", "WEIGHTED"),
)
"""Names of `control_table/table.py` that the C++ sources have too."""


def cpp_format() -> dict[str, tuple[Constants, dict[str, Constants]]]:
    """Return numbers and enumerations of the C++ sources by namespace: of the table, and of its program."""
    limits = {name: getattr(table, name) for name in TABLE_LIMITS}
    limits |= {f"GATE_{kind.name}": kind.value for kind in GateKind}
    fields = {f"F_{name.upper()}": number for number, name in enumerate(Header._fields)}
    own = {
        "ROWS_ON_CHIP": ROWS_ON_CHIP,
        "NO_STEP": NO_STEP,
        "ACTIVE_BIT": ACTIVE_BIT,
        "GAINS": GAINS,
        "GAIN_WORDS": GAIN_WORDS,
    }
    enums = {"StepOpcode": {f"OP_{opcode.name}": opcode.value for opcode in Opcode}}
    enums["Place"] = {f"{place.name}_ROWS": place.value for place in Place}
    for kind in KINDS.values():
        names = [*map(str.upper, field_notes(kind)), "WORDS"]
        enums[f"{kind.__name__}Field"] = {f"{kind.opcode.name}_{name}": number for number, name in enumerate(names, 1)}
    enums |= {kind.__name__: {one.name: one.value for one in kind} for kind in (StepOp, StepStatus)}
    statuses = {status.name: status.value for status in Status}
    answer = {"R_STATUS": 0, "R_INDEX_REGISTER": 1, "R_SCORES": SCORES, "R_CHAIN": CHAIN, "ANSWER_WORDS": RESULT_WORDS}
    return {"drs": (limits, {"Field": fields, "Status": statuses, "ResultWord": answer}), "step": (own, enums)}


# What the kernel's loader checks, in C++ of 64 bits, which hold every product of what was counted.
_SIGNS = {
    ast.Add: "+", ast.Mult: "*", ast.FloorDiv: "/", ast.Mod: "%", ast.BitOr: "|",
    ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=", ast.Eq: "==", ast.NotEq: "!=", ast.And: "&&", ast.Or: "||",
}  # fmt: skip


def cpp_checks() -> dict[str, Any]:
    """Return what fastcar_step_program.hpp is rendered from: names of the sizes, the checks of them and of each instruction."""
    checks = {kind.opcode.name: [_cpp(rule, kind) for rule in rules_of(kind)] for kind in KINDS.values()}
    sizes = [field.name for field in dataclasses.fields(Sizes)]
    return {"sizes": sizes, "size_checks": [_cpp(rule) for rule in SIZE_RULES], "checks": checks}


def _cpp(rule: str, kind: type[Instruction] | None = None) -> str:
    """Return a rule of the sizes, or of an instruction `f`."""
    prefix = "" if kind is None else f"{kind.opcode.name}_"
    of = {name: f"wide(f.word[{prefix}{name.upper()}])" for name in ([] if kind is None else field_notes(kind))}
    return _text(ast.parse(rule, mode="eval").body, of)


def _text(node: ast.expr, of: Mapping[str, str]) -> str:
    def joined(nodes: Sequence[ast.expr], sign: ast.AST) -> str:
        return f"({f' {_SIGNS[type(sign)]} '.join(_text(own, of) for own in nodes)})"

    match node:
        case ast.Name(name):
            return of.get(name, f"sizes.{name}")
        case ast.Call(ast.Name(name), given):
            return (
                f"{name}({', '.join([*([] if name in FUNCTIONS else ['sizes']), *(_text(own, of) for own in given)])})"
            )
        case ast.BoolOp(sign, nodes):
            return joined(nodes, sign)
        case ast.BinOp(left, sign, right):
            return joined([left, right], sign)
        case ast.Compare(first, signs, rest):
            pairs = [joined(pair, sign) for sign, *pair in zip(signs, [first, *rest], rest, strict=False)]
            return pairs[0] if len(pairs) == 1 else f"({' && '.join(pairs)})"
        case ast.UnaryOp(ast.Not(), inner):
            return f"!{_text(inner, of)}"
        case _:
            return f"{ast.literal_eval(node)}u"


class StepOp(IntEnum):
    """Values of the kernel's argument `op`."""

    LOAD = 0
    RUN = 1


class StepStatus(IntEnum):
    """How a step ended; the kernel writes it into its report."""

    DONE = 0
    NOT_LOADED = 1
    """There is no program, or the entry is no beginning."""
    NOT_HELD = 2
    """An instruction needs more than the kernel has, or the controller refused it."""
    BAD_ROW = 3
    """An active row is of a video that there is not, or sees positions that the cache has not; the number is the row's."""


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

    def to_bytes(self, table: DrsTable) -> bytes:
        """Return the binary form with the table of the same rows; same program, same bytes."""
        return table.to_bytes(astuple(self.sizes)[1:], [word for i in self.instructions for word in i.words])

    def to_json(self) -> dict[str, Any]:
        """Return the same content as plain values."""
        return {**vars(self.sizes), "instructions": [i.to_json() for i in self.instructions]}


def check(data: bytes, limits: Limits | None = None) -> Status:
    """Return the first check of a control table and its program that fails, or OK."""
    status = reader.check(data, limits)
    if status is not Status.OK or not header_of(data).instructions:
        return status
    if not _sizes(data).is_valid():
        return Status.BAD_HEADER
    return Status.BAD_INSTRUCTION if _instructions(data) is None else Status.OK


def _sizes(data: bytes) -> Sizes:
    header = header_of(data)
    return Sizes(header.rows, *header.program_sizes)


def _instructions(data: bytes) -> tuple[Instruction, ...] | None:
    """Return the instructions of a program whose header is checked; None where one is not valid."""
    sizes, found = _sizes(data), list[Instruction]()
    for words in struct.iter_unpack(f"<{PROGRAM_WORDS}I", data[4 * header_of(data).program_word :]):
        instruction = decode(words)
        if instruction is None or not instruction.fits(sizes):
            return None
        found.append(instruction)
    # END stands last, so every launch meets one.
    return tuple(found) if isinstance(found[-1], End) else None


def read_program(data: bytes) -> StepProgram:
    """Read and check the program of a control table.

    Raises:
        UserError: it is damaged, of another version, or has no program; the text names the check that failed.
    """
    require(data, check(data))
    instructions = _instructions(data) if header_of(data).instructions else None
    if instructions is None:
        raise UserError("the control table has no program", hint="compile the model again")
    return StepProgram(_sizes(data), instructions)
