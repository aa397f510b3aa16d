"""Instructions of a decode step, a class each: its fields are its words. What its text says first is in the reference.

One more is declared here or in `replaying.py`, emitted by the builder, executed by the simulator and by a function of the
kernel (fastcar_step_rows.hpp). Checks, words, names in C++, the kernel's case and the reference's table follow from the class.
"""

from dataclasses import dataclass
from math import ceil
from typing import Annotated

from fastcar_compile.codegen.hls.design import step_loops as cost
from fastcar_compile.codegen.hls.step_program import instruction as of
from fastcar_compile.codegen.hls.step_program.cache_layout import MAX_WORDS
from fastcar_compile.ir.types import StateRole

KEYS = of.At("key_words", "videos * key_heads * key_words_of(blocks)")
RING = "ring >= 1 and sinks + ring <= positions"
HEADS = f"counts(heads) and counts(key_heads) and counts(blocks) and heads % key_heads == 0 and heads * blocks * {of.BLOCK_WORDS} <= a_words and heads * blocks * {of.BLOCK_WORDS} <= y_words and {RING}"
ADDS = "step::add_rows<StepConfig>(f, sizes, computing, committed, list, constants, gain, replay, x, y); computing = f.opcode == step::OP_ADD ? computing : list.active"
READ = f"(inputs + {of.LANES - 1}) // {of.LANES}"
WRITTEN = f"(channels + {of.LANES - 1}) // {of.LANES}"


@dataclass(frozen=True)
class Load(of.Instruction, opcode=1):
    """The rows of the input behind the list of rows, `count` words each, to X."""

    kernel = "step::load_input<StepConfig>(f, sizes.rows, given, inputs, x)"
    rules = ("rows + rows * count <= input_words",)
    count: of.XWords

    def _parts(self, work: cost.VectorWork) -> tuple[cost.Repeated, ...]:
        """See of.Instruction.loops."""
        return (cost.Repeated((cost.Loop("rows", "move_words", self.count, cost.WRITE, moves=True),), work.rows),)


@dataclass(frozen=True)
class Store(of.Instruction, opcode=18):
    """The rows of A to the output, `count` words each."""

    kernel = "step::store_output<StepConfig>(f, sizes.rows, list.active, a, outputs)"
    rules = ("rows * count <= output_words",)
    count: Annotated[int, "counts({})", "{} <= a_words"]

    def _parts(self, work: cost.VectorWork) -> tuple[cost.Repeated, ...]:
        """See of.Instruction.loops."""
        return (cost.Repeated((cost.Loop("rows", "move_words", self.count, cost.WRITE, moves=True),), work.rows),)


@dataclass(frozen=True)
class Norm(of.Instruction, opcode=2):
    """RMSNorm of `pieces` times `count` words from `first` on, from X to A or from Y to Y; its weight in the constants. Between DECIDE and REPLAY, a row that does not compute may keep what it was.

    source: X or Y. inverse_size: 1 / values of a piece.
    """

    kernel = "step::norm_rows<StepConfig>(f, sizes.rows, computing, constants, x, a, y)"
    rules = (f"source == {of.Place.Y} or first + count * pieces <= x_words",)
    source: Annotated[of.Place, f"{{0}} == {of.Place.X} or {{0}} == {of.Place.Y}"]
    first: Annotated[int, of.At("y_words", "count * pieces")]
    count: of.Count
    pieces: of.Count
    weight: Annotated[int, of.At("constant_words", "count")]
    inverse_size: float
    epsilon: float

    def _parts(self, work: cost.VectorWork) -> tuple[cost.Repeated, ...]:
        """Return the loops of the first row or piece, whose first pass reads the weight, and those of the others."""
        weight = cost.Loop("normalize", "read_weight", self.count, cost.LARGEST_DEPTH, moves=True)
        largest = cost.Loop("normalize", "find_largest", self.count, cost.LARGEST_DEPTH)
        rest = (
            cost.Loop("normalize", "add_squares", self.count, cost.SQUARES_DEPTH),
            cost.Loop("normalize", "inverse_root", 1, cost.NORM_ROOT_DEPTH),
            cost.Loop("normalize", "scale_words", self.count, cost.NORM_DEPTH),
        )
        if isinstance(self, LayerNorm):
            centred = (
                cost.Loop("center", "find_largest_value", self.count, cost.LARGEST_DEPTH),
                cost.Loop("center", "add_values", self.count, cost.SUM_DEPTH),
                cost.Loop("center", "mean", 1, cost.MEAN_DEPTH),
                cost.Loop("center", "subtract_mean", self.count, cost.ADD_DEPTH),
            )
            rest = (*centred, *rest, cost.Loop("norm_rows", "add_bias", self.count, cost.ADD_DEPTH, moves=True))
        # The first pass reads the norm's weight from memory. It stays on chip for the other rows and pieces.
        done = work.computing * self.pieces
        return cost.Repeated((weight, *rest), min(done, 1)), cost.Repeated((largest, *rest), done - 1)


