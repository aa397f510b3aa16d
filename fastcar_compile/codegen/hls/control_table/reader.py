"""Reading and checking a DRS control table, in the order of the HLS controller (docs/reference/drs_table.md)."""

import struct
import zlib
from functools import lru_cache
from typing import NamedTuple

from fastcar_compile.codegen.hls.control_table import table
from fastcar_compile.codegen.hls.control_table.table import AttentionShape, DrsTable, Limits, TableStatus, table_words
from fastcar_compile.errors import UserError
from fastcar_compile.gates.registry import GateKind

_EXPLAINED = {
    TableStatus.TOO_SHORT: f"it is shorter than its header of {4 * table.HEADER_WORDS} bytes",
    TableStatus.BAD_MAGIC: 'it does not begin with "FDRS"',
    TableStatus.BAD_LENGTH: "its length is not the one in its header",
    TableStatus.BAD_CRC: "its CRC-32 does not match its content",
    TableStatus.BAD_HEADER: "a header field is out of range",
    TableStatus.BAD_INSTRUCTION: "an instruction is unknown or reaches outside of a buffer, or the last one is not END",
}


class Header(NamedTuple):
    """The words of the header, in order."""

    magic: int
    version: int
    crc: int
    words: int
    layers: int
    rows: int
    cores: int
    tokens_per_frame: int
    gate: int
    flags: int
    max_chain: int
    heads: int
    kv_heads: int
    head_dim: int
    group: int
    head_words: int
    row_query_words: int
    row_key_words: int
    query_words: int
    key_words: int
    units: int
    refresh_period: int
    instructions: int
    ports: int
    positions: int
    x_words: int
    a_words: int
    y_words: int
    constant_words: int
    weight_words: int
    cached_key_words: int
    cached_value_words: int
    read_words: int
    written_words: int
    replay_words: int
    videos: int

    @property
    def weighted_heads(self) -> int:
        """Query heads that have a weight each; 0: they count alike."""
        return self.heads if self.flags & table.WEIGHTED else 0

    @property
    def attention(self) -> AttentionShape:
        """Heads of q and k."""
        return AttentionShape(self.heads, self.kv_heads, self.head_dim)

    def is_valid(self, limits: Limits) -> bool:
        """Return whether every field is in range, for hardware of these limits."""
        return (
            self._counts_are_valid(limits)
            and self._gate_is_valid(limits)
            and self._attention_is_valid(limits)
            and self._program_is_valid(limits)
            and self.words == self.program_word + table.PROGRAM_WORDS * self.instructions
        )

    @property
    def program_word(self) -> int:
        """The first word of the program."""
        return table_words(self.layers, self.weighted_heads)

    @property
    def program_sizes(self) -> tuple[int, ...]:
        """What the program needs of its engine and memory, besides rows."""
        return self[23:]

    def _program_is_valid(self, limits: Limits) -> bool:
        # Sizes are checked with the program's instructions. Without a program they are 0.
        empty = self.instructions > 0 or not any(self.program_sizes)
        return empty and self.instructions <= limits.instructions

    def _counts_are_valid(self, limits: Limits) -> bool:
        return (
            1 <= self.layers <= table.MAX_LAYERS
            and 1 <= self.rows <= limits.rows
            and (1 <= self.cores <= table.MAX_CORES if limits.cores is None else self.cores == limits.cores)
            and self.tokens_per_frame != 0
        )

    def _gate_is_valid(self, limits: Limits) -> bool:
        return (
            self.gate in (list(GateKind) if limits.gate is None else [limits.gate])
            and (1 <= self.units <= limits.units if self.gate == GateKind.LEARNED else self.units == 0)
            and (self.refresh_period == 0 or self.refresh_period >= self.tokens_per_frame)
            and self._heads_are_valid(limits)
            and self.flags <= table.COUPLE_CFG | table.WEIGHTED
            and not (self.flags & table.COUPLE_CFG and self.rows % 2)
            and (1 <= self.max_chain <= table.MAX_CHAIN or self.max_chain == table.UNLIMITED)
        )

    def _heads_are_valid(self, limits: Limits) -> bool:
        """Return whether the weights of query heads fit, which gate `tas` alone has."""
        return (self.gate == GateKind.TAS and self.heads <= limits.heads) or not self.flags & table.WEIGHTED

    def _attention_is_valid(self, limits: Limits) -> bool:
        shape, kind = self.attention, GateKind(self.gate)
        if shape.problems():
            return False
        # The derived fields spare the controller dividers.
        # A reader recomputes them, so that fields cannot contradict each other.
        derived = (shape.group, shape.head_words)
        # Rows of q and the key, or of x and the cached x.
        rows = (shape.query_words, shape.key_words) if kind.reads_query else (self.row_query_words,) * 2
        return (
            (self.group, self.head_words) == derived
            and (self.row_query_words, self.row_key_words) == rows
            and (kind.reads_query or 1 <= self.row_query_words <= table.MAX_COUNT)
            and self.query_words == self.rows * self.row_query_words
            and self.key_words == self.rows * self.row_key_words
            and self.row_query_words <= limits.query_words
            and self.row_key_words <= limits.key_words
        )


