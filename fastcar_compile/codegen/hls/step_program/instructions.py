"""Instructions of a decode step, a class each: its fields are its words (docs/reference/drs_table.md)."""

from dataclasses import dataclass

from fastcar_compile.codegen.hls.control_table.gate import network_words
from fastcar_compile.codegen.hls.control_table.table import MAX_UNITS
from fastcar_compile.codegen.hls.step_program.cache_layout import BLOCK, MAX_WORDS, Sizes, counts
from fastcar_compile.codegen.hls.step_program.instruction import LANES, Instruction, Opcode, Place, in_memory, on_chip
from fastcar_compile.gates.draft import GAINS
from fastcar_compile.gates.registry import GateKind

BLOCK_WORDS = BLOCK // LANES
"""Memory words of a block of float32 values."""

MAX_CHANNELS = 1 << 18


@dataclass(frozen=True)
class Load(Instruction):
    """The rows of the input -> target."""

    opcode = Opcode.LOAD
    target: Place
    count: int

    def fits(self, room: Sizes) -> bool:
        """See Instruction.fits."""
        small = on_chip(self.target) and counts(self.count)
        given = room.row_list_words + room.rows * self.count
        return small and self.count <= room.row_words and given <= room.input_words


@dataclass(frozen=True)
class Store(Instruction):
    """The rows of the source -> the output."""

    opcode = Opcode.STORE
    source: Place
    count: int

    def fits(self, room: Sizes) -> bool:
        """See Instruction.fits."""
        small = on_chip(self.source) and counts(self.count) and self.count <= room.row_words
        return small and room.rows * self.count <= room.output_words


@dataclass(frozen=True)
class Norm(Instruction):
    """RMSNorm of `pieces` times `count` words from `first` on; `inverse_size`: 1 / values of a piece."""

    opcode = Opcode.NORM
    source: Place
    target: Place
    first: int
    count: int
    pieces: int
    weight: int
    inverse_size: float
    epsilon: float

    def fits(self, room: Sizes) -> bool:
        """See Instruction.fits."""
        small = on_chip(self.source, self.target) and counts(self.count, self.pieces)
        inside = self.first + self.count * self.pieces <= room.row_words
        return small and inside and self.weight + self.count <= room.constant_words


@dataclass(frozen=True)
class LayerNorm(Norm):
    """The same of layer norms: the mean is subtracted first; the bias, behind the weight, is added last."""

    opcode = Opcode.LAYER_NORM

    def fits(self, room: Sizes) -> bool:
        """See Instruction.fits."""
        return super().fits(room) and self.weight + 2 * self.count <= room.constant_words


