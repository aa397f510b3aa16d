"""The DRS control table: a little-endian binary of 32-bit words, and its JSON twin (docs/reference/drs_table.md)."""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any

from fastcar_compile.drs.score import score_factor
from fastcar_compile.errors import UserError

MAGIC = 0x53524446
"""The bytes "FDRS"."""

VERSION = 3
HEADER_WORDS = 28
MAX_ROWS = 32
MAX_CORES = 32
MAX_LAYERS = 65535
MAX_LAYER_WORDS = 128
MAX_TABLE_WORDS = 65536
MAX_PRODUCTS = 65536
"""heads * head_dim: as many products as one score may sum (fastcar_compile.ops.attention)."""

LAYER_FIELDS = 4
"""Words of a layer besides its instructions: threshold, factor, prefetch bytes, offset of the first instruction."""

FLOATS_PER_WORD = 4
"""float32 values in a memory word of 128 bits; every head of q and k begins a word."""

NONE = 0xFF
"""Row, core or pass field of a word that has none."""

NO_LAYER = 0xFFFFFFFF
"""Content of the prefetch buffer when it holds no layer."""

UNLIMITED = 0xFFFFFFFF
"""max_chain of a table whose chains have no limit."""

GATE_TAS = 1
COUPLE_CFG = 1
"""Bit 0 of the flags: rows b and b + B / 2 replay only together."""


class Status(IntEnum):
    """Result of loading a table (up to BAD_INSTRUCTION) or of deciding a layer.

    The checks run in this order; the first that fails is reported.
    """

    OK = 0
    TOO_SHORT = 1
    BAD_MAGIC = 2
    BAD_VERSION = 3
    BAD_LENGTH = 4
    BAD_CRC = 5
    BAD_HEADER = 6
    BAD_INSTRUCTION = 7
    NO_TABLE = 8
    BAD_LAYER = 9
    BAD_OPERANDS = 10
    QUEUE_FULL = 11
    NO_DISPATCH = 12


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
class Limits:
    """What the hardware of a controller can hold.

    A longer table has status BAD_LENGTH, one that needs more of the others BAD_HEADER.

    Args:
        cores: compute cores. rows: of the batch.
        passes: over a tile of weights; `cores` of a table times these have to reach its rows.
        table_words: 32-bit words of a table.
        query_words, key_words: 128-bit words of one row of q and of the key, all heads.
    """

    cores: int = MAX_CORES
    rows: int = MAX_ROWS
    passes: int = MAX_ROWS
    table_words: int = MAX_TABLE_WORDS
    query_words: int = MAX_PRODUCTS
    key_words: int = MAX_PRODUCTS