@dataclass(frozen=True)
class LayerNorm(Norm, opcode=17):
    """NORM of layer norms: without the mean first, and with the bias, which is behind the weight, added last."""

    weight: Annotated[int, of.At("constant_words", "2 * count")]


@dataclass(frozen=True)
class Linear(of.Instruction, opcode=3):
    """A linear; `weights` is its first word on every port.

    The last tile may reach beyond the channels, but no channel may be left without a tile.
    """

    kernel = "multiply"
    rules = (
        f"in_memory(source, target) or on_chip(source, target) or (source == {of.Place.A} and target == {of.Place.OUTPUT})",
        "tile * tiles * ports >= channels",
        f"not in_memory(source, target) or rows + rows * ({READ}) <= input_words",
        f"in_memory(source, target) or {READ} <= a_words",
        f"target != {of.Place.OUTPUT} or rows * ({WRITTEN}) <= output_words",
        f"target == {of.Place.OUTPUT} or {WRITTEN} <= y_words",
    )
    source: of.Place
    target: of.Place
    inputs: of.Count
    channels: Annotated[int, "{} >= 1", f"{{}} <= {of.MAX_CHANNELS}"]
    tile: of.Count
    tiles: Annotated[int, "{} >= 1", "{} <= channels"]
    bias: of.Bit
    weights: of.Weights


@dataclass(frozen=True)
class Mlp(of.Instruction, opcode=4):
    """The MLP of the size that the engine is built for."""

    kernel = "multiply"
    rules = ("in_memory(source, target) or on_chip(source, target)",)
    source: of.Place
    target: of.Place
    weights: of.Weights


@dataclass(frozen=True)
class Rotate(of.Instruction, opcode=5):
    """RoPE of the rows in Y, by the table's row of each row's position: `half_words` of cosines, then of sines; of the last row beyond it."""

    kernel = "step::rotate_rows<StepConfig>(f, sizes.rows, list, constants, y)"
    rules = ("2 * half_words <= head_words",)
    first: Annotated[int, of.At("y_words", "heads * head_words")]
    heads: of.Count
    head_words: of.Count
    half_words: of.Count
    table: Annotated[int, of.At("constant_words", "table_rows * 2 * half_words")]
    table_rows: Annotated[int, "{} >= 1", f"{{}} <= {MAX_WORDS}"]

    def _parts(self, work: cost.VectorWork) -> tuple[cost.Repeated, ...]:
        """See of.Instruction.loops."""
        half = self.half_words
        table = tuple(
            cost.Loop("rotate_rows", label, half, cost.WRITE, moves=True) for label in ("read_cosines", "read_sines")
        )
        words = cost.Loop("rotate_row", "rotate_words", self.heads * half, cost.ROTATE_DEPTH, cost.PORTS_INTERVAL)
        return (cost.Repeated((*table, words), work.rows),)


