"""A step program executed in numpy, on memory as the engine sees it."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from fastcar_compile.codegen.hls.control_table.simulator import LayerCall, LayerTrace, run_layer
from fastcar_compile.codegen.hls.control_table.table import TableStatus as TableStatus
from fastcar_compile.codegen.hls.control_table.table import pack_inputs
from fastcar_compile.codegen.hls.step_program import instructions as step
from fastcar_compile.codegen.hls.step_program import replaying
from fastcar_compile.codegen.hls.step_program.cache_layout import BLOCK, Array, CacheLayout, Rows
from fastcar_compile.codegen.hls.step_program.instruction import LANES, Instruction, Place
from fastcar_compile.codegen.hls.step_program.program import StepProgram
from fastcar_compile.errors import InternalError
from fastcar_compile.gates.base import GateInputs, ScoreConstants
from fastcar_compile.gates.input_delta import InputDeltaGate
from fastcar_compile.gates.registry import GateKind
from fastcar_compile.ir import exact

Product = Callable[[Array], Array]
"""A linear or an MLP: float32 [rows, inputs] -> [rows, channels]."""


@dataclass
class SimulatedMemory:
    """What a step reads and changes.

    Args:
        constants: float32 [constant_words * 4]. products: by the word at which their weights begin.
        drafts: the two products of each, by the same.
        keys, values: int8 [ports, section words, 16].
        replay: uint32 [replay_words, 4]: chain counts, and float32 outputs and inputs of MLPs.
        table: the control table.
    """

    constants: Array
    products: Mapping[int, Product]
    keys: Array
    values: Array
    replay: Array
    table: bytes = b""
    drafts: Mapping[int, tuple[Product, Product]] = field(default_factory=dict)


@dataclass(frozen=True)
class _Ring:
    """Rows of a cache: `sinks` positions, then a ring."""

    sinks: int
    ring: int

    def row(self, position: int) -> int:
        """Return the row of a position."""
        # Sinks stay in their rows for ever. Later positions take the rows of the ring in turn.
        behind = position - self.sinks
        return self.sinks + behind % self.ring if behind >= 0 else position

    def held(self, position: int) -> Array:
        """Return the positions in the rows that are filled up to the token at `position`, int64."""
        # Rows are filled from row 0 on, so until the cache is full the first position + 1 rows are the filled ones.
        row = np.arange(min(position + 1, self.sinks + self.ring))
        return np.where(row < self.sinks, row, position - (position - row) % self.ring)


class StepSimulator:
    """An engine with rows on chip. It runs one step per call, as the hardware does."""

    def __init__(self, program: StepProgram, memory: SimulatedMemory) -> None:
        self.program, self.memory = program, memory
        sizes = program.sizes
        words = sizes.x_words, sizes.a_words, sizes.y_words
        self._x, self._a, self._y = (np.zeros((sizes.rows, count * LANES), np.float32) for count in words)
        self._input = np.zeros((0, 0), np.float32)
        self._output = np.zeros((0, 0), np.float32)
        self._list = Rows.at(sizes)
        self._computing = np.ones(sizes.rows, bool)
        self._gain, self._committed = np.zeros(sizes.rows, np.float32), np.zeros(sizes.rows, bool)
        self._recalled = 0  # the value of a row at which a recalled x begins
        self.decided: dict[int, Array] = {}
        """Which rows computed the MLP, bool [rows] per layer with a gate, in the last decode forward."""
        self.traces: dict[int, LayerTrace] = {}
        """What the controller answered then."""

    def run(self, x: Array, rows: Rows) -> Array:
        """Return the output of one step, float32 [rows, channels], of x float32 [rows, hidden].

        Rows that are not active have any output.
        """
        self._input, self._list, self._computing = x, rows, rows.active.copy()
        for instruction in self.program.instructions:
            getattr(self, f"_{instruction.name.lower()}")(instruction)
        return self._output

    def _load(self, load: step.Load) -> None:
        self._x[:, : LANES * load.count] = self._input

    def _store(self, store: step.Store) -> None:
        self._output = self._a[:, : LANES * store.count].copy()

    def _norm(self, norm: step.Norm) -> None:
        constants, place = self._constants(norm, "weight"), self._values(norm, "first")
        source, target = (self._x, self._a) if norm.source is Place.X else (self._y, self._y)
        pieces = source[:, place].reshape(-1, norm.pieces, LANES * norm.count)
        if isinstance(norm, step.LayerNorm):
            weight, bias = np.split(constants, 2)
            normed = exact.layer_norm(pieces, weight, bias, norm.epsilon)
        else:
            normed = exact.rms_norm(pieces, constants, norm.epsilon)
        target[:, place] = normed.reshape(len(pieces), -1)

    def _linear(self, linear: step.Linear) -> None:
        y = self.memory.products[linear.weights](self._a[:, : linear.inputs])
        if linear.target == Place.OUTPUT:
            self._output = y
        else:
            self._y[:, : linear.channels] = y

    def _mlp(self, mlp: step.Mlp) -> None:
        y = self.memory.products[mlp.weights](self._a)
        # Rows that replay keep their old content here. Replay does not read it.
        self._y[self._computing, : y.shape[1]] = y[self._computing]

    _layer_norm = _norm

    def _rotate(self, rotate: step.Rotate) -> None:
        table, place = self._constants(rotate, "table").reshape(rotate.table_rows, -1), self._values(rotate, "first")
        heads = self._y[:, place].reshape(-1, rotate.heads, 1, LANES * rotate.head_words)
        for b, position in self._active(self._list.position):
            self._y[b, place] = exact.rotary(heads[b], table, position).reshape(-1)

    def _append(self, append: step.Append) -> None:
        layout = self.program.sizes.layout(append.blocks)
        if isinstance(append, step.AppendKeys):
            cache, words = self.memory.keys, layout.key_words
            unpack, pack = layout.unpack_keys, layout.pack_keys
        else:
            cache, words = self.memory.values, layout.value_words
            unpack, pack = layout.unpack_values, layout.pack_values
        # Packing all rows of a head for one position is slow. It checks the layout, and a test has few positions.
        for b, position in self._active(self._list.position):
            row, first = _Ring(append.sinks, append.ring).row(position), self._list.video[b] * append.heads
            heads = self._y[b, self._values(append, "first")].reshape(append.heads, -1)
            for number, head in enumerate(exact.stored_rows(heads), first):
                place = slice(append.cache + number * words, append.cache + (number + 1) * words)
                rows = unpack(cache[:, place], number)
                # What pads the words stays as it is.
                change = np.zeros_like(rows)
                change[row] = head - rows[row]
                cache[:, place] += pack(change, number)

    _append_keys = _append_values = _append

    def _attend(self, attend: step.Attend) -> None:
        layout, ring = self.program.sizes.layout(attend.blocks), _Ring(attend.sinks, attend.ring)
        size, group = attend.heads * layout.head_dim, attend.heads // attend.key_heads
        for b, position in self._active(self._list.position):
            held = ring.held(position)
            visible = (held < attend.sinks) | (held > position - attend.window)
            heads = self._y[b, :size].reshape(-1, group, layout.head_dim)
            first = self._list.video[b] * attend.key_heads
            found = [self._head(attend, layout, n, queries, visible) for n, queries in enumerate(heads, first)]
            self._a[b, :size] = np.concatenate(found).reshape(-1)

    def _values(self, instruction: Instruction, name: str) -> slice:
        """Return the float32 values of the memory words of which a field is the first."""
        words = instruction.extent(name, self.program.sizes)
        return slice(LANES * words.start, LANES * words.stop)

    def _constants(self, instruction: Instruction, name: str) -> Array:
        return self.memory.constants[self._values(instruction, name)]

    def _kept(self, instruction: Instruction, name: str, count: int) -> Array:
        """Return a view of the rows of `count` words that slots keep, float32 [slots * videos + staged, size]."""
        words = self.memory.replay[instruction.extent(name, self.program.sizes)]
        return words.view(np.float32).reshape(-1, LANES * count)

    def _slots(self, slots: int) -> Array:
        """Return which of them each row has. What stands for that of a prompt's row or an inactive one is not used."""
        return np.maximum(self._list.step, 0) % slots * self.program.sizes.videos + self._list.video

    def _written(self, slots: int) -> Array:
        """Return which of the places each row of a decode forward writes: staged, or its slot."""
        sizes = self.program.sizes
        return slots * sizes.videos + np.arange(sizes.rows) if sizes.staged else self._slots(slots)

    def _commit(self, kept: Array, slots: int, rows: Array) -> None:
        """Copy what rows of the last launch staged to their slots."""
        to = (self._list.before[rows] - 1) % slots * self.program.sizes.videos + self._list.video[rows]
        kept[to] = kept[self._written(slots)[rows]]

    def _active(self, numbers: Array) -> Iterator[tuple[int, int]]:
        """Yield the active rows, and their numbers."""
        return ((b, int(numbers[b])) for b in np.flatnonzero(self._list.active).tolist())

    def _head(self, attend: step.Attend, layout: CacheLayout, number: int, queries: Array, visible: Array) -> Array:
        """Return what the query heads [group, dim] of one key head attend to; `number` counts videos and key heads."""
        own = attend.keys + number * layout.key_words, attend.values + number * layout.value_words
        keys = layout.unpack_keys(self.memory.keys[:, own[0] : own[0] + layout.key_words], number)[: len(visible)]
        values = layout.unpack_values(self.memory.values[:, own[1] : own[1] + layout.value_words], number)
        seen, factor = values[: len(visible)], np.float32(attend.factor)
        return np.stack([exact.attention(query, keys, seen, visible, factor) for query in queries])

    def _add(self, add: step.Add) -> None:
        self._x[:, : LANES * add.count] += self._y[:, : LANES * add.count]

    def _decide(self, decide: replaying.Decide) -> None:
        rows, deciding = self._list, self._list.deciding
        slots, written = self._slots(decide.stride), self._written(decide.stride)
        x, kept = self._inputs(decide)
        counts = self.memory.replay[decide.extent("chain", self.program.sizes)]
        if self.program.sizes.staged:  # a row computed whose chain ended
            self._committed = (rows.before > 0) & (counts[written, 0] == 0)
            self._commit(counts, decide.stride, rows.before > 0)
            if kept is not None:
                self._commit(kept, decide.stride, self._committed)
        # A launch without a decode forward decides nothing: a prompt never replays.
        if not deciding.any():
            return
        query, key = self._heads(decide)
        words = pack_inputs(GateInputs(query, key, x, None if kept is None else kept[slots]))
        chain = counts[slots, 0].view(np.int32)
        call = LayerCall(decide.layer, rows.step, *words, chain, self._network(decide), active=rows.active)
        trace = run_layer(self.memory.table, call)
        if trace.status is not TableStatus.OK:
            raise InternalError(f"the control table of a step program: {trace.status.name}")
        counts[written[deciding], 0] = np.array(trace.chain, np.uint32)[deciding]
        self._computing[:] = [bool(trace.index_register >> b & 1) for b in range(len(deciding))]
        self.decided[decide.layer], self.traces[decide.layer] = self._computing.copy(), trace
        # A row that replays keeps the x of its last computed forward: the change is measured from there.
        if x is not None and kept is not None:
            changed = self._computing & deciding
            kept[written[changed]] = x[changed]

    def _heads(self, decide: replaying.Decide) -> tuple[Array | None, Array | None]:
        """Return q and the cached key of position - stride, float32 [rows, heads, dim]; None: neither is read."""
        if not decide.gate.reads_query:
            return None, None
        rows, layout = self.program.sizes.rows, self.program.sizes.layout(decide.blocks)
        # The first frame has no earlier key. Row 0 then gives a score that the controller ignores: every row computes.
        key, ring = np.zeros((rows, decide.key_heads, layout.head_dim), np.float32), _Ring(decide.sinks, decide.ring)
        for b, position in self._active(self._list.position):
            row, first = ring.row(max(position - decide.stride, 0)), self._list.video[b] * decide.key_heads
            for head, number in enumerate(range(first, first + decide.key_heads)):
                section = self.memory.keys[:, decide.keys + number * layout.key_words :][:, : layout.key_words]
                key[b, head] = loaded(layout.unpack_keys(section, number)[row], layout.head_dim)
        query = self._y[:, : decide.heads * layout.head_dim]
        return query.reshape(rows, decide.heads, -1), key

    def _inputs(self, decide: replaying.Decide) -> tuple[Array | None, Array | None]:
        """Return x, float32 [rows, size], and a view of the slots that keep it; None: neither is read."""
        if not decide.gate.reads_input:
            return None, None
        x = self._a[:, : LANES * decide.count]
        return x, self._kept(decide, "inputs", decide.count)

    def _network(self, decide: replaying.Decide) -> Array | None:
        """Return the words of the layer's network; None: the gate has none."""
        if decide.gate is not GateKind.LEARNED:
            return None
        return self._constants(decide, "network").reshape(-1, LANES)

    def _replay_draft(self, replay: replaying.ReplayDraft) -> None:
        self._replay(replay, self._constants(replay, "bias"))

    def _replay(self, replay: replaying.Replay, bias: Array | None = None) -> None:
        """Add what the MLP gave or the slot holds. `bias`: of a draft, which is in Y of rows that replay."""
        own = self._y[:, : LANES * replay.count]
        kept, slots = self._kept(replay, "cache", replay.count), self._slots(replay.slots)
        deciding = self._list.deciding
        self._commit(kept, replay.slots, self._committed)
        changed = deciding & self._computing
        kept[self._written(replay.slots)[changed]] = own[changed]
        replayed = np.where(self._computing[:, None], own, kept[slots])
        if bias is not None:
            drafted = bias + self._gain[:, None] * (replayed - bias) + own
            replayed = np.where(self._computing[:, None], replayed, drafted)
        self._x[:, : LANES * replay.count] += np.where(deciding[:, None], replayed, own)
        # The next layer may have no gate, and then all of its rows compute.
        self._computing[:] = self._list.active

    @property
    def _replaying(self) -> Array:
        """The rows that replay, bool [rows]."""
        return self._list.deciding & ~self._computing

    def _recall(self, recall: replaying.Recall) -> None:
        rows, size = self._replaying, LANES * recall.count
        x, cached = self._a[rows, :size], self._kept(recall, "inputs", recall.count)
        cached = cached[self._slots(recall.slots)[rows]]
        change = InputDeltaGate.exact_score(GateInputs(x=x, cached=cached), ScoreConstants())
        edges, gains = np.split(self._constants(recall, "table"), 2)
        found = gains[(change[:, None] >= edges[:-1]).sum(1)]
        # No comparison with a NaN holds, so its row would get the first gain.
        self._gain[rows] = np.where(np.isnan(change), np.float32(0), found)
        self._a[rows, size : 2 * size] = cached
        self._recalled = size

    def _draft(self, draft: replaying.DraftRows) -> None:
        (first, outer), rows = self.memory.drafts[draft.weights], self._replaying
        if rows.any():
            own, cached = (first(self._a[rows, at:]) for at in (0, self._recalled))
            y = outer(own - self._gain[rows, None] * cached)
            self._y[rows, : y.shape[1]] = y

    def _end(self, end: step.End) -> None:
        """Nothing is left to do."""


def loaded(rows: Array, head_dim: int) -> Array:
    """Return the float32 values [..., head_dim] of cached rows."""
    # Exponent -128 becomes the bits of -infinity. The mantissas of its block are 0, and 0 times infinity is NaN.
    exponents = rows[..., head_dim:].astype(np.int32)
    with np.errstate(invalid="ignore"):
        return rows[..., :head_dim] * (exponents + 127 << 23).view(np.float32).repeat(BLOCK, -1)
