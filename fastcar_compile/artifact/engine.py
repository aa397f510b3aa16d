"""The engine as the manifest stores it: what the board has for it, its MLP, its matrix products in tiles."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil, gcd
from operator import add
from typing import ClassVar, Literal

from pydantic import ConfigDict

from fastcar_compile.config.formats import ACCELERATED, GROUP, QUANT_FORMATS

FLOATS_PER_WORD = 4
"""float32 values in a memory word of 128 bits; every head of q and k begins a word."""

WORD_BITS, WORD_BYTES = 128, 16

PRODUCTS_PER_SUM = 8
"""Packed products that one DSP cascade adds before they are split (PRODUCTS_PER_SUM of fastcar_mac.hpp)."""

SECTION_WORDS = 256
"""A port's section of a weight stream starts at a multiple of 4 KiB, which no AXI burst may cross."""

WEIGHT_BITS = {name: QUANT_FORMATS[name].weight_bits for name in ACCELERATED}

EngineKind = Literal["hls", "rtl"]
"""Where the products are: in the one kernel, in C++; or in a kernel of their own, in RTL."""

_STRICT = ConfigDict(extra="forbid")

_NAMES = {"silu": "SwiGLU", "gelu": "GeGLU", "gelu_tanh": "GeGLU (tanh)", "relu": "ReGLU", "relu2": "squared ReGLU"}
"""Titles of gated MLPs."""


@dataclass(frozen=True)
class Usage:
    """Counts of LUT, FF, DSP slices, BRAM36 and URAM blocks."""

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    lut: int = 0
    ff: int = 0
    dsp: int = 0
    bram36: int = 0
    uram: int = 0

    def __add__(self, other: Usage) -> Usage:
        """Return what two parts take together."""
        return Usage(*map(add, vars(self).values(), vars(other).values()))

    def __mul__(self, count: int) -> Usage:
        """Return what so many of it take."""
        return Usage(*(count * used for used in vars(self).values()))

    def over(self, budget: BoardBudget) -> list[str]:
        """Return one text per resource whose use is above the budget."""
        pairs = {name: (used, getattr(budget, name)) for name, used in vars(self).items()}
        return [f"{name.upper()} {used} of {limit}" for name, (used, limit) in pairs.items() if used > limit]


@dataclass(frozen=True)
class BoardBudget:
    """What a design may use of a board; counts are after utilisation limits.

    Args:
        part: vendor part name.
        clock_mhz: fabric clock, MHz.
        lut: look-up tables.
        ff: flip-flops.
        dsp: DSP slices.
        bram36: 36 Kib block RAMs.
        uram: 288 Kib blocks; the engine does not need them.
        axi_ports: memory ports from the fabric.
        axi_bits: data bits of one port.
    """

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    part: str
    clock_mhz: float
    lut: int
    ff: int
    dsp: int
    bram36: int
    uram: int
    axi_ports: int
    axi_bits: int = 128

    @property
    def axi_words(self) -> int:
        """128-bit words of one port's beat that the engine takes: 1, 2 or 4."""
        # A port of 128 bits carries one word; a narrower one is refused in `designs`.
        return max(words for words in (1, 2, 4) if words == 1 or words * 128 <= self.axi_bits)


@dataclass(frozen=True)
class MlpSpec:
    """The MLP of one decoder layer, as the accelerator sees it.

    Args:
        hidden: H, inputs and outputs of the MLP.
        intermediate: I, outputs of gate and up.
        batch: B, rows per call, at most 32.
        layers: decoder layers that share the engine.
        cores: C, compute cores that the rows are spread over.
        activation: name of the nonlinearity, one of `ACTIVATIONS` of design/spec.py.
        gated: the MLP is down(act(gate(x)) * up(x)); otherwise down(act(up(x))).
        quant: "w8a8" or "w4a8".
        up_bias: gate or up has a bias. down_bias: down has one.
    """

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    hidden: int
    intermediate: int
    batch: int
    layers: int
    cores: int
    activation: str = "silu"
    gated: bool = True
    quant: str = "w8a8"
    up_bias: bool = False
    down_bias: bool = False

    @property
    def weight_bits(self) -> int:
        """Bits of one weight in the stream."""
        return WEIGHT_BITS[self.quant]

    @property
    def title(self) -> str:
        """What the kernel computes, for readers."""
        kind = _NAMES[self.activation] if self.gated else f"plain {self.activation}"
        return f"{self.quant} {kind} MLP"


@dataclass(frozen=True)
class EngineProduct:
    """`channels` outputs of `inputs` int8 values, cut into tiles.

    Channel (t * tile + j) * ports + p is row j of tile t on weight port p.

    Args:
        inputs: K. channels: N, of all linears of a call together.
        ports: weight ports, 128 bits per clock each.
        tile: rows of a tile on one port. tiles: their number.
        bits: of a weight, 8 or 4; 4: float16 scales for groups of 128 inputs.
        bias: whether a tile has float32 biases.
    """

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

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

    def cut(self, words: int) -> EngineProduct:
        """Cut into tiles of about `words` words on one port, all of one size."""
        step = self.tile_step
        return self.cut_rows(max(step, words // self.channel_words // step * step))

    def cut_rows(self, largest: int) -> EngineProduct:
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

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    first: EngineProduct
    outer: EngineProduct
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
