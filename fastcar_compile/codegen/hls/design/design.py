"""The engine of one decoder on one board: everything that the generated sources depend on."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from functools import cached_property

from fastcar_compile.artifact.accelerator_section import DesignPart
from fastcar_compile.artifact.engine import (
    WORD_BYTES,
    BoardBudget,
    DraftProducts,
    EngineKind,
    EngineProduct,
    MlpSpec,
    Usage,
    float_words,
    section_words,
)
from fastcar_compile.codegen.hls.design.loops import LoadLoop, load_loop, product_cycles, scale_rows
from fastcar_compile.codegen.hls.design.spec import LinearSpec
from fastcar_compile.codegen.hls.design.usage import FIFO_WORDS, STEP_FIFO_WORDS, URAM_WORDS, Buffers, engine_usage
from fastcar_compile.errors import CompileError

BLOCK_RAM_WORDS = 1024
"""Words of 32 bits in a BRAM36."""


@dataclass(frozen=True)
class Design:
    """One kernel with one MAC array of as many cores as work in lock step; an MLP is two products on it, a linear is one.

    Args:
        mlp: the MLP that all layers share; also rows and cores.
        ports: logical weight ports, each 128 bits per clock; any number.
        gate_up: first product of the MLP; channel 2n is gate n, 2n + 1 is up n. down: the second.
        linears: name of every other call -> its product, in call order; empty: the engine computes MLPs alone.
        tiles_in_uram: whether the weight tiles are in UltraRAM instead of block RAM.
        axi_words: logical ports that one AXI port carries, word by word: 1, 2 or 4.
        group: query heads that a kernel of whole steps multiplies side by side; 0: it is none.
        share: rows of a video for which its attention reads keys and values once.
        drafts: name of a layer's draft -> its products.
        engine: where the products are.
    """

    mlp: MlpSpec
    budget: BoardBudget
    ports: int
    gate_up: EngineProduct
    down: EngineProduct
    linears: dict[str, EngineProduct] = field(default_factory=dict)
    tiles_in_uram: bool = False
    axi_words: int = 1
    group: int = 0
    share: int = 1
    drafts: dict[str, DraftProducts] = field(default_factory=dict)
    engine: EngineKind = "hls"

    @property
    def array_rows(self) -> int:
        """Rows that the array holds: a draft takes two for each of the batch."""
        return (2 if self.drafts else 1) * self.mlp.batch

    @property
    def passes(self) -> int:
        """Passes over a tile when every row computes: rows of one core, one after another."""
        return -(-self.mlp.batch // self.mlp.cores)

    @property
    def lanes(self) -> int:
        """int8 multiply-accumulates per clock, all cores together."""
        return self.ports * self.gate_up.lanes * self.mlp.cores

    @property
    def axi_weight_ports(self) -> int:
        """AXI ports that read weights."""
        return self.ports // self.axi_words

    @property
    def scale_rows(self) -> int:
        """Least rows of a tile in the loop over groups (SCALE_ROWS): a total rests until it is written."""
        return scale_rows(self.gate_up.port_blocks, self.budget.clock_mhz)

    def load(self, rows: int | None = None) -> LoadLoop:
        """Return what the array does when `rows` rows compute (None: every row), mapped by DRS."""
        rows, cores = self.mlp.batch if rows is None else rows, self.mlp.cores
        return LoadLoop(rows, -(-rows // cores), cores, self.scale_rows, self.engine == "rtl")

    @property
    def products(self) -> list[EngineProduct]:
        """Every product of a forward."""
        drafts = (product for own in self.drafts.values() for product in (own.first, own.outer))
        return [self.gate_up, self.down, *self.linears.values(), *drafts]

    @property
    def port_words(self) -> int:
        """128-bit words of one layer's MLP that one port reads."""
        return self.gate_up.port_words + self.down.port_words

    @property
    def section_words(self) -> int:
        """128-bit words from one port's section of an MLP's stream to the next."""
        return section_words(self.port_words)

    @property
    def stream_bytes(self) -> int:
        """Bytes of one MLP's weight stream, all ports."""
        return self.ports * self.section_words * WORD_BYTES

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weight streams of the decoder."""
        others = (*self.linears.values(), *self.drafts.values())
        return self.mlp.layers * self.stream_bytes + sum(p.stream_bytes for p in others)

    @property
    def rows_in_uram(self) -> bool:
        """Whether the rows of a kernel of whole steps are in UltraRAM: where the board has it."""
        return self.budget.uram > 0

    @property
    def values_in_uram(self) -> bool:
        """Whether rows and neurons are in UltraRAM before they are quantised: where a bank would take more than a block RAM."""
        words = -(-self.array_rows // self.mlp.cores) * float_words(max(p.inputs for p in self.products))
        return self.budget.uram > 0 and self.engine == "hls" and words > BLOCK_RAM_WORDS

    @cached_property
    def buffers(self) -> Buffers:
        """Sizes of the largest product; linears always have room for biases."""
        products = self.products
        # Biases are counted for every linear: a linear that `fit` adds later may have some.
        biased = [*products, *(replace(p, bias=True) for p in self.linears.values())]
        return Buffers(
            rows=self.array_rows,
            inputs=max(p.inputs for p in products),
            tile=max(p.tile for p in products),
            tile_words=max(p.tile_words for p in products),
            tile_sums=max(p.tile * p.sums for p in products),
            sums=max(p.sums for p in products),
            head_words=max(p.head_words for p in biased),
            channel_words=max(p.channel_words for p in products),
            uram=self.tiles_in_uram,
            values_uram=self.values_in_uram,
        )

    @property
    def max_section_words(self) -> int:
        """Most 128-bit words of one port's section."""
        return max([self.section_words, *(p.section_words for p in self.linears.values())])

    def mlp_cycles(self, load: LoadLoop | None = None) -> int:
        """Return the estimated clocks of an MLP; memory latency is left out.

        Args:
            load: of at least one row; None: every row computes.
        """
        load = load or self.load()
        products = product_cycles(self.gate_up, load, inner=True) + product_cycles(self.down, load)
        return load_loop(self.mlp.hidden, load).cycles + products

    def cycles(self, name: str, load: LoadLoop | None = None) -> int:
        """Return the estimated clocks of one linear call, under the same terms."""
        product, load = self.linears[name], load or self.load()
        return load_loop(product.inputs, load).cycles + product_cycles(product, load)

    def step_cycles(self, load: LoadLoop | None = None) -> int:
        """Return the estimated clocks of a forward all of whose calls have this load, under the same terms."""
        load = load or self.load()
        return self.mlp.layers * self.mlp_cycles(load) + sum(self.cycles(name, load) for name in self.linears)

    @property
    def step_words(self) -> int:
        """128-bit words that one port reads in such a forward."""
        return self.mlp.layers * self.port_words + sum(p.port_words for p in self.linears.values())

    @property
    def fifo_words(self) -> int:
        """128-bit words of a weight port's FIFO, but for the longer ones of a kernel of whole steps."""
        return STEP_FIFO_WORDS if self.engine == "rtl" else FIFO_WORDS

    @property
    def step_fifo_words(self) -> int:
        """128-bit words of a weight port's FIFO in a kernel of whole steps."""
        return URAM_WORDS * self.axi_words if self.rows_in_uram and self.engine == "hls" else STEP_FIFO_WORDS

    @cached_property
    def usage(self) -> Usage:
        """Estimated resources (not synthesised)."""
        return engine_usage(self.mlp, self.gate_up, self.axi_words, self.buffers, self.fifo_words)

    def excess(self) -> list[str]:
        """Return one text per resource that the design needs more of than the budget has."""
        return self.usage.over(self.budget)

    def fit(self, linear: LinearSpec) -> EngineProduct:
        """Return a product for any linear on this very engine: its tiles are as long as the buffers allow.

        Raises:
            CompileError: the buffers are too small for it.
        """
        product = linear.product(self.ports, self.mlp.weight_bits)
        step, room = product.tile_step, self.buffers
        # The longest tile is limited by the buffer of its rows, of its words and of its sums.
        rows = [room.tile, room.tile_words // product.channel_words, room.tile_sums // product.sums]
        largest = min(rows) // step * step
        # Scales and biases share a buffer, whose words depend on the rows: the tile shrinks until they fit.
        while largest and replace(product, tile=largest).head_words > room.head_words:
            largest -= step
        if linear.inputs > room.inputs or not largest:
            raise CompileError(
                f"{linear.name} has {linear.inputs} inputs; the engine's buffers hold {room.inputs}, "
                f"and tiles of {room.tile_words} words per port",
                hint="choose the design again with this linear",
            )
        return product.cut_rows(largest)

    @property
    def part(self) -> DesignPart:
        """What the manifest and the report say of the design."""
        return DesignPart(
            spec=self.mlp,
            **{name: getattr(self, name) for name in STORED},
            lanes=self.lanes,
            passes=self.passes,
            stream_bytes=self.stream_bytes,
            linear_stream_bytes={name: product.stream_bytes for name, product in self.linears.items()},
            usage_estimate=self.usage,
            cycles_estimate=self.mlp_cycles(),
            linear_cycles_estimate={name: self.cycles(name) for name in self.linears},
        )

    @classmethod
    def of(cls, part: DesignPart) -> Design:
        """Return the design of a manifest."""
        return cls(part.spec, **{name: getattr(part, name) for name in STORED})


STORED = [own.name for own in fields(Design) if own.name != "mlp"]
"""Fields of a design that a manifest has by the same names."""
