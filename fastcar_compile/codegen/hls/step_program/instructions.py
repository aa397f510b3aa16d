"""The instructions of a decode step, a class each: its fields are its words, and what its text says is in the reference.

One more is declared here, emitted by the builder, executed by the simulator and by a function of the kernel, and
costs what `design/step_loops.py` says. Checks, words, sizes in C++ and the reference's table follow from the fields.
"""

from dataclasses import dataclass
from enum import IntEnum
from typing import Annotated

from fastcar_compile.codegen.hls.control_table.table import MAX_UNITS
from fastcar_compile.codegen.hls.step_program.cache_layout import MAX_WORDS
from fastcar_compile.codegen.hls.step_program.instruction import (
    BLOCK_WORDS,
    DECLARED,
    GAIN_WORDS,
    LANES,
    MAX_CHANNELS,
    ROWS_ON_CHIP,
    At,
    Bit,
    Count,
    Gate,
    Instruction,
    OnChip,
    Place,
    RowWords,
    Weights,
)
from fastcar_compile.gates.registry import GateKind


class Opcode(IntEnum):
    """The first byte of an instruction."""

    LOAD = 1
    NORM = 2
    LINEAR = 3
    MLP = 4
    ROTATE = 5
    APPEND_KEYS = 6
    APPEND_VALUES = 7
    ATTEND = 8
    ADD = 9
    DECIDE = 10
    REPLAY = 11
    END = 12
    DECIDE_ROWS = 13
    RECALL = 14
    DRAFT = 15
    REPLAY_DRAFT = 16
    LAYER_NORM = 17
    STORE = 18


KEYS = At("key_words", "videos * key_heads * key_words_of(blocks)")
NETWORK = At("constant_words", "network_words_of(units, count)")
RING = "ring >= 1 and sinks + ring <= positions"
Slots = Annotated[int, At("replay_words", "slots * videos * count")]
HEADS = f"counts(heads) and counts(key_heads) and counts(blocks) and heads % key_heads == 0 and heads * blocks * {BLOCK_WORDS} <= row_words and {RING}"
MOVES = f"source < {ROWS_ON_CHIP} and target < {ROWS_ON_CHIP} and source != target"
ADDS = "step::add_rows<StepConfig>(f, sizes, computing, list, constants, gain, replay, rows); computing = f.opcode == step::OP_ADD ? computing : list.active"
READ = f"(inputs + {LANES - 1}) // {LANES}"
WRITTEN = f"(channels + {LANES - 1}) // {LANES}"


@dataclass(frozen=True)
class Load(Instruction):
    """The rows of the input behind the list of rows, `count` words each, to the target."""

    opcode = Opcode.LOAD
    kernel = "step::load_input<StepConfig>(f, sizes.rows, given, inputs, rows)"
    rules = ("row_list_words + rows * count <= input_words",)
    target: OnChip
    count: RowWords


@dataclass(frozen=True)
class Store(Instruction):
    """The rows of the source to the output, `count` words each."""

    opcode = Opcode.STORE
    kernel = "step::store_output<StepConfig>(f, sizes.rows, list.active, rows, outputs)"
    rules = ("rows * count <= output_words",)
    source: OnChip
    count: RowWords


@dataclass(frozen=True)
class Norm(Instruction):
    """RMSNorm of `pieces` times `count` words from `first` on; its weight in the constants. Between DECIDE and REPLAY, a row that does not compute may keep what it was.

    inverse_size: 1 / values of a piece.
    """

    opcode = Opcode.NORM
    kernel = "step::norm_rows<StepConfig>(f, sizes.rows, computing, constants, rows)"
    source: OnChip
    target: OnChip
    first: Annotated[int, At("row_words", "count * pieces")]
    count: Count
    pieces: Count
    weight: Annotated[int, At("constant_words", "count")]
    inverse_size: float
    epsilon: float


@dataclass(frozen=True)
class LayerNorm(Norm):
    """NORM of layer norms: without the mean first, and with the bias, which is behind the weight, added last."""

    opcode = Opcode.LAYER_NORM
    weight: Annotated[int, At("constant_words", "2 * count")]


