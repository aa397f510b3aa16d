"""Memory of a step program: its sizes, the rows of a launch, and the key/value cache, a section per weight port
(fastcar_cache_core.hpp).

The rows of a cache are those of an int8 cache of every backend: D mantissas, then an exponent per block of 32. The engine
wants keys row by row. Of values, it wants 16 positions of one element side by side: its array sums over the lanes of a word."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastcar_compile.codegen.hls.control_table.table import MAX_COUNT, MAX_ROWS
from fastcar_compile.gates.base import Array

BLOCK = 32
"""Elements of a row that share an exponent; positions of a tile of values."""

LANES = 16
"""int8 values of a memory word; rows of a tile of keys on one port."""

BLOCK_WORDS = BLOCK // LANES
"""Memory words of a block."""


@dataclass(frozen=True)
class CacheLayout:
    """One head's keys or values on the weight ports.

    Args:
        ports: weight ports. head_dim: elements of a row, a multiple of 32. positions: that the cache holds.
    """

    ports: int
    head_dim: int
    positions: int

    @property
    def blocks(self) -> int:
        """Blocks of a row."""
        return self.head_dim // BLOCK

    @property
    def key_tiles(self) -> int:
        """Tiles of keys; one has 16 rows on every port."""
        return -(-self.positions // (self.ports * LANES))

    @property
    def key_tile_words(self) -> int:
        """Memory words of a tile of keys on one port: exponents of each block, then the rows."""
        return self.blocks + LANES * self.blocks * BLOCK_WORDS

    @property
    def key_words(self) -> int:
        """Memory words of one port's keys."""
        return self.key_tiles * self.key_tile_words

    @property
    def value_tiles(self) -> int:
        """Tiles of values; one has 32 positions."""
        return -(-self.positions // BLOCK)

    @property
    def slots(self) -> int:
        """Elements of a block on one port."""
        return -(-BLOCK // self.ports)

    @property
    def value_head_words(self) -> int:
        """Memory words of exponents in a tile of values on one port: those of all ports in turn."""
        return -(-BLOCK_WORDS * self.blocks // self.ports)

    @property
    def value_tile_words(self) -> int:
        """Memory words of a tile of values on one port."""
        return self.value_head_words + self.blocks * self.slots * BLOCK_WORDS

    @property
    def value_words(self) -> int:
        """Memory words of one port's values."""
        return self.value_tiles * self.value_tile_words

    def pack_keys(self, rows: Array, number: int) -> Array:
        """Return int8 [ports, key_words, 16] of int8 rows [positions, head_dim + blocks] of head `number` of a layer.

        Position s is on port (s + number) mod ports, so that the heads of one position are on all ports.
        """
        mantissas, exponents = self._split(rows, self.key_tiles * LANES * self.ports)
        # Position (tile * 16 + lane) * ports + p is row `lane` of a tile on port p.
        own = mantissas.reshape(self.key_tiles, LANES, self.ports, -1).transpose(2, 0, 1, 3)
        heads = exponents.reshape(self.key_tiles, LANES, self.ports, self.blocks).transpose(2, 0, 3, 1)
        words = own.reshape(self.ports, self.key_tiles, -1, LANES)
        sections = np.concatenate([heads, words], 2).reshape(self.ports, self.key_words, LANES)
        # The roll moves each head by one port: the heads of one position are then written to different ports.
        return np.roll(sections, number, 0)

    def unpack_keys(self, words: Array, number: int) -> Array:
        """Return the rows of `pack_keys`."""
        tiles = np.roll(words, -number, 0).reshape(self.ports, self.key_tiles, -1, LANES)
        heads, own = np.split(tiles, [self.blocks], 2)
        mantissas = own.reshape(self.ports, self.key_tiles, LANES, -1).transpose(1, 2, 0, 3)
        return self._join(mantissas, heads.transpose(1, 3, 0, 2))

    def pack_values(self, rows: Array, number: int) -> Array:
        """Return int8 [ports, value_words, 16] of int8 rows [positions, head_dim + blocks]; all heads lie alike."""
        # Every port holds some elements of every head, so no roll is needed to spread the heads.
        del number
        tiles, blocks, ports = self.value_tiles, self.blocks, self.ports
        mantissas, exponents = self._split(rows, tiles * BLOCK)
        halves = mantissas.reshape(tiles, BLOCK_WORDS, LANES, blocks, BLOCK)
        # Element slot * ports + p of a block is on port p. The padding is for ports that do not divide 32.
        padded = np.pad(halves, [(0, 0)] * 4 + [(0, self.slots * ports - BLOCK)])
        own = padded.reshape(tiles, BLOCK_WORDS, LANES, blocks, self.slots, ports).transpose(5, 0, 3, 4, 1, 2)
        heads = exponents.reshape(tiles, BLOCK_WORDS, LANES, blocks).transpose(0, 3, 1, 2)
        # The exponents of a tile are dealt to the ports word by word; the last ports may hold a word of zeros.
        in_turn = np.zeros((tiles, self.value_head_words * ports, LANES), np.int8)
        in_turn[:, : BLOCK_WORDS * blocks] = heads.reshape(tiles, -1, LANES)
        spread = in_turn.reshape(tiles, -1, ports, LANES).transpose(2, 0, 1, 3)
        return np.concatenate([spread, own.reshape(ports, tiles, -1, LANES)], 2).reshape(ports, -1, LANES)

    def unpack_values(self, words: Array, number: int) -> Array:
        """Return the rows of `pack_values`."""
        del number
        tiles, blocks, ports = self.value_tiles, self.blocks, self.ports
        spread, own = np.split(words.reshape(ports, tiles, -1, LANES), [self.value_head_words], 2)
        padded = own.reshape(ports, tiles, blocks, self.slots, BLOCK_WORDS, LANES).transpose(1, 4, 5, 2, 3, 0)
        mantissas = padded.reshape(tiles * BLOCK, blocks, -1)[..., :BLOCK]
        in_turn = spread.transpose(1, 2, 0, 3).reshape(tiles, -1, LANES)[:, : BLOCK_WORDS * blocks]
        return self._join(mantissas, in_turn.reshape(tiles, blocks, BLOCK_WORDS, LANES).transpose(0, 2, 3, 1))

    def _split(self, rows: Array, count: int) -> tuple[Array, Array]:
        """Return mantissas and exponents of `count` rows; those that are missing are zeros."""
        padded = np.pad(rows, [(0, count - len(rows)), (0, 0)])
        return padded[:, : self.head_dim], padded[:, self.head_dim :]

    def _join(self, mantissas: Array, exponents: Array) -> Array:
        parts = [mantissas.reshape(-1, self.head_dim), exponents.reshape(-1, self.blocks)]
        return np.concatenate(parts, 1)[: self.positions]


# What a step program needs of an engine and its memory.


MAX_PORTS = 128
MAX_WORDS = 1 << 30
"""Memory words of a buffer."""


def counts(*values: int) -> bool:
    """Return whether each is 1 to MAX_COUNT."""
    return all(1 <= value <= MAX_COUNT for value in values)


BUFFERS = ("constant_words", "weight_words", "key_words", "value_words", "input_words", "output_words", "replay_words")
SIZE_RULES = (
    *("rows >= 1", f"rows <= {MAX_ROWS}", "ports >= 1", f"ports <= {MAX_PORTS}", "videos >= 1", "rows % videos == 0"),
    *(
        "counts(positions)",
        "counts(x_words)",
        "counts(a_words)",
        "counts(y_words)",
        "x_words <= a_words",
        "x_words <= y_words",
    ),
    *(f"{name} <= {MAX_WORDS}" for name in BUFFERS),
)
"""What has to hold of the sizes, in Python and in the kernel's loader."""


@dataclass(frozen=True)
class Sizes:
    """What a program needs: words 5 and 23 to 35 of its table.

    Args:
        rows: of a launch. videos: whose keys, values and replay are kept; each has as many rows as any other. ports: weight ports. positions: that the key/value cache holds.
        x_words, a_words, y_words: memory words of a row at each place on chip. constant_words: of norm weights, RoPE tables and networks.
        weight_words, key_words, value_words: of the section of one port. input_words, output_words: of all rows;
            a word of each row comes before those of the input.
        replay_words: of chain counts, and outputs and inputs of MLPs.
    """

    rows: int
    ports: int
    positions: int
    x_words: int
    a_words: int
    y_words: int
    constant_words: int
    weight_words: int
    key_words: int
    value_words: int
    input_words: int
    output_words: int
    replay_words: int
    videos: int

    @property
    def staged(self) -> int:
        """Rows whose forwards are staged in the replay buffer, until the next launch commits them: all, where a video has several."""
        return self.rows if self.rows > self.videos else 0

    def is_valid(self) -> bool:
        """Return whether every size is in the format's range."""
        return all(eval(rule, {"counts": counts}, vars(self)) for rule in SIZE_RULES)

    @property
    def named(self) -> dict[str, Any]:
        """What the checks of an instruction read: the sizes, and memory words of a head's keys and values of so many blocks."""
        of_blocks = {
            "key_words_of": lambda blocks: self.layout(blocks).key_words,
            "value_words_of": lambda blocks: self.layout(blocks).value_words,
        }
        return {**vars(self), "staged": self.staged, **of_blocks}

    def layout(self, blocks: int) -> CacheLayout:
        """Return how a head of so many blocks is cached."""
        return CacheLayout(self.ports, blocks * BLOCK, self.positions)


# The rows of a launch: the list at the beginning of the kernel's input (docs/reference/drs_table.md, "Rows").


ALL_ROWS = 0xFFFFFFFF
NO_STEP = 0xFFFFFFFF
"""Number of a forward that is no decode forward; -1 in 32 bits."""

ACTIVE_BIT = 16


@dataclass(frozen=True)
class Rows:
    """What a launch knows of its rows.

    Args:
        videos: that they belong to; row b is one of video b // (B / videos).
        position: int64 [B], of the token. step: int64 [B], number of the decode forward; -1: of a prompt.
        active: bool [B]; the kernel neither computes nor writes anything of another row.
        before: int32 [B]. Of short programs: replays in a row at this slot. Where a video has several rows: 1 + `step` of
            the row in the last launch, of which what it staged for replay is committed; 0: nothing is.
    """

    videos: int
    position: Array
    step: Array
    active: Array
    before: Array

    @classmethod
    def at(cls, sizes: Sizes, position: int = 0, step: int = -1, active: int = ALL_ROWS, count: int = 1) -> Rows:
        """Return the first `count` rows of each video at consecutive positions.

        Args:
            active: bit b is 1: row b is there, if it is one of the first.
        """
        own, rows = sizes.rows // sizes.videos, np.arange(sizes.rows)
        here = (rows % own < count) & (active >> rows & 1 == 1)
        return cls(sizes.videos, position + rows % own, np.full(len(rows), step), here, np.zeros(len(rows), np.int32))

    @property
    def video(self) -> Array:
        """The video of each row, int64 [B]."""
        return np.arange(len(self.position)) // (len(self.position) // self.videos)

    @property
    def deciding(self) -> Array:
        """The active rows of a decode forward, bool [B]."""
        return self.active & (self.step >= 0)

    def words(self) -> NDArray[np.uint32]:
        """Return the list as memory words, uint32 [B, 4]."""
        lanes = (self.position, self.step, self.video | self.active.astype(np.int64) << ACTIVE_BIT, self.before)
        return (np.stack(lanes, 1) & 0xFFFFFFFF).astype(np.uint32)
