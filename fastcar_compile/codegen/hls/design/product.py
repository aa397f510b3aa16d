"""One matrix product on the engine: how it is cut into tiles, and its weight stream."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil, gcd

from fastcar_compile.codegen.hls.control_table.table import FLOATS_PER_WORD
from fastcar_compile.config.formats import GROUP

WORD_BITS, WORD_BYTES = 128, 16

PRODUCTS_PER_SUM = 8
"""Packed products that one DSP cascade adds before they are split (PRODUCTS_PER_SUM of fastcar_mac.hpp)."""

SECTION_WORDS = 256
"""A port's section of a weight stream starts at a multiple of 4 KiB, which no AXI burst may cross."""


@dataclass(frozen=True)
class Product:
    """`channels` outputs of `inputs` int8 values, cut into tiles.

    Channel (t * tile + j) * ports + p is row j of tile t on weight port p.

    Args:
        inputs: K. channels: N, of all linears of a call together.
        ports: weight ports, 128 bits per clock each.
        tile: rows of a tile on one port. tiles: their number.
        bits: of a weight, 8 or 4; 4: float16 scales for groups of 128 inputs.
        bias: whether a tile has float32 biases.
    """

    inputs: int
    channels: int
    ports: int
    tile: int = 1
    tiles: int = 1
    bits: int = 8
    bias: bool = False

    @property
    def lanes(self) -> int:
        """Weights in one 128-bit word."""
        return WORD_BITS // self.bits

    @property
    def sums(self) -> int:
        """int32 sums of one channel: one, or one per group."""
        return 1 if self.bits == 8 else ceil(self.inputs / GROUP)

    @property
    def channel_words(self) -> int:
        """128-bit words of one channel's weights."""
        return ceil(self.inputs / self.lanes) if self.bits == 8 else self.sums * (GROUP // self.lanes)

    @property
    def scale_words(self) -> int:
        """128-bit words of one tile's scales on one port."""
        return ceil(self.tile * self.sums / (FLOATS_PER_WORD if self.bits == 8 else 2 * FLOATS_PER_WORD))

    @property
    def head_words(self) -> int:
        """128-bit words of one tile's scales and biases on one port."""
        return self.scale_words + (float_words(self.tile) if self.bias else 0)

    @property
    def tile_words(self) -> int:
        """128-bit words of one tile's weights on one port."""
        return self.tile * self.channel_words

    @property
    def port_words(self) -> int:
        """128-bit words of the product on one port."""
        return self.tiles * (self.head_words + self.tile_words)

    @property
    def section_words(self) -> int:
        """128-bit words from one port's section to the next, of a stream that is this product alone."""
        return section_words(self.port_words)

    @property
    def stream_bytes(self) -> int:
        """Bytes of such a stream, all ports."""
        return self.ports * self.section_words * WORD_BYTES

    @property
    def port_lanes(self) -> int:
        """Ports whose sums are scaled in one clock (Shapes::PORT_LANES): a group of int4 lasts four words."""
        return 1 if self.bits == 8 else ceil(self.ports / 4)

    @property
    def port_blocks(self) -> int:
        """Clocks in which every port has its turn (Shapes::PORT_BLOCKS)."""
        return ceil(self.ports / self.port_lanes)

    @property
    def tile_step(self) -> int:
        """Rows of a tile per port come in these steps: its channels are whole float32 words (and pairs)."""
        # The channels of a tile, rows times ports, have to be a multiple of the four floats of a word.
        return FLOATS_PER_WORD // gcd(FLOATS_PER_WORD, self.ports)

    def cut(self, words: int) -> Product:
        """Cut into tiles of about `words` words on one port, all of one size."""
        step = self.tile_step
        return self.cut_rows(max(step, words // self.channel_words // step * step))

    def cut_rows(self, largest: int) -> Product:
        """Cut into the fewest equal tiles of at most `largest` rows per port, a multiple of `tile_step`."""
        per_port, step = ceil(self.channels / self.ports), self.tile_step
        # The fewest tiles come first, then the least equal size that covers the channels with so many.
        tile = ceil(ceil(per_port / ceil(per_port / largest)) / step) * step
        return replace(self, tile=tile, tiles=ceil(per_port / tile))


@dataclass(frozen=True)
class DraftProducts:
    """The two products of a layer's draft, one request of the array.

    Args:
        first: neurons, as in an MLP's first product, then linear features. outer: its inputs are both.
        neurons, rank: of the draft.
    """

    first: Product
    outer: Product
    neurons: int
    rank: int

    def cut(self, words: int) -> DraftProducts:
        """Cut both into tiles of about `words` words on one port."""
        return replace(self, first=self.first.cut(words), outer=self.outer.cut(words))

    @property
    def port_words(self) -> int:
        """128-bit words of the draft on one port."""
        return self.first.port_words + self.outer.port_words

    @property
    def section_words(self) -> int:
        """128-bit words from one port's section to the next."""
        return section_words(self.port_words)

    @property
    def stream_bytes(self) -> int:
        """Bytes of the stream, all ports."""
        return self.first.ports * self.section_words * WORD_BYTES


def section_words(words: int) -> int:
    """Return the length of a section that holds this many words."""
    # Sections begin at multiples of 4 KiB, so bursts of 4 KiB from there never cross such a boundary.
    return ceil(words / SECTION_WORDS) * SECTION_WORDS


def float_words(values: int) -> int:
    """Return the 128-bit words of float32 values; rows are moved and quantised a word per clock."""
    return ceil(values / FLOATS_PER_WORD)