@dataclass(frozen=True)
class AttentionShape:
    """Heads of q and of the cached key, and elements of one head."""

    heads: int
    kv_heads: int
    head_dim: int

    @property
    def group(self) -> int:
        """Query heads that share a key head."""
        return self.heads // self.kv_heads

    @property
    def head_words(self) -> int:
        """128-bit words of one head; spare lanes are zero."""
        return -(-self.head_dim // FLOATS_PER_WORD)

    @property
    def query_words(self) -> int:
        """128-bit words of one row of q."""
        return self.heads * self.head_words

    @property
    def key_words(self) -> int:
        """128-bit words of one row's cached key."""
        return self.kv_heads * self.head_words

    def problems(self) -> list[str]:
        """Return what is out of the format's range, as texts."""
        pairs = {"heads": self.heads, "kv_heads": self.kv_heads, "head_dim": self.head_dim}
        wrong = [f"{name} = {value} (1 to 65535)" for name, value in pairs.items() if not 1 <= value <= 65535]
        if not wrong and self.heads % self.kv_heads:
            wrong.append(f"{self.heads} heads are no multiple of {self.kv_heads} kv_heads")
        if not wrong and self.heads * self.head_dim > MAX_PRODUCTS:
            wrong.append(f"heads * head_dim = {self.heads * self.head_dim} (at most {MAX_PRODUCTS})")
        return wrong


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
        attention: heads of q and k.
        max_chain: replays in a row after which a row computes; None: unlimited.
        couple_cfg: rows b and b + B / 2 replay only together.
        thresholds: float32 per layer; +inf: the layer never replays.
        factors: float32 per layer, what a sum of products is multiplied with; 0: the layer has no gate.
        prefetch: bytes per layer of the next layer's weights (after the last layer: the first one's) that fit on chip.
        instructions: per layer its instructions, END last, the same number in every layer.
    """

    rows: int
    cores: int
    tokens_per_frame: int
    attention: AttentionShape
    max_chain: int | None
    couple_cfg: bool
    thresholds: tuple[float, ...]
    factors: tuple[float, ...]
    prefetch: tuple[int, ...]
    instructions: tuple[tuple[Instruction, ...], ...]

    @property
    def layers(self) -> int:
        """Number of decoder layers."""
        return len(self.thresholds)

    def with_thresholds(self, thresholds: Sequence[float]) -> DrsTable:
        """Return the same table with other thresholds (they are run-time inputs: a host writes a new table)."""
        return replace(self, thresholds=_float32(thresholds))

    def to_bytes(self) -> bytes:
        """Return the binary form; same table, same bytes."""
        layers, stride, shape = self.layers, len(self.instructions[0]), self.attention
        offsets = [HEADER_WORDS + i * layers for i in range(LAYER_FIELDS + 1)]
        programs = [offsets[-1] + layer * stride for layer in range(layers)]
        chain = UNLIMITED if self.max_chain is None else self.max_chain
        fields = (
            *(offsets[-1] + layers * stride, layers, self.rows, self.cores, self.tokens_per_frame, stride),
            *(GATE_TAS, COUPLE_CFG if self.couple_cfg else 0, chain, shape.heads, shape.kv_heads, shape.head_dim),
            *(shape.group, shape.head_words, shape.query_words, shape.key_words),
            *(self.rows * shape.query_words, self.rows * shape.key_words),
            *offsets,
            *(0, 0),
        )
        body = struct.pack(f"<{HEADER_WORDS - 3}I", *fields)
        body += struct.pack(f"<{2 * layers}f", *self.thresholds, *self.factors)
        words = [*self.prefetch, *programs, *(i.word for layer in self.instructions for i in layer)]
        body += struct.pack(f"<{len(words)}I", *words)
        return struct.pack("<3I", MAGIC, VERSION, zlib.crc32(body)) + body

    def to_json(self) -> dict[str, Any]:
        """Return the same content as plain values; infinite thresholds are "inf" and "-inf" (JSON has no infinity)."""
        return {
            "version": VERSION,
            "layers": self.layers,
            "rows": self.rows,
            "cores": self.cores,
            "tokens_per_frame": self.tokens_per_frame,
            "gate": "tas",
            "couple_cfg": self.couple_cfg,
            "max_chain": self.max_chain,
            "heads": self.attention.heads,
            "kv_heads": self.attention.kv_heads,
            "head_dim": self.attention.head_dim,
            "thresholds": [t if math.isfinite(t) else str(t) for t in self.thresholds],
            "factors": list(self.factors),
            "prefetch_bytes": list(self.prefetch),
            "instructions": [[_instruction_json(i) for i in layer] for layer in self.instructions],
        }


def _instruction_json(instruction: Instruction) -> dict[str, Any]:
    row = {} if instruction.row == NONE else {"row": instruction.row}
    return {"opcode": instruction.opcode.name, **row}


def _float32(values: Sequence[float]) -> tuple[float, ...]:
    return struct.unpack(f"<{len(values)}f", struct.pack(f"<{len(values)}f", *values))


def layer_words(rows: int) -> int:
    """Return the instruction words of one layer: load, compute and replay per row, prefetch, barrier, end."""
    return 2 * rows + 4


def table_words(layers: int, rows: int) -> int:
    """Return the words of the table that the compiler writes for these sizes."""
    return HEADER_WORDS + layers * (LAYER_FIELDS + layer_words(rows))


def build_table(
    layers: int,
    rows: int,
    cores: int,
    tokens_per_frame: int,
    thresholds: Sequence[float],
    *,
    attention: AttentionShape | None = None,
    scales: Sequence[float | None] | None = None,
    max_chain: int | None = None,
    couple_cfg: bool = False,
    prefetch: Sequence[int] | None = None,
) -> DrsTable:
    """Return the control table of a decoder.

    Args:
        thresholds: one per layer, rounded to float32; +inf where the layer never replays.
        attention: heads of q and k; None: one head of one element, for a decoder without gates.
        scales: per layer the attention's factor on its logits; None (also for all layers): the layer has no gate.
        max_chain: at least 1. couple_cfg: needs an even number of rows.
        prefetch: bytes per layer of the next layer's weights that fit on chip; None: there is no prefetch buffer.

    Raises:
        UserError: sizes that are out of the format's range, all of them.
    """
    shape = attention or AttentionShape(1, 1, 1)
    scales = [None] * layers if scales is None else scales
    prefetch = [0] * layers if prefetch is None else prefetch
    sizes = {"layers": layers, "rows": rows, "cores": cores, "tokens_per_frame": tokens_per_frame}
    wrong = _out_of_range(sizes | ({} if max_chain is None else {"max_chain": max_chain}))
    for name, values in (("thresholds", thresholds), ("scales", scales), ("prefetch sizes", prefetch)):
        if len(values) != layers:
            wrong.append(f"{len(values)} {name} for {layers} layers")
    if not all(0 <= size <= 0xFFFFFFFF for size in prefetch):
        wrong.append("a prefetch size that is not 0 to 4294967295 bytes")
    if couple_cfg and rows % 2:
        wrong.append(f"coupled pairs of {rows} rows")
    if (words := table_words(layers, rows)) > MAX_TABLE_WORDS:
        wrong.append(f"{words} words (at most {MAX_TABLE_WORDS})")
    if wrong := wrong + shape.problems():
        raise UserError(f"no DRS table can be built: {'; '.join(wrong)}", hint="change the model, batch or target")
    factors = [0.0 if scale is None else score_factor(scale, shape.heads) for scale in scales]
    programs = tuple(_program(layer, rows) for layer in range(layers))
    return DrsTable(
        *(rows, cores, tokens_per_frame, shape, max_chain, couple_cfg),
        *(_float32(thresholds), tuple(factors), tuple(prefetch), programs),
    )


_MOST = {
    "layers": MAX_LAYERS,
    "rows": MAX_ROWS,
    "cores": MAX_CORES,
    "tokens_per_frame": 0xFFFFFFFF,
    "max_chain": 0x7FFFFFFF,
}


def _out_of_range(sizes: dict[str, int]) -> list[str]:
    return [f"{name} = {n} (1 to {_MOST[name]})" for name, n in sizes.items() if not 1 <= n <= _MOST[name]]


def _program(layer: int, rows: int) -> tuple[Instruction, ...]:
    return (
        Instruction(Opcode.LOAD_WEIGHTS, layer),
        *(Instruction(Opcode.COMPUTE_MLP, layer, row) for row in range(rows)),
        *(Instruction(Opcode.REPLAY_COPY, layer, row) for row in range(rows)),
        Instruction(Opcode.PREFETCH_NEXT, layer),
        Instruction(Opcode.BARRIER, layer),
        Instruction(Opcode.END, layer),
    )
