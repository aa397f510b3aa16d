"""The DRS control table: a little-endian binary of 32-bit words, and its JSON twin (docs/drs_table.md)."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from fastcar_compile.errors import UserError

MAGIC = 0x53524446
"""The bytes "FDRS"."""

VERSION = 1
HEADER_WORDS = 12
MAX_ROWS = 32
MAX_CORES = 32
MAX_LAYERS = 65535
MAX_LAYER_WORDS = 128
MAX_TABLE_WORDS = 65536
NONE = 0xFF
"""Row or core field of a word that has none."""


class Status(IntEnum):
    """Result of reading a table; the checks run in this order and the first that fails is reported."""

    OK = 0
    TOO_SHORT = 1
    BAD_MAGIC = 2
    BAD_VERSION = 3
    BAD_LENGTH = 4
    BAD_CRC = 5
    BAD_HEADER = 6
    BAD_LAYER = 7
    BAD_INSTRUCTION = 8
    QUEUE_FULL = 9


class Opcode(IntEnum):
    """Instructions; COMPUTE_MLP and REPLAY_COPY belong to a row, the others to the whole layer."""

    LOAD_WEIGHTS = 1
    COMPUTE_MLP = 2
    REPLAY_COPY = 3
    PREFETCH_NEXT = 4
    BARRIER = 5
    END = 6


ROW_OPCODES = (Opcode.COMPUTE_MLP, Opcode.REPLAY_COPY)


@dataclass(frozen=True)
class Instruction:
    """One instruction word: opcode << 24 | row << 16 | layer; row is NONE for the whole layer."""

    opcode: Opcode
    layer: int
    row: int = NONE

    @property
    def word(self) -> int:
        """The 32-bit word."""
        return self.opcode << 24 | self.row << 16 | self.layer


@dataclass(frozen=True)
class DrsTable:
    """A control table.

    Args:
        rows: B, rows of the batch, at most 32.
        cores: C, cores the rows are mapped to.
        tokens_per_frame: F, the replay stride in tokens.
        thresholds: float32 per layer; +inf: the layer never replays.
        instructions: per layer its instructions, END last, the same number in every layer.
    """

    rows: int
    cores: int
    tokens_per_frame: int
    thresholds: tuple[float, ...]
    instructions: tuple[tuple[Instruction, ...], ...]

    @property
    def layers(self) -> int:
        """Number of decoder layers."""
        return len(self.thresholds)

    def to_bytes(self) -> bytes:
        """The binary form; same table, same bytes."""
        stride = len(self.instructions[0])
        total = HEADER_WORDS + self.layers * (1 + stride)
        fields = (total, self.layers, self.rows, self.cores, self.tokens_per_frame, stride)
        body = struct.pack("<9I", *fields, HEADER_WORDS, HEADER_WORDS + self.layers, 0)
        body += struct.pack(f"<{self.layers}f", *self.thresholds)
        words = [i.word for layer in self.instructions for i in layer]
        body += struct.pack(f"<{len(words)}I", *words)
        return struct.pack("<3I", MAGIC, VERSION, zlib.crc32(body)) + body

    def to_json(self) -> dict[str, Any]:
        """The same content as plain values; a threshold of +inf is None (JSON has no infinity)."""
        return {
            "version": VERSION,
            "layers": self.layers,
            "rows": self.rows,
            "cores": self.cores,
            "tokens_per_frame": self.tokens_per_frame,
            "thresholds": [None if t == float("inf") else t for t in self.thresholds],
            "instructions": [[_instruction_json(i) for i in layer] for layer in self.instructions],
        }

    @classmethod
    def from_bytes(cls, data: bytes) -> DrsTable:
        """Read and check a binary table.

        Raises:
            UserError: the table is damaged or of another version; the text names the check that failed.
        """
        status = check(data)
        if status is not Status.OK:
            raise UserError(f"the DRS table is not valid: {status.name}, {_EXPLAINED[status]}", mend="compile it again")
        words = words_of(data)
        layers, rows, cores, tokens, _stride = words[4:9]
        thresholds = struct.unpack_from(f"<{layers}f", data, 4 * HEADER_WORDS)
        programs = []
        for layer in range(layers):
            program = layer_program(words, layer)
            if program is None:
                raise UserError(
                    f"the DRS table is not valid: {Status.BAD_INSTRUCTION.name}, layer {layer} has a word that is no "
                    "instruction of that layer, or no END",
                    mend="compile it again",
                )
            programs.append(tuple(program))
        return cls(rows, cores, tokens, thresholds, tuple(programs))


_EXPLAINED = {
    Status.TOO_SHORT: f"it is shorter than its header of {4 * HEADER_WORDS} bytes",
    Status.BAD_MAGIC: 'it does not begin with "FDRS"',
    Status.BAD_VERSION: f"its version is not {VERSION}",
    Status.BAD_LENGTH: "its length is not the one in its header",
    Status.BAD_CRC: "its CRC-32 does not match its content",
    Status.BAD_HEADER: "a header field is out of range",
}


def _instruction_json(instruction: Instruction) -> dict[str, Any]:
    row = {} if instruction.row == NONE else {"row": instruction.row}
    return {"opcode": instruction.opcode.name, **row}


def layer_words(rows: int) -> int:
    """Instruction words of one layer: load, compute and replay per row, prefetch, barrier, end."""
    return 2 * rows + 4


def build_table(layers: int, rows: int, cores: int, tokens_per_frame: int, thresholds: Sequence[float]) -> DrsTable:
    """The control table of a decoder.

    Args:
        thresholds: one per layer, rounded to float32; +inf where the layer never replays.

    Raises:
        UserError: a size is out of the format's range.
    """
    wrong = [
        f"{name} = {value} (1 to {most})"
        for name, value, most in (
            ("layers", layers, MAX_LAYERS),
            ("rows", rows, MAX_ROWS),
            ("cores", cores, MAX_CORES),
            ("tokens_per_frame", tokens_per_frame, 0xFFFFFFFF),
        )
        if not 1 <= value <= most
    ]
    if len(thresholds) != layers:
        wrong.append(f"{len(thresholds)} thresholds for {layers} layers")
    words = HEADER_WORDS + layers * (1 + layer_words(rows))
    if words > MAX_TABLE_WORDS:
        wrong.append(f"{words} words (at most {MAX_TABLE_WORDS})")
    if wrong:
        raise UserError(f"no DRS table can be built: {'; '.join(wrong)}", mend="change the model, batch or target")
    rounded = struct.unpack(f"<{layers}f", struct.pack(f"<{layers}f", *thresholds))
    programs = tuple(_program(layer, rows) for layer in range(layers))
    return DrsTable(rows, cores, tokens_per_frame, rounded, programs)


def _program(layer: int, rows: int) -> tuple[Instruction, ...]:
    return (
        Instruction(Opcode.LOAD_WEIGHTS, layer),
        *(Instruction(Opcode.COMPUTE_MLP, layer, row) for row in range(rows)),
        *(Instruction(Opcode.REPLAY_COPY, layer, row) for row in range(rows)),
        Instruction(Opcode.PREFETCH_NEXT, layer),
        Instruction(Opcode.BARRIER, layer),
        Instruction(Opcode.END, layer),
    )


def words_of(data: bytes) -> tuple[int, ...]:
    """The whole 32-bit words of a binary table."""
    return struct.unpack_from(f"<{len(data) // 4}I", data)


def check(data: bytes, max_cores: int = MAX_CORES) -> Status:
    """Everything up to the header, in the order that the HLS controller checks; `max_cores`: cores of the hardware."""
    if len(data) < 4 * HEADER_WORDS:
        return Status.TOO_SHORT
    words = words_of(data)
    if words[0] != MAGIC:
        return Status.BAD_MAGIC
    if words[1] != VERSION:
        return Status.BAD_VERSION
    if len(data) % 4 or words[3] != len(words) or len(words) > MAX_TABLE_WORDS:
        return Status.BAD_LENGTH
    if zlib.crc32(data[12:]) != words[2]:
        return Status.BAD_CRC
    return Status.OK if _header_is_valid(words, max_cores) else Status.BAD_HEADER


def _header_is_valid(words: tuple[int, ...], max_cores: int) -> bool:
    total, layers, rows, cores, tokens, stride, thresholds, instructions, reserved = words[3:12]
    return (
        1 <= layers <= MAX_LAYERS
        and 1 <= stride <= MAX_LAYER_WORDS
        and 1 <= rows <= MAX_ROWS
        and 1 <= cores <= max_cores
        and tokens != 0
        and reserved == 0
        and thresholds == HEADER_WORDS
        and instructions == HEADER_WORDS + layers
        and total == HEADER_WORDS + layers + layers * stride
    )


def layer_program(words: tuple[int, ...], layer: int) -> list[Instruction] | None:
    """The instructions of a layer of a checked table, END last; None when one is not valid or END is missing."""
    rows, stride, first = words[5], words[8], words[10] + layer * words[8]
    program: list[Instruction] = []
    for word in words[first : first + stride]:
        instruction = _decode(word, layer, rows)
        if instruction is None:
            return None
        program.append(instruction)
        if instruction.opcode is Opcode.END:
            return program
    return None


def _decode(word: int, layer: int, rows: int) -> Instruction | None:
    opcode, row = word >> 24, word >> 16 & 0xFF
    if not Opcode.LOAD_WEIGHTS <= opcode <= Opcode.END or word & 0xFFFF != layer:
        return None
    if not (row < rows if opcode in ROW_OPCODES else row == NONE):
        return None
    return Instruction(Opcode(opcode), layer, row)
