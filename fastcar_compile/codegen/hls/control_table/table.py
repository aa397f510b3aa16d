"""The DRS control table: a little-endian binary of 32-bit words, its JSON twin, and the memory words of what a gate reads
(docs/reference/drs_table.md)."""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from enum import IntEnum
from typing import Any

import numpy as np

from fastcar_compile.artifact.engine import FLOATS_PER_WORD
from fastcar_compile.gates.base import Array, GateInputs, operand
from fastcar_compile.gates.learned import unit_exponents
from fastcar_compile.gates.registry import GateKind
from fastcar_compile.gates.scores import float32

MAGIC = 0x53524446
"""The bytes "FDRS"."""

VERSION = 11
HEADER_WORDS = 36
"""34 fields, and two zeros up to a whole memory word."""

MAX_ROWS = 32
"""Bits of the Index Register."""

MAX_CORES = 32
MAX_LAYERS = 65535
MAX_TABLE_WORDS = 65536
MAX_PRODUCTS = 65536
"""heads * head_dim: as many products as one score may sum (fastcar_compile.ir.ops.attention)."""

MAX_COUNT = 65535
"""Heads, elements of a head, words of a row, and what an instruction counts, besides channels and words of a buffer."""

LAYER_FIELDS = 2
"""Words of a layer besides its head weights: threshold and factor."""

MAX_UNITS = 4096
"""Hidden units of a network of gate `learned`."""

MAX_INSTRUCTIONS = 65535

PROGRAM_WORDS = 16
"""32-bit words of an instruction of the program: four memory words."""

MAX_CHAIN = 0x7FFFFFFF
"""Chain counts are int32."""

UNLIMITED = 0xFFFFFFFF
"""max_chain of a table whose chains have no limit."""


COUPLE_CFG = 1
"""Bit 0 of the flags: rows b and b + B / 2 replay only together."""

WEIGHTED = 2
"""Bit 1 of the flags: every query head has a weight."""


class TableStatus(IntEnum):
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
    BAD_LAYER = 9
    BAD_OPERANDS = 10


@dataclass(frozen=True)
class Limits:
    """What the hardware of a controller can hold.

    A longer table has status BAD_LENGTH, one that needs more of the others BAD_HEADER.

    Args:
        cores: of the array, which a table has to name. None: any, for a reader of tables. rows: of the batch.
        table_words: 32-bit words of a table without instructions. instructions: of its program.
        query_words, key_words: 128-bit words of one row of each operand.
        gate: the score that it computes. None: any, for a reader of tables. units: of the largest network.
        heads: query heads that it keeps a weight of.
    """

    cores: int | None = None
    rows: int = MAX_ROWS
    table_words: int = MAX_TABLE_WORDS
    query_words: int = MAX_PRODUCTS
    key_words: int = MAX_PRODUCTS
    gate: GateKind | None = GateKind.TAS
    units: int = 1
    heads: int = 0
    instructions: int = 0


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
        wrong = [f"{name} = {value} (1 to 65535)" for name, value in pairs.items() if not 1 <= value <= MAX_COUNT]
        if not wrong and self.heads % self.kv_heads:
            wrong.append(f"{self.heads} heads are no multiple of {self.kv_heads} kv_heads")
        if not wrong and self.heads * self.head_dim > MAX_PRODUCTS:
            wrong.append(f"heads * head_dim = {self.heads * self.head_dim} (at most {MAX_PRODUCTS})")
        return wrong