@dataclass(frozen=True)
class Linear(Instruction):
    """A linear of the rows; its weights begin at word `weights` of every port (docs/reference/drs_table.md)."""

    opcode = Opcode.LINEAR
    source: Place
    target: Place
    inputs: int
    channels: int
    tile: int
    tiles: int
    bias: int
    weights: int

    def fits(self, room: Sizes) -> bool:
        """See Instruction.fits."""
        small = counts(self.inputs, self.tile) and self.channels <= MAX_CHANNELS and 1 <= self.tiles <= self.channels
        comes, leaves = in_memory(self.source, self.target), self.target == Place.OUTPUT
        places = comes or (on_chip(self.source) if leaves else on_chip(self.source, self.target))
        words, read = -(-self.channels // LANES), -(-self.inputs // LANES)
        target = room.rows * words <= room.output_words if leaves else words <= room.row_words
        given = room.row_list_words + room.rows * read
        source = given <= room.input_words if comes else read <= room.row_words
        # The last tile may reach beyond the channels, but no channel may be left without a tile.
        covered = self.tile * self.tiles * room.ports >= self.channels
        stored = self.bias <= 1 and self.weights < room.weight_words
        return small and places and target and source and covered and stored


@dataclass(frozen=True)
class Mlp(Instruction):
    """The MLP of the rows, of the size that the engine is built for."""

    opcode = Opcode.MLP
    source: Place
    target: Place
    weights: int

    def fits(self, room: Sizes) -> bool:
        """See Instruction.fits."""
        places = in_memory(self.source, self.target) or on_chip(self.source, self.target)
        return places and self.weights < room.weight_words


@dataclass(frozen=True)
class Rotate(Instruction):
    """RoPE of the heads from word `first` on. A row of the table: cos, then sin, `half_words` words each."""

    opcode = Opcode.ROTATE
    source: Place
    target: Place
    first: int
    heads: int
    head_words: int
    half_words: int
    table: int
    table_rows: int

    def fits(self, room: Sizes) -> bool:
        """See Instruction.fits."""
        small = on_chip(self.source, self.target) and counts(self.heads, self.head_words, self.half_words)
        inside = 2 * self.half_words <= self.head_words and self.first + self.heads * self.head_words <= room.row_words
        table = 1 <= self.table_rows <= MAX_WORDS
        return small and inside and table and self.table + 2 * self.half_words * self.table_rows <= room.constant_words


@dataclass(frozen=True)
class Append(Instruction):
    """Heads of `blocks` blocks from word `first` on -> the cache from word `cache` of every port on.

    Position p is in row p of the cache, but from `sinks` on in a ring of `ring` rows.
    """

    source: Place
    first: int
    heads: int
    blocks: int
    cache: int
    sinks: int
    ring: int

    def _fits(self, room: Sizes, head_words: int, section: int) -> bool:
        small = on_chip(self.source) and counts(self.heads, self.blocks)
        inside = self.first + self.heads * self.blocks * BLOCK_WORDS <= room.row_words
        # All layers share the layout of `room.positions` rows, even where a layer's ring is shorter.
        ring = ring_fits(self.sinks, self.ring, room)
        return small and inside and ring and self.cache + room.videos * self.heads * head_words <= section


@dataclass(frozen=True)
class AppendKeys(Append):
    """Store the rows' keys."""

    opcode = Opcode.APPEND_KEYS

    def fits(self, room: Sizes) -> bool:
        """See Instruction.fits."""
        return self._fits(room, room.layout(self.blocks).key_words, room.key_words)


@dataclass(frozen=True)
class AppendValues(Append):
    """Store the rows' values."""

    opcode = Opcode.APPEND_VALUES

    def fits(self, room: Sizes) -> bool:
        """See Instruction.fits."""
        return self._fits(room, room.layout(self.blocks).value_words, room.value_words)


@dataclass(frozen=True)
class Attend(Instruction):
    """Attention of the query heads over the cache. `factor`: of the logits. `window`: positions behind the sinks."""

    opcode = Opcode.ATTEND
    source: Place
    target: Place
    heads: int
    key_heads: int
    blocks: int
    keys: int
    values: int
    sinks: int
    ring: int
    window: int
    factor: float

    def fits(self, room: Sizes) -> bool:
        """See Instruction.fits."""
        # A window of 0 would hide a token from itself, and softmax needs one visible row.
        if not on_chip(self.source, self.target) or self.window < 1 or not reads_keys(self, room):
            return False
        heads = room.videos * self.key_heads
        return self.values + heads * room.layout(self.blocks).value_words <= room.value_words


@dataclass(frozen=True)
class Add(Instruction):
    """target + source -> target."""

    opcode = Opcode.ADD
    source: Place
    target: Place
    count: int

    def fits(self, room: Sizes) -> bool:
        """See Instruction.fits."""
        return on_chip(self.source, self.target) and counts(self.count) and self.count <= room.row_words


@dataclass(frozen=True)
class Decide(Instruction):
    """The layer's gate by the control table. Fields of what the gate does not read are 0.

    The replay buffer has a memory word per slot and video with its chain count, those of the layer from word `chain` on.

    Args:
        source: where q or x is.
        heads .. ring: of q, and of the cached key of position - stride, of a gate that reads q.
        count, inputs: x has `count` words a row, of a gate that reads the MLP's input. The x of the last forward that
            computed is kept in the replay buffer from word `inputs` on, slot after slot, video after video.
        network, units: of gate `learned`; the word of the layer's network in the constants, and its hidden units.
    """

    opcode = Opcode.DECIDE
    gate: GateKind
    stride: int
    chain: int
    source: Place
    heads: int = 0
    key_heads: int = 0
    blocks: int = 0
    keys: int = 0
    sinks: int = 0
    ring: int = 0
    count: int = 0
    inputs: int = 0
    network: int = 0
    units: int = 0

    @property
    def network_words(self) -> int:
        """Memory words of the network."""
        return network_words(self.units, LANES * self.count)

    def fits(self, room: Sizes) -> bool:
        """See Instruction.fits."""
        placed = on_chip(self.source) and counts(self.stride)
        # A count has a word of its own, so that a row changes no word that other rows change.
        counted = placed and self.chain + self.stride * room.videos <= room.replay_words
        return counted and self._query_fits(room) and self._input_fits(room) and self._network_fits(room)

    def _query_fits(self, room: Sizes) -> bool:
        if not self.gate.reads_query:
            # Fields that the gate does not read are zero, so that a program cannot hide data in them.
            return not any((self.heads, self.key_heads, self.blocks, self.keys, self.sinks, self.ring))
        return reads_keys(self, room)

    def _input_fits(self, room: Sizes) -> bool:
        if not self.gate.reads_input:
            return not self.count and not self.inputs
        small = counts(self.count) and self.count <= room.row_words
        # The replay buffer keeps x of `stride` slots, each with all videos.
        return small and self.inputs + self.stride * room.videos * self.count <= room.replay_words

    def _network_fits(self, room: Sizes) -> bool:
        if self.gate is not GateKind.LEARNED:
            return not self.network and not self.units
        return 1 <= self.units <= MAX_UNITS and self.network + self.network_words <= room.constant_words


@dataclass(frozen=True)
class DecideRows(Instruction):
    """Decide of a short program, on what the host wrote into the input.

    Behind the list of rows are `query_words` of q or x of all rows, then `key_words` of the cached key or x.

    Args:
        network, units, count: of gate `learned`: as in Decide; `count` words are a row of x. Else 0.
    """

    opcode = Opcode.DECIDE_ROWS
    query_words: int
    key_words: int
    network: int = 0
    units: int = 0
    count: int = 0

    @property
    def network_words(self) -> int:
        """Memory words of the network."""
        return network_words(self.units, LANES * self.count)

    def fits(self, room: Sizes) -> bool:
        """See Instruction.fits."""
        if room.row_list_words + self.query_words + self.key_words > room.input_words:
            return False
        if not self.units:
            return not self.network and not self.count
        small = self.units <= MAX_UNITS and counts(self.count) and self.query_words == room.rows * self.count
        return small and self.network + self.network_words <= room.constant_words


@dataclass(frozen=True)
class Replay(Instruction):
    """Adds the source where a row computes, and keeps it in the slot; elsewhere adds what the slot holds."""

    opcode = Opcode.REPLAY
    source: Place
    target: Place
    count: int
    slots: int
    cache: int

    def fits(self, room: Sizes) -> bool:
        """See Instruction.fits."""
        small = on_chip(self.source, self.target) and counts(self.count, self.slots) and self.count <= room.row_words
        return small and self.cache + self.slots * room.videos * self.count <= room.replay_words


@dataclass(frozen=True)
class ReplayDraft(Replay):
    """Replay, but a row that replays adds its draft, which the source holds, and what the gain leaves of the slot.

    Args:
        bias: word of the constants at which the draft's bias begins.
    """

    opcode = Opcode.REPLAY_DRAFT
    bias: int

    def fits(self, room: Sizes) -> bool:
        """See Instruction.fits."""
        return super().fits(room) and self.bias + self.count <= room.constant_words


GAIN_WORDS = 2 * GAINS // LANES
"""Memory words of a draft's table: its edges, padded with a zero, then its gains."""


@dataclass(frozen=True)
class Recall(Instruction):
    """Of rows that replay: brings the x that the slot keeps to the target, and finds the gain of its draft.

    Args:
        source: where x is. count: its words. slots, inputs: the slots that keep x, as Decide's stride and inputs.
        table: word of the constants at which edges and gains of the layer's draft begin.
    """

    opcode = Opcode.RECALL
    source: Place
    target: Place
    count: int
    slots: int
    inputs: int
    table: int

    def fits(self, room: Sizes) -> bool:
        """See Instruction.fits."""
        small = on_chip(self.source, self.target) and counts(self.count, self.slots) and self.count <= room.row_words
        kept = self.inputs + self.slots * room.videos * self.count <= room.replay_words
        return small and kept and self.table + GAIN_WORDS <= room.constant_words


@dataclass(frozen=True)
class DraftRows(Instruction):
    """The draft of rows that replay: what its linears make of x and of the recalled x, which the gain leaves of it.

    Both products are one request of the array, of two rows for each that replays: neurons and linear features of x and
    of the recalled x; their difference; then the output of one row.

    Args:
        source, recalled: where x and the recalled x are.
        neurons, rank: of the draft. tile, tiles, bias: of its first product. outer_tile, outer_tiles: of its second.
        weights: its first word on every port.
    """

    opcode = Opcode.DRAFT
    source: Place
    recalled: Place
    target: Place
    neurons: int
    rank: int
    tile: int
    tiles: int
    bias: int
    outer_tile: int
    outer_tiles: int
    weights: int

    def fits(self, room: Sizes) -> bool:
        """See Instruction.fits."""
        places = on_chip(self.source, self.recalled, self.target)
        tiles = counts(self.tile, self.tiles, self.outer_tile, self.outer_tiles)
        sizes = counts(self.neurons, self.rank, self.neurons + self.rank) and self.bias <= 1
        return places and tiles and sizes and self.weights < room.weight_words


@dataclass(frozen=True)
class End(Instruction):
    """The launch is done. A program has several where it can begin behind one of them."""

    opcode = Opcode.END

    def fits(self, room: Sizes) -> bool:
        """See Instruction.fits."""
        return True


_ALL = (
    *(Load, Norm, Linear, Mlp, Rotate, AppendKeys, AppendValues, Attend, Add, Decide, Replay, End, DecideRows),
    *(Recall, DraftRows, ReplayDraft, LayerNorm, Store),
)
KINDS: dict[int, type[Instruction]] = {kind.opcode: kind for kind in _ALL}


def ring_fits(sinks: int, ring: int, room: Sizes) -> bool:
    """Return whether a cache holds the rows."""
    return ring >= 1 and sinks + ring <= room.positions


def reads_keys(own: Attend | Decide, room: Sizes) -> bool:
    """Return whether the query heads of an instruction are in a row, and their key heads in the cache."""
    if not counts(own.heads, own.key_heads, own.blocks) or own.heads % own.key_heads:
        return False
    ring = ring_fits(own.sinks, own.ring, room)
    inside = own.heads * own.blocks * BLOCK_WORDS <= room.row_words
    cached = room.videos * own.key_heads * room.layout(own.blocks).key_words
    return ring and inside and own.keys + cached <= room.key_words