@dataclass(frozen=True)
class Append(of.Instruction):
    """Keys or values to the cache. All layers share the layout of a program's positions, even where a layer's ring is shorter."""

    kernel = "append"
    first: Annotated[int, of.At("y_words", f"heads * blocks * {of.BLOCK_WORDS}")]
    heads: of.Count
    blocks: of.Count
    cache: int
    sinks: int
    ring: Annotated[int, RING]

    def _parts(self, work: cost.VectorWork) -> tuple[cost.Repeated, ...]:
        """Return the loops of each row's first head, whose quantisation others do not wait for, and of a port that stores."""
        floats, words = self.blocks * cost.BLOCK_FLOATS, self.blocks * cost.BLOCK_WORDS
        quantize = (
            cost.Loop("quantize_row", "copy_head", floats, cost.COPY_DEPTH),
            cost.Loop("quantize_head", "find_exponents", floats, cost.LARGEST_DEPTH),
            cost.Loop("quantize_head", "round_mantissas", floats, cost.MANTISSA_DEPTH),
            cost.Loop("quantize_heads", "send_words", words + 1, cost.COPY_DEPTH),
        )
        take = (
            cost.Loop("store_heads", "take_mantissas", words, cost.WRITE),
            cost.Loop("store_heads", "take_exponents", 1, cost.WRITE),
        )
        if isinstance(self, AppendKeys):
            # A beat of several ports' words is read before it is written: the other ports' words have to stay.
            read = (self.blocks, words) if work.axi_words > 1 else (self.blocks,)
            store = (
                *(cost.Loop("append_key", "read_each_beat", beats, cost.WRITE, moves=True) for beats in read),
                cost.Loop("append_key", "write_exponents", self.blocks, cost.REPLACE_DEPTH, moves=True),
                cost.Loop("append_key", "write_mantissas", words, cost.REPLACE_DEPTH, moves=True),
            )
        else:
            # A position is one lane of every word of its tile, so the whole tile is read and written.
            tile = cost.CacheLayout(work.ports, self.blocks * cost.BLOCK, cost.BLOCK).value_tile_words
            store = (
                cost.Loop("append_value", "begin_ports", work.axi_words, cost.WRITE),
                cost.Loop("append_value", "read_each_beat", tile, cost.WRITE, moves=True),
                cost.Loop("append_value", "write_values", tile, cost.REPLACE_DEPTH, moves=True),
            )
        # The heads of one position are on all ports for keys. For values every port stores a part of each head.
        keys = isinstance(self, AppendKeys)
        own = ceil(self.heads * work.axi_words / work.ports) if keys else self.heads
        # A row begins when the row before it is in memory.
        return (
            cost.Repeated(quantize, work.rows),
            cost.Repeated(take, work.rows * self.heads),
            cost.Repeated(store, work.rows * own),
        )


@dataclass(frozen=True)
class AppendKeys(Append, opcode=6):
    """The keys of all heads in Y from word `first` on, `blocks` blocks of 32 each, to the cache of the row's video."""

    cache: Annotated[int, of.At("key_words", "videos * heads * key_words_of(blocks)", StateRole.KEY_CACHE)]


@dataclass(frozen=True)
class AppendValues(Append, opcode=7):
    """The same of values."""

    cache: Annotated[int, of.At("value_words", "videos * heads * value_words_of(blocks)", StateRole.VALUE_CACHE)]


@dataclass(frozen=True)
class Attend(of.Instruction, opcode=8):
    """Attention of the query heads in Y, to A; `factor` is that of the logits.

    window: positions behind the sinks. One of 0 would hide a token from itself, and softmax needs one visible row.
    """

    kernel = "attention"
    rules = (HEADS,)
    heads: int
    key_heads: int
    blocks: int
    keys: Annotated[int, KEYS]
    values: Annotated[int, of.At("value_words", "videos * key_heads * value_words_of(blocks)")]
    sinks: int
    ring: int
    window: Annotated[int, "{} >= 1"]
    factor: float


@dataclass(frozen=True)
class Add(of.Instruction, opcode=9):
    """Adds Y to X."""

    kernel = ADDS
    count: of.XWords

    def _parts(self, work: cost.VectorWork) -> tuple[cost.Repeated, ...]:
        """See of.Instruction.loops."""
        return (cost.Repeated((cost.Loop("add_row", "add_words", self.count, cost.ADD_DEPTH),), work.rows),)


@dataclass(frozen=True)
class End(of.Instruction, opcode=12):
    """Ends the launch.

    A program has several where it can begin behind one of them.
    """

    kernel = "outcome.count = 0"
