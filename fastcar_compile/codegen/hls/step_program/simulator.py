"""A step program executed in numpy, on memory as the engine sees it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import singledispatchmethod

import numpy as np

from fastcar_compile.codegen.hls.control_table.gate import pack_inputs
from fastcar_compile.codegen.hls.control_table.simulator import LayerCall, run_layer
from fastcar_compile.codegen.hls.control_table.table import Status as TableStatus
from fastcar_compile.codegen.hls.step_program import instructions as step
from fastcar_compile.codegen.hls.step_program.cache_layout import BLOCK, Array, CacheLayout
from fastcar_compile.codegen.hls.step_program.instructions import LANES, Place
from fastcar_compile.codegen.hls.step_program.program import StepProgram
from fastcar_compile.errors import InternalError
from fastcar_compile.gates.base import GateInputs
from fastcar_compile.gates.registry import GateKind
from fastcar_compile.ir import exact

Product = Callable[[Array], Array]
"""A linear or an MLP: float32 [rows, inputs] -> [rows, channels]."""


NO_STEP = 0xFFFFFFFF
"""Number of a forward that is no decode forward."""


@dataclass
class Memory:
    """What a step reads and changes.

    Args:
        constants: float32 [constant_words * 4]. products: by the word at which their weights begin.
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

    def visible(self, position: int, window: int) -> Array:
        """Return which rows the token at `position` sees, of those that are filled."""
        # Rows are filled from row 0 on, so until the cache is full the first position + 1 rows are the filled ones.
        rows = min(position + 1, self.sinks + self.ring)
        return exact.visible_rows(self.sinks + self.ring, position, (self.sinks, window, position))[:rows]