@dataclass(frozen=True)
class Linear(Instruction):
    """A linear; `weights` is its first word on every port.

    The last tile may reach beyond the channels, but no channel may be left without a tile.
    """

    opcode = Opcode.LINEAR
    kernel = "multiply"
    rules = (
        f"in_memory(source, target) or source < {ROWS_ON_CHIP} and target == {Place.OUTPUT} or {MOVES}",
        "tile * tiles * ports >= channels",
        f"not in_memory(source, target) or row_list_words + rows * ({READ}) <= input_words",
        f"in_memory(source, target) or {READ} <= row_words",
        f"target != {Place.OUTPUT} or rows * ({WRITTEN}) <= output_words",
        f"target == {Place.OUTPUT} or {WRITTEN} <= row_words",
    )
    source: Place
    target: Place
    inputs: Count
    channels: Annotated[int, f"1 <= {{}} <= {MAX_CHANNELS}"]
    tile: Count
    tiles: Annotated[int, "1 <= {} <= channels"]
    bias: Bit
    weights: Weights


@dataclass(frozen=True)
class Mlp(Instruction):
    """The MLP of the size that the engine is built for."""

    opcode = Opcode.MLP
    kernel = "multiply"
    rules = (f"in_memory(source, target) or {MOVES}",)
    source: Place
    target: Place
    weights: Weights


@dataclass(frozen=True)
class Rotate(Instruction):
    """RoPE of the table's row of each row's position: `half_words` of cosines, then of sines; of the last row beyond it."""

    opcode = Opcode.ROTATE
    kernel = "step::rotate_rows<StepConfig>(f, sizes.rows, list, constants, rows)"
    rules = ("2 * half_words <= head_words",)
    source: OnChip
    target: OnChip
    first: Annotated[int, At("row_words", "heads * head_words")]
    heads: Count
    head_words: Count
    half_words: Count
    table: Annotated[int, At("constant_words", "table_rows * 2 * half_words")]
    table_rows: Annotated[int, f"1 <= {{}} <= {MAX_WORDS}"]


@dataclass(frozen=True)
class Append(Instruction):
    """Keys or values to the cache. All layers share the layout of a program's positions, even where a layer's ring is shorter."""

    kernel = "append"
    source: OnChip
    first: Annotated[int, At("row_words", f"heads * blocks * {BLOCK_WORDS}")]
    heads: Count
    blocks: Count
    cache: int
    sinks: int
    ring: Annotated[int, RING]


@dataclass(frozen=True)
class AppendKeys(Append):
    """The keys of all heads from word `first` on, `blocks` blocks of 32 each, to the cache of the row's video."""

    opcode = Opcode.APPEND_KEYS
    cache: Annotated[int, At("key_words", "videos * heads * key_words_of(blocks)")]


@dataclass(frozen=True)
class AppendValues(Append):
    """The same of values."""

    opcode = Opcode.APPEND_VALUES
    cache: Annotated[int, At("value_words", "videos * heads * value_words_of(blocks)")]


@dataclass(frozen=True)
class Attend(Instruction):
    """Attention of the query heads; `factor` is that of the logits.

    window: positions behind the sinks. One of 0 would hide a token from itself, and softmax needs one visible row.
    """

    opcode = Opcode.ATTEND
    kernel = "attention"
    rules = (HEADS,)
    source: OnChip
    target: OnChip
    heads: int
    key_heads: int
    blocks: int
    keys: Annotated[int, KEYS]
    values: Annotated[int, At("value_words", "videos * key_heads * value_words_of(blocks)")]
    sinks: int
    ring: int
    window: Annotated[int, "{} >= 1"]
    factor: float


@dataclass(frozen=True)
class Add(Instruction):
    """Adds the source to the target."""

    opcode = Opcode.ADD
    kernel = ADDS
    source: OnChip
    target: OnChip
    count: RowWords