def header_of(data: bytes) -> Header:
    """Return the header of a table that is long enough to have one."""
    return Header(*struct.unpack_from(f"<{len(Header._fields)}I", data))


@lru_cache(maxsize=64)
def check(data: bytes, limits: Limits | None = None) -> TableStatus:
    """Return the first check of a table that fails, or OK: what a controller answers when it loads the table.

    Args:
        limits: of the hardware. None: those of the format.
    """
    limits = limits or Limits(
        gate=None, units=table.MAX_UNITS, heads=table.MAX_COUNT, instructions=table.MAX_INSTRUCTIONS
    )
    if len(data) < 4 * table.HEADER_WORDS:
        return TableStatus.TOO_SHORT
    header = header_of(data)
    if header.magic != table.MAGIC:
        return TableStatus.BAD_MAGIC
    if header.version != table.VERSION:
        return TableStatus.BAD_VERSION
    most = limits.table_words + table.PROGRAM_WORDS * limits.instructions
    if len(data) % 4 or header.words != len(data) // 4 or header.words > most:
        return TableStatus.BAD_LENGTH
    # The CRC covers everything behind its own word: magic and version are checked before it.
    if zlib.crc32(data[12:]) != header.crc:
        return TableStatus.BAD_CRC
    return TableStatus.OK if header.is_valid(limits) else TableStatus.BAD_HEADER


def _floats(data: bytes, at: int, count: int) -> tuple[float, ...]:
    return struct.unpack_from(f"<{count}f", data, 4 * at)


def _head_weights(data: bytes, layer: int) -> tuple[float, ...] | None:
    header = header_of(data)
    first = table.HEADER_WORDS + table.LAYER_FIELDS * header.layers + layer * header.weighted_heads
    # An empty tuple means that heads have no weights.
    return _floats(data, first, header.weighted_heads) or None


def _explained(data: bytes, status: TableStatus) -> str:
    """Return what a check found, with the version of a table of another one."""
    if status is TableStatus.BAD_VERSION:
        return f"its version is {header_of(data).version}, and this program reads version {table.VERSION}"
    return _EXPLAINED[status]


def require(data: bytes, status: TableStatus) -> None:
    """Raise UserError unless a check found nothing; the text names the one that failed."""
    if status is not TableStatus.OK:
        hint = "compile the model again"
        raise UserError(f"the control table is not valid: {status.name}, {_explained(data, status)}", hint=hint)


@lru_cache(maxsize=64)
def read_table(data: bytes) -> DrsTable:
    """Read and check a binary table.

    Raises:
        UserError: the table is damaged or of another version; the text names the check that failed.
    """
    require(data, check(data))
    header = header_of(data)
    weights = [_head_weights(data, layer) for layer in range(header.layers)]
    return DrsTable(
        rows=header.rows,
        cores=header.cores,
        tokens_per_frame=header.tokens_per_frame,
        attention=header.attention,
        max_chain=None if header.max_chain == table.UNLIMITED else header.max_chain,
        couple_cfg=bool(header.flags & table.COUPLE_CFG),
        thresholds=_floats(data, table.HEADER_WORDS, header.layers),
        factors=_floats(data, table.HEADER_WORDS + header.layers, header.layers),
        gate=GateKind(header.gate),
        units=header.units,
        input_words=header.row_query_words if GateKind(header.gate).reads_input else 0,
        refresh_period=header.refresh_period,
        head_weights=tuple(w for w in weights if w is not None) or None,
    )