class StepSimulator:
    """An engine with rows on chip. It runs one step per call, as the hardware does."""

    def __init__(self, program: StepProgram, memory: Memory) -> None:
        self.program, self.memory = program, memory
        sizes = program.sizes
        self._rows = np.zeros((step.ROWS_ON_CHIP, sizes.rows, sizes.row_words * LANES), np.float32)
        self._input = np.zeros((0, 0), np.float32)
        self._output = np.zeros((0, 0), np.float32)
        self._position, self._step = 0, NO_STEP
        self._computing = np.ones(sizes.rows, bool)
        self.decided: dict[int, Array] = {}
        """Which rows computed the MLP, bool [rows] per layer with a gate, in the last decode forward."""

    def run(self, rows: Array, position: int, decode_step: int = NO_STEP) -> Array:
        """Return the output of one step, float32 [rows, channels]: `rows` float32 [rows, hidden] at `position`.

        Args:
            decode_step: number of the decode forward. NO_STEP: of a prompt, which neither replays nor fills a cache.
        """
        self._input, self._position, self._step = rows, position, decode_step
        for instruction in self.program.instructions:
            self._execute(instruction)
        return self._output

    @singledispatchmethod
    def _execute(self, instruction: step.Instruction) -> None:
        raise InternalError(f"the simulator does not know {instruction!r}")

    @_execute.register
    def _(self, load: step.Load) -> None:
        self._rows[load.target, :, : LANES * load.count] = self._input

    @_execute.register
    def _(self, norm: step.Norm) -> None:
        size, at = LANES * norm.count, LANES * norm.first
        weight = self.memory.constants[LANES * norm.weight :][:size]
        place = slice(at, at + norm.pieces * size)
        pieces = self._rows[norm.source, :, place].reshape(-1, norm.pieces, size)
        normed = exact.rms_norm(pieces, weight, norm.epsilon)
        self._rows[norm.target, :, place] = normed.reshape(len(pieces), -1)

    @_execute.register
    def _(self, linear: step.Linear) -> None:
        y = self.memory.products[linear.weights](self._rows[linear.source, :, : linear.inputs])
        if linear.target == Place.OUTPUT:
            self._output = y
        else:
            self._rows[linear.target, :, : linear.channels] = y

    @_execute.register
    def _(self, mlp: step.Mlp) -> None:
        y = self.memory.products[mlp.weights](self._rows[mlp.source])
        # Rows that replay keep their old content here. Replay does not read it.
        self._rows[mlp.target, self._computing, : y.shape[1]] = y[self._computing]

    @_execute.register
    def _(self, rotate: step.Rotate) -> None:
        width = 2 * LANES * rotate.half_words
        table = self.memory.constants[LANES * rotate.table :][: rotate.table_rows * width].reshape(-1, width)
        at, size = LANES * rotate.first, LANES * rotate.head_words
        place = slice(at, at + rotate.heads * size)
        heads = self._rows[rotate.source, :, place].reshape(-1, rotate.heads, 1, size)
        turned = exact.rotary(heads, table, self._position)
        self._rows[rotate.target, :, place] = turned.reshape(len(heads), -1)

    @_execute.register
    def _(self, append: step.Append) -> None:
        layout = self.program.sizes.layout(append.blocks)
        if isinstance(append, step.AppendKeys):
            cache, words = self.memory.keys, layout.key_words
            unpack, pack = layout.unpack_keys, layout.pack_keys
        else:
            cache, words = self.memory.values, layout.value_words
            unpack, pack = layout.unpack_values, layout.pack_values
        at, dim = LANES * append.first, BLOCK * append.blocks
        heads = self._rows[append.source, :, at : at + append.heads * dim].reshape(-1, dim)
        row = _Ring(append.sinks, append.ring).row(self._position)
        # Repacking all rows of a head for one position is slow. It checks the layout, and a test has few positions.
        for number, head in enumerate(exact.stored_rows(heads)):
            place = slice(append.cache + number * words, append.cache + (number + 1) * words)
            rows = unpack(cache[:, place], number)
            rows[row] = head
            cache[:, place] = pack(rows, number)

    @_execute.register
    def _(self, attend: step.Attend) -> None:
        layout = self.program.sizes.layout(attend.blocks)
        visible = _Ring(attend.sinks, attend.ring).visible(self._position, attend.window)
        dim, group = layout.head_dim, attend.heads // attend.key_heads
        heads = self._rows[attend.source, :, : attend.heads * dim].reshape(-1, group, dim)
        found = [self._head(attend, layout, number, queries, visible) for number, queries in enumerate(heads)]
        self._rows[attend.target, :, : attend.heads * dim] = np.stack(found).reshape(-1, attend.heads * dim)

    def _head(self, attend: step.Attend, layout: CacheLayout, number: int, queries: Array, visible: Array) -> Array:
        """Return what the query heads [group, dim] of one key head attend to; `number` counts rows and key heads."""
        own = attend.keys + number * layout.key_words, attend.values + number * layout.value_words
        keys = layout.unpack_keys(self.memory.keys[:, own[0] : own[0] + layout.key_words], number)[: len(visible)]
        values = layout.unpack_values(self.memory.values[:, own[1] : own[1] + layout.value_words], number)
        seen, factor = values[: len(visible)], np.float32(attend.factor)
        return np.stack([exact.attention(query, keys, seen, visible, factor) for query in queries])

    @_execute.register
    def _(self, add: step.Add) -> None:
        self._rows[add.target, :, : LANES * add.count] += self._rows[add.source, :, : LANES * add.count]

    @_execute.register
    def _(self, decide: step.Decide) -> None:
        # Without a decision every row computes: a prompt never replays.
        self._computing[:] = True
        if self._step == NO_STEP:
            return
        rows = self.program.sizes.rows
        x, kept = self._inputs(decide)
        query, key = self._heads(decide)
        words = pack_inputs(GateInputs(query, key, x, kept))
        slot = decide.chain + self._step % decide.stride * step.CHAIN_WORDS
        # A slice of whole words reshapes to a view, so the assignment below changes the memory itself.
        chain = self.memory.replay[slot : slot + step.CHAIN_WORDS].reshape(-1)
        call = LayerCall(decide.layer, self._step, *words, chain.view(np.int32), network=self._network(decide))
        trace = run_layer(self.memory.table, call)
        if trace.status is not TableStatus.OK:
            raise InternalError(f"the control table of a step program: {trace.status.name}")
        chain[:rows] = trace.chain
        self._computing[:] = [bool(trace.index_register >> b & 1) for b in range(rows)]
        self.decided[decide.layer] = self._computing.copy()
        # A row that replays keeps the x of its last computed forward: the change is measured from there.
        if x is not None and kept is not None:
            kept[self._computing] = x[self._computing]

    def _heads(self, decide: step.Decide) -> tuple[Array | None, Array | None]:
        """Return q and the cached key of position - stride, float32 [rows, heads, dim]; None: neither is read."""
        if not decide.gate.reads_query:
            return None, None
        rows, layout = self.program.sizes.rows, self.program.sizes.layout(decide.blocks)
        # The first frame has no earlier key. Row 0 then gives a score that the controller ignores: every row computes.
        row = _Ring(decide.sinks, decide.ring).row(max(self._position - decide.stride, 0))
        places = [decide.keys + n * layout.key_words for n in range(rows * decide.key_heads)]
        sections = (self.memory.keys[:, at : at + layout.key_words] for at in places)
        cached = [layout.unpack_keys(section, n)[row] for n, section in enumerate(sections)]
        key = loaded(np.stack(cached), layout.head_dim).reshape(rows, decide.key_heads, -1)
        query = self._rows[decide.source, :, : decide.heads * layout.head_dim]
        return query.reshape(rows, decide.heads, -1), key

    def _inputs(self, decide: step.Decide) -> tuple[Array | None, Array | None]:
        """Return x and a view of what the slot keeps of it, float32 [rows, size]; None: neither is read."""
        if not decide.gate.reads_input:
            return None, None
        x = self._rows[decide.input, :, : LANES * decide.count]
        return x, self._slot(decide.inputs, decide.stride, decide.count)

    def _slot(self, first: int, slots: int, count: int) -> Array:
        """Return a view of the rows of `count` words that are kept in the forward's slot, float32 [rows, size]."""
        rows = self.program.sizes.rows
        at = first + self._step % slots * rows * count
        return self.memory.replay[at : at + rows * count].view(np.float32).reshape(rows, -1)

    def _network(self, decide: step.Decide) -> Array | None:
        """Return the words of the layer's network; None: the gate has none."""
        if decide.gate is not GateKind.LEARNED:
            return None
        at = LANES * decide.network
        return self.memory.constants[at : at + LANES * decide.network_words].reshape(-1, LANES)

    @_execute.register
    def _(self, replay: step.Replay) -> None:
        own, target = self._rows[replay.source, :, : LANES * replay.count], self._rows[replay.target]
        added = own
        if self._step != NO_STEP:
            kept = self._slot(replay.cache, replay.slots, replay.count)
            # Rows that compute refresh the slot first, so every row then adds what the slot holds.
            kept[self._computing] = own[self._computing]
            added = kept
        target[:, : LANES * replay.count] += added
        # The next layer may have no gate, and then all of its rows compute.
        self._computing[:] = True

    @_execute.register
    def _(self, end: step.End) -> None:
        """Nothing is left to do."""


def loaded(rows: Array, head_dim: int) -> Array:
    """Return the float32 values [..., head_dim] of cached rows."""
    # Exponent -128 becomes the bits of -infinity. The mantissas of its block are 0, and 0 times infinity is NaN.
    exponents = rows[..., head_dim:].astype(np.int32)
    with np.errstate(invalid="ignore"):
        return rows[..., :head_dim] * (exponents + 127 << 23).view(np.float32).repeat(BLOCK, -1)