@dataclass(frozen=True)
class DrsTable:
    """A control table.

    Args:
        rows: B, rows of the batch, at most 32.
        cores: C, cores the rows are mapped to.
        tokens_per_frame: F, the replay stride in tokens.
        attention: heads of q and k; of a gate that reads neither, one head of one element.
        max_chain: replays in a row after which a row computes; None: unlimited.
        couple_cfg: rows b and b + B / 2 replay only together.
        thresholds: float32 per layer; +inf: the layer never replays.
        factors: float32 per layer, what the integer sum is multiplied with; 0: the layer has no gate.
        gate: the score. Thresholds of one with `at_most` are minus those of the gate.
        units: of the largest network of gate `learned`; 0: another gate.
        input_words: 128-bit words of one row of the MLP's input; 0: the gate does not read it.
        refresh_period: forwards from one frame in which every row computes to the next; 0: there is none.
        head_weights: float32 per layer and query head, which q is multiplied with; None: all heads count alike.
    """

    rows: int
    cores: int
    tokens_per_frame: int
    attention: AttentionShape
    max_chain: int | None
    couple_cfg: bool
    thresholds: tuple[float, ...]
    factors: tuple[float, ...]
    gate: GateKind = GateKind.TAS
    units: int = 0
    input_words: int = 0
    refresh_period: int = 0
    head_weights: tuple[tuple[float, ...], ...] | None = None

    @property
    def layers(self) -> int:
        """Number of decoder layers."""
        return len(self.thresholds)

    @property
    def gated(self) -> tuple[int, ...]:
        """Layers that have a gate."""
        return tuple(layer for layer, factor in enumerate(self.factors) if factor != 0)

    @property
    def row_query_words(self) -> int:
        """128-bit words of one row of the operand `query`: of q, or of x."""
        return self.attention.query_words if self.gate.reads_query else self.input_words

    @property
    def row_key_words(self) -> int:
        """128-bit words of one row of the operand `key`: of the cached key, or of the cached x."""
        return self.attention.key_words if self.gate.reads_query else self.input_words

    @property
    def query_words(self) -> int:
        """128-bit words of the operand `query`: q or x of all rows."""
        return self.rows * self.row_query_words

    @property
    def key_words(self) -> int:
        """128-bit words of the operand `key`: the cached key or the cached x of all rows."""
        return self.rows * self.row_key_words

    @property
    def words(self) -> int:
        """32-bit words of the table, without a program."""
        return table_words(self.layers, self.weighted_heads)

    @property
    def weighted_heads(self) -> int:
        """Query heads that have a weight each; 0: they count alike."""
        return 0 if self.head_weights is None else self.attention.heads

    @property
    def limits(self) -> Limits:
        """Limits of a controller that holds this table and no more."""
        return Limits(
            cores=self.cores,
            rows=self.rows,
            table_words=self.words,
            query_words=self.row_query_words,
            key_words=self.row_key_words,
            gate=self.gate,
            units=max(self.units, 1),
            heads=self.weighted_heads,
        )

    def with_thresholds(self, thresholds: Sequence[float]) -> DrsTable:
        """Return the same table with other thresholds (they are run-time inputs: a host writes a new table)."""
        return replace(self, thresholds=tuple(float32(t) for t in thresholds))

    def to_bytes(self, sizes: Sequence[int] = (0,) * 13, program: Sequence[int] = ()) -> bytes:
        """Return the binary form; same table, same bytes.

        Args:
            sizes: of the program, words 23 to 35 of the header. program: `PROGRAM_WORDS` words per instruction.
        """
        shape = self.attention
        flags = (COUPLE_CFG if self.couple_cfg else 0) | (0 if self.head_weights is None else WEIGHTED)
        fields = (
            *(self.words + len(program), self.layers, self.rows, self.cores, self.tokens_per_frame, self.gate, flags),
            UNLIMITED if self.max_chain is None else self.max_chain,
            *(shape.heads, shape.kv_heads, shape.head_dim, shape.group, shape.head_words),
            *(self.row_query_words, self.row_key_words, self.query_words, self.key_words),
            *(self.units, self.refresh_period, len(program) // PROGRAM_WORDS, *sizes),
        )
        # Head weights lie layer by layer behind the factors, so the table has no gap without them.
        weights = [weight for layer in self.head_weights or () for weight in layer]
        floats = (*self.thresholds, *self.factors, *weights)
        body = struct.pack(f"<{len(fields)}I", *fields).ljust(4 * (HEADER_WORDS - 3), b"\0")
        body += struct.pack(f"<{len(floats)}f", *floats)
        # Instructions are whole memory words, so they begin at one.
        body += bytes(4 * self.words - 12 - len(body)) + struct.pack(f"<{len(program)}I", *program)
        # Magic, version and CRC stand in front of the body: the CRC covers the body alone.
        return struct.pack("<3I", MAGIC, VERSION, zlib.crc32(body)) + body

    def to_json(self) -> dict[str, Any]:
        """Return the same content as plain values; infinite thresholds are "inf" and "-inf" (JSON has no infinity)."""
        fields = asdict(self)
        fields |= fields.pop("attention")
        return fields | {
            "version": VERSION,
            "layers": self.layers,
            "gate": self.gate.name.lower(),
            "thresholds": [t if math.isfinite(t) else str(t) for t in self.thresholds],
            "factors": list(self.factors),
            "head_weights": None if self.head_weights is None else [list(layer) for layer in self.head_weights],
        }


def table_words(layers: int, weighted_heads: int = 0) -> int:
    """Return the words of a table of these sizes without a program, whole memory words."""
    return -(-(HEADER_WORDS + layers * (LAYER_FIELDS + weighted_heads)) // FLOATS_PER_WORD) * FLOATS_PER_WORD


def with_thresholds(data: bytes, thresholds: Sequence[float]) -> bytes:
    """Return the bytes of a table with other thresholds, and the CRC-32 that fits."""
    changed = bytearray(data)
    struct.pack_into(f"<{len(thresholds)}f", changed, 4 * HEADER_WORDS, *thresholds)
    struct.pack_into("<I", changed, 8, zlib.crc32(changed[12:]))
    return bytes(changed)


# What a gate is decided on, as a controller reads it.


def pack_inputs(inputs: GateInputs[Array]) -> tuple[Array, Array]:
    """Return the memory words of the operands `query` and `key`: q and the key of all rows, or x and the cached x."""
    query, key = (inputs.x, inputs.cached) if inputs.query is None else (inputs.query, inputs.key)
    return pack_rows(operand(query)), pack_rows(operand(key))


def pack_rows(rows: Array) -> Array:
    """Return float32 [B, heads, D] as memory words [B * heads * ceil(D / 4), 4], or [B, H] as [B * ceil(H / 4), 4].

    Each head begins a word, and so does each row; spare lanes are zero.
    """
    padded = np.pad(rows, [(0, 0)] * (rows.ndim - 1) + [(0, -rows.shape[-1] % FLOATS_PER_WORD)])
    return np.ascontiguousarray(padded, np.float32).reshape(-1, FLOATS_PER_WORD)


BFLOATS_PER_WORD = 8
"""bfloat16 values in a memory word of 128 bits."""


def pack_network(w1: Array, b1: Array, w2: Array, b2: Array) -> Array:
    """Return a layer's network as memory words float32 [1 + units * (1 + 2 * ceil(H / 8)), 4] (fastcar_gate_core.hpp).

    The first word has the number of units. A unit is one word of b1, w2, the exponent of its lowest bit and b2, then
    its weights as bfloat16, eight to a word: those of x, then those of the change, each padded with zeros.

    Args:
        w1: float32 [units, 2 H] with the values of bfloat16. b1, w2: float32 [units]. b2: float32 [1].
    """
    units, width = w1.shape[0], w1.shape[1] // 2
    halves = np.pad(w1.reshape(units, 2, width), [(0, 0), (0, 0), (0, -width % BFLOATS_PER_WORD)])
    # A bfloat16 is the upper half of a float32: weights with values of bfloat16 lose nothing here.
    upper = (np.ascontiguousarray(halves, np.float32).view(np.uint32) >> 16).astype(np.uint16).reshape(units, -1)
    places = unit_exponents(w1).astype(np.int32)
    # b2 belongs to the layer, but every unit repeats it: a unit's head is then one whole memory word.
    head = np.stack([b1.view(np.int32), w2.view(np.int32), places, b2.view(np.int32).repeat(units)], 1)
    words = np.concatenate([head.view(np.uint32), upper.view(np.uint32)], 1)
    first = np.array([units, 0, 0, 0], np.uint32)
    return np.concatenate([first, words.reshape(-1)]).view(np.float32).reshape(-1, FLOATS_PER_WORD)


def unpack_network(words: Array, width: int) -> tuple[Array, Array, Array, Array]:
    """Return w1, b1, w2 and b2 of the words of `pack_network`; `width` is H."""
    bits = np.ascontiguousarray(words).view(np.uint32).reshape(-1)
    units, padded = int(bits[0]), width + -width % BFLOATS_PER_WORD
    each = bits[FLOATS_PER_WORD:].reshape(units, -1)
    upper = np.ascontiguousarray(each[:, FLOATS_PER_WORD:]).view(np.uint16).astype(np.uint32) << 16
    w1 = upper.view(np.float32).reshape(units, 2, padded)[:, :, :width].reshape(units, 2 * width)
    b1, w2, b2 = (np.ascontiguousarray(each[:, lane]).view(np.float32) for lane in (0, 1, 3))
    return w1, b1, w2, b2[:1]


def network_words(units: int, width: int) -> int:
    """Return the memory words of a network; none of no units."""
    return units and 1 + units * (1 + 2 * -(-width // BFLOATS_PER_WORD))