@dataclass(frozen=True)
class Decide(Instruction):
    """Score and gate of the layer by the table: which rows of the next MLP compute.

    The replay buffer has a memory word per slot and video with its chain count, those of the layer from word `chain` on:
    a row changes no word that other rows change. Fields of what the gate does not read are 0, so that a program cannot
    hide data in them.

    Args:
        source: where q or x is.
        heads .. ring: of q, and of the cached key of position - stride, of a gate that reads q.
        count, inputs: x has `count` words a row, of a gate that reads the MLP's input. The x of the last forward that
            computed is kept in the replay buffer from word `inputs` on, slot after slot, video after video.
        network, units: of gate `learned`; the word of the layer's network in the constants, and its hidden units.
    """

    opcode = Opcode.DECIDE
    kernel = "decide"
    rules = (
        f"not reads_query(gate) or {HEADS}",
        "reads_query(gate) or heads | key_heads | blocks | keys | sinks | ring == 0",
        "reads_query(gate) or counts(count) and count <= row_words",
        "not reads_query(gate) or count | inputs == 0",
        f"gate != {GateKind.LEARNED} or 1 <= units <= {MAX_UNITS}",
        f"gate == {GateKind.LEARNED} or network | units == 0",
    )
    gate: Gate
    stride: Count
    chain: Annotated[int, At("replay_words", "stride * videos")]
    source: OnChip
    heads: int = 0
    key_heads: int = 0
    blocks: int = 0
    keys: Annotated[int, KEYS] = 0
    sinks: int = 0
    ring: int = 0
    count: int = 0
    inputs: Annotated[int, At("replay_words", "stride * videos * count")] = 0
    network: Annotated[int, NETWORK] = 0
    units: int = 0


@dataclass(frozen=True)
class DecideRows(Instruction):
    """DECIDE of a short program: behind the list of rows come `query_words` of q or x of all rows, `key_words` of the cached key or x (operands). `count` words are a row of x, where there is a network."""

    opcode = Opcode.DECIDE_ROWS
    kernel = "decide"
    rules = (
        "row_list_words + query_words + key_words <= input_words",
        "units > 0 or network | count == 0",
        f"units == 0 or units <= {MAX_UNITS} and counts(count) and query_words == rows * count",
    )
    query_words: int
    key_words: int
    network: Annotated[int, NETWORK] = 0
    units: int = 0
    count: int = 0


@dataclass(frozen=True)
class Replay(Instruction):
    """Where a row computed: keeps the source in its slot and adds it to the target; elsewhere adds what the slot holds."""

    opcode = Opcode.REPLAY
    kernel = ADDS
    source: OnChip
    target: OnChip
    count: RowWords
    slots: Count
    cache: Slots


@dataclass(frozen=True)
class ReplayDraft(Replay):
    """REPLAY, but where a row replays it adds bias + g (slot - bias) + source, in this order."""

    opcode = Opcode.REPLAY_DRAFT
    bias: Annotated[int, At("constant_words", "count")]


@dataclass(frozen=True)
class Recall(Instruction):
    """Where a row replays: brings the x of its slot to the target, and finds the gain of its draft.

    Args:
        slots, inputs: the slots that keep x, as Decide's stride and inputs.
        table: of the layer's draft, its edges and its gains.
    """

    opcode = Opcode.RECALL
    kernel = "step::recall_rows<StepConfig>(f, sizes, list.deciding & ~computing, list, constants, replay, gain, rows)"
    source: OnChip
    target: OnChip
    count: RowWords
    slots: Count
    inputs: Slots
    table: Annotated[int, At("constant_words", f"{GAIN_WORDS}")]


@dataclass(frozen=True)
class DraftRows(Instruction):
    """Where a row replays: its draft, one request of the array; `weights` is its first word on every port.

    Of two rows for each that replays: neurons and linear features of x and of the recalled x; what the gain leaves of
    their difference; then the output of one row.

    Args:
        tile, tiles, bias: of its first product. outer_tile, outer_tiles: of its second.
    """

    opcode = Opcode.DRAFT
    kernel = "multiply"
    rules = ("counts(neurons + rank)",)
    source: OnChip
    recalled: OnChip
    target: OnChip
    neurons: Count
    rank: Count
    tile: Count
    tiles: Count
    bias: Bit
    outer_tile: Count
    outer_tiles: Count
    weights: Weights


@dataclass(frozen=True)
class End(Instruction):
    """Ends the launch.

    A program has several where it can begin behind one of them.
    """

    opcode = Opcode.END
    kernel = "outcome.count = 0"


OF_REPLAY = (Decide, Recall, DraftRows)
"""What a layer that replays has, and one that does not has not; Replay is ADD there."""

OF_DRAFTS = (Recall, DraftRows)
KINDS: dict[int, type[Instruction]] = {kind.opcode: kind for kind in sorted(DECLARED, key=lambda kind: kind.opcode)}
