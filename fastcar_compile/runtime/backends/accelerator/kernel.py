"""The kernel on a unit: it keeps a control table with its program. A launch runs the instructions up to an END.

hls_templates/host/fastcar_accelerator.hpp is the same in C++.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastcar_compile.artifact.engine import WORD_BYTES, float_words
from fastcar_compile.artifact.sections import State
from fastcar_compile.codegen.hls.control_table.reader import read_table
from fastcar_compile.codegen.hls.control_table.simulator import RESULT_WORDS, LayerCall, LayerTrace, read_result
from fastcar_compile.codegen.hls.control_table.table import TableStatus, pack_rows, with_thresholds
from fastcar_compile.codegen.hls.step_program.cache_layout import ALL_ROWS, BLOCK, LANES, CacheLayout, Rows
from fastcar_compile.codegen.hls.step_program.instructions import Linear, Mlp
from fastcar_compile.codegen.hls.step_program.program import StepOp, StepStatus, read_program
from fastcar_compile.codegen.hls.step_program.replaying import DecideRows
from fastcar_compile.errors import ArtifactError, BackendError, InputError, InternalError
from fastcar_compile.gates.base import Array
from fastcar_compile.ir.types import ATTENTION_ROLES, StateRole
from fastcar_compile.runtime.backends.accelerator.calls import Bytes, ComputeUnit
from fastcar_compile.runtime.backends.base import Index

_HINT = "build the device binary from this artifact, or compile the model again"


class Kernel:
    """A control table and its program on a unit. Buffers are bound once.

    Args:
        unit: that runs the kernel. table: it is loaded here. tensors: weights of every port, and the constants.

    Raises:
        UserError: the table is not valid. ArtifactError: the tensors are not those of the kernel.
        BackendError: the kernel refuses the table.
    """

    def __init__(self, unit: ComputeUnit, table: bytes, tensors: Mapping[str, Array]) -> None:
        self.unit, self.program = unit, read_program(table)
        self._report: NDArray[np.uint32] = np.zeros(0, np.uint32)
        arguments = unit.kernel.arguments
        self._kept = [a.name for a in arguments if a.name in (*unit.kernel.caches(), "replay")]
        for name in (a.name for a in arguments if a.name in (*unit.kernel.weights(), "constants")):
            unit.bind(name, unit.make_buffer(name, self._bytes(tensors, name)))
        unit.fill("inputs")
        unit.set({a.name: 0 for a in arguments if a.kind == "scalar"})
        self._mlps = list(self.program.every(Mlp))
        self._linears = list(self.program.every(Linear).items())
        self._decisions = {one.layer: (entry, one) for entry, one in self.program.every(DecideRows).items()}
        self.clear()
        self.load(table)

    def load(self, table: bytes) -> None:
        """Load a control table with the same program.

        Raises:
            BackendError: the kernel refuses it.
        """
        self.unit.write("step_program", np.frombuffer(table + bytes(-len(table) % WORD_BYTES), np.uint8))
        self.unit.set({"op": StepOp.LOAD, "bytes": len(table)})
        self.unit.run()
        status = TableStatus(int(self.unit.read("step_report", WORD_BYTES).view(np.uint32)[0]))
        if status is not TableStatus.OK:
            raise self._error(f"refuses the control table with status {status.name}")

    def clear(self) -> None:
        """Set keys, values and everything of replay to zero."""
        self.unit.clear(*self._kept)

    def launch(self, rows: Rows, *data: Array, entry: int = 0) -> None:
        """Run a launch on an input of these rows and words.

        Args:
            entry: number of the first instruction.

        Raises:
            BackendError: the kernel stopped.
        """
        unit = self.unit
        words = [np.ascontiguousarray(part).view(np.uint8).reshape(-1) for part in (rows.words(), *data)]
        unit.write("inputs", np.concatenate(words))
        unit.set({"op": StepOp.RUN, "entry": entry})
        unit.run()
        self._report = unit.read("step_report", unit.argument("step_report").bytes).view(np.uint32)
        status, number = self._report[:2].tolist()
        if status != StepStatus.DONE:
            text = StepStatus(status).name if status in tuple(StepStatus) else str(status)
            where = "row" if status == StepStatus.BAD_ROW else "instruction"
            raise self._error(f"stopped with status {text} at {where} {number}")

    def step(self, x: Array, rows: Rows) -> Array:
        """Return the output of a whole step, float32 [B, N], N a multiple of 4, of x float32 [B, H].

        Rows that are not active have any output.

        Raises:
            BackendError: the kernel stopped.
        """
        self.launch(rows, x)
        sizes = self.program.sizes
        return self.unit.read("outputs", sizes.output_words * WORD_BYTES).view(np.float32).reshape(sizes.rows, -1)

    def answers(self, layers: list[int]) -> list[LayerTrace]:
        """Return what the controller decided in the last step, for each of these layers.

        Raises:
            BackendError: it stopped in one of them.
        """
        # The first memory word of the report is the status; an answer per layer follows.
        words = self._report[WORD_BYTES // 4 :].reshape(-1, RESULT_WORDS)
        return [self._answer(layer, words[layer]) for layer in layers]

    def decide(self, call: LayerCall) -> LayerTrace:
        """Return the decision of a layer by its short program, with the table that was loaded.

        Raises:
            BackendError: the controller stopped.
        """
        entry, instruction = self._decisions[call.layer]
        sizes = (instruction.query_words, instruction.key_words)
        if (len(call.query), len(call.key)) != sizes:
            given = f"operands of {len(call.query)} and {len(call.key)} words"
            raise InternalError(f"layer {call.layer}: {given}; the step program reads {sizes[0]} and {sizes[1]}")
        count = self.program.sizes.rows
        rows = replace(Rows.at(self.program.sizes), step=np.full(count, call.step), before=call.chain[:count])
        self.launch(rows, call.query, call.key, entry=entry)
        return self._answer(call.layer, self._report[WORD_BYTES // 4 :])

    def mlp(self, layer: int, x: Array, active: int, cached: Array) -> Array:
        """Return the rows of one MLP, float32 [B, H].

        Args:
            x, cached: float32 [B, H]. active: bit b is 1: row b computes, 0: it is that of `cached`.
        """
        computes = [bool(active >> row & 1) for row in range(len(x))]
        y = self._rows(self._mlps[layer], x, (x.shape[1], x.shape[1]), active)
        return np.where(np.array(computes)[:, None], y, cached)

    def linear(self, number: int, x: Array, active: int = ALL_ROWS) -> Array:
        """Return the rows of linear call `number`, float32 [B, N], of x float32 [B, K]; only active rows are theirs."""
        entry, instruction = self._linears[number]
        return self._rows(entry, x, (instruction.inputs, instruction.channels), active)

    def _rows(self, entry: int, x: Array, sizes: tuple[int, int], active: int) -> Array:
        """Return the rows [B, N] that a short program leaves; `sizes`: K of x, and N."""
        wanted = (self.program.sizes.rows, sizes[0])
        if x.shape != wanted or x.dtype != np.float32:
            raise InputError(f"x is {x.dtype} {list(x.shape)}; the kernel takes float32 {list(wanted)}")
        self.launch(Rows.at(self.program.sizes, active=active), pack_rows(x), entry=entry)
        # A row in memory ends with the lanes that fill its last word; they are cut off here.
        rows = self.unit.read("outputs", len(x) * float_words(sizes[1]) * WORD_BYTES).view(np.float32)
        return np.ascontiguousarray(rows.reshape(len(x), -1)[:, : sizes[1]])

    def _answer(self, layer: int, words: Array) -> LayerTrace:
        trace = read_result(words, self.program.sizes.rows)
        if trace.status is not TableStatus.OK:
            where = f"{self.unit.kernel.name}, layer {layer}"
            raise BackendError(f"the DRS controller stopped with status {trace.status.name}", where=where, hint=_HINT)
        return trace

    def _bytes(self, tensors: Mapping[str, Array], name: str) -> Bytes:
        """Return the bytes of an argument.

        Raises:
            ArtifactError: it is missing, or not as long as the kernel's argument.
        """
        wanted = self.unit.argument(name).bytes
        found = tensors.get(name)
        if found is None or found.nbytes != wanted:
            what = f"`{name}` has {0 if found is None else found.nbytes} bytes; the kernel reads {wanted}"
            raise ArtifactError(what, where=self.unit.kernel.name, hint="use the files of one artifact together")
        return found.view(np.uint8).reshape(-1)

    def _error(self, what: str) -> BackendError:
        return BackendError(f"the kernel {what}", where=self.unit.kernel.name, hint=_HINT)


class LiveTable:
    """A control table whose thresholds are those of a session. Where small scores replay it holds minus thresholds.

    Args:
        data: drs/table.bin.

    Raises:
        UserError: the table is not valid.
    """

    def __init__(self, data: bytes) -> None:
        self.table, self._data = read_table(data), data
        self.sign = np.float32(-1 if self.table.gate.at_most else 1)

    def decides(self, layer: int) -> bool:
        """Return whether the table has a gate for this layer; else the host decides, or the layer never replays."""
        return self.table.factors[layer] != 0

    def follow(self, thresholds: Array) -> bytes | None:
        """Take thresholds float32 [L]; return the table with them, None where it had them before.

        A threshold of a layer whose gate the host decides is not the controller's.
        """
        given = (self.sign * thresholds).tolist()
        # A threshold of +inf keeps the controller from replaying a layer that the host decides.
        own = [t if self.decides(layer) else float("inf") for layer, t in enumerate(given)]
        if tuple(own) == self.table.thresholds:
            return None
        self.table = self.table.with_thresholds(own)
        return with_thresholds(self._data, own)

    def replayed(self, trace: LayerTrace) -> Array:
        """Return which rows replay, bool [B]: a bit of the Index Register says that the row computes."""
        return np.array([not trace.index_register >> row & 1 for row in range(self.table.rows)])

    def scores(self, trace: LayerTrace) -> Array:
        """Return the scores of the rows, float32 [B]."""
        return self.sign * np.array(trace.scores, np.float32)


# The states of a decoder in the memory of a step kernel (docs/reference/artifact.md, "Whole steps").


class KernelStates:
    """Reads and writes parts of states, which have the shapes that the decoder's graph has.

    Of a cache the tiles that hold the positions are read and packed again, of replay the slots.

    Args:
        places: first memory word of every state, by its name.

    Raises:
        ArtifactError: a place is behind the kernel's memory.
    """

    def __init__(self, kernel: Kernel, places: Mapping[str, int], states: Sequence[State]) -> None:
        self._unit, self._sizes, self._places = kernel.unit, kernel.program.sizes, places
        self._states = {state.name: state for state in states}
        if wrong := [state.name for state in states if not self._fits(state)]:
            what = f"the states {', '.join(wrong)} lie behind the kernel's memory"
            raise ArtifactError(what, where="accelerator.step.states", hint="compile the model again")

    def _fits(self, state: State) -> bool:
        if state.role in ATTENTION_ROLES:
            keys = state.role is StateRole.KEY_CACHE
            end = self._places[state.name] + prod(state.shape[:2]) * self._tiles(state)[3]
            return end <= (self._sizes.key_words if keys else self._sizes.value_words)
        end = self._places[state.name] * WORD_BYTES + state.shape[0] * _slot_bytes(state)
        return end <= self._sizes.replay_words * WORD_BYTES

    def read(self, name: str, index: Index) -> Array:
        """Return a copy of a part of a state."""
        state, span, part = self._found(name, index)
        return self._load(state, span)[part]

    def write(self, name: str, index: Index, value: Array) -> None:
        """Write a part of a state."""
        state, span, part = self._found(name, index)
        rows = self._load(state, span)
        rows[part] = value
        self._store(state, span, rows)

    def _found(self, name: str, index: Index) -> tuple[State, range, tuple[Any, ...]]:
        """Return a state, its slots or positions that hold a part, in whole tiles, and the part's index in these."""
        state = self._states[name]
        axis, tile = (2, self._tiles(state)[1]) if state.role in ATTENTION_ROLES else (0, 1)
        own: list[Any] = list(index) if isinstance(index, tuple) else [index]
        own += [slice(None)] * (axis + 1 - len(own))
        chosen = np.arange(state.shape[axis])[own[axis]]
        # Of an empty part one tile is read, so that the part has its shape.
        first, last = (int(chosen.min()), int(chosen.max()) + 1) if chosen.size else (0, 1)
        span = range(first // tile * tile, -(-last // tile) * tile)
        own[axis] = chosen - span.start
        return state, span, tuple(own)

    def _load(self, state: State, span: range) -> Array:
        """Return slots [n, B, ...] of replay, or positions [B, Hkv, n, D + D / 32] of keys or values."""
        if state.role in ATTENTION_ROLES:
            layout = replace(self._tiles(state)[0], positions=len(span))
            unpack = layout.unpack_keys if state.role is StateRole.KEY_CACHE else layout.unpack_values
            heads = [unpack(self._sections(words), number) for number, words in self._heads(state, span)]
            return np.stack(heads).reshape(*state.shape[:2], len(span), -1)
        slot = _slot_bytes(state)
        data = self._unit.read("replay", len(span) * slot, self._at(state, span)).view(state.format.numpy)
        rows = data.reshape(len(span), *state.shape[1:], -1)
        # A count is the first lane of a memory word.
        return rows[..., 0] if state.role is StateRole.CHAIN_COUNT else rows.reshape(len(span), *state.shape[1:])

    def _store(self, state: State, span: range, rows: Array) -> None:
        """Write what `_load` returned, changed."""
        if state.role in ATTENTION_ROLES:
            layout = replace(self._tiles(state)[0], positions=len(span))
            pack = layout.pack_keys if state.role is StateRole.KEY_CACHE else layout.pack_values
            heads = rows.reshape(-1, *rows.shape[2:])
            for number, words in self._heads(state, span):
                self._store_sections(words, pack(heads[number], number))
            return
        if state.role is StateRole.CHAIN_COUNT:
            rows = np.pad(rows[..., None], [(0, 0)] * rows.ndim + [(0, 3)])
        self._unit.write("replay", np.ascontiguousarray(rows).view(np.uint8).reshape(-1), self._at(state, span))

    def _at(self, state: State, span: range) -> int:
        """Return the first byte of slots in the replay buffer."""
        return self._places[state.name] * WORD_BYTES + span.start * _slot_bytes(state)

    def _tiles(self, state: State) -> tuple[CacheLayout, int, int, int]:
        """Return a head's layout, the positions of a tile, and the memory words of a tile and of a head on one port."""
        # A row has an exponent byte per block of 32 elements.
        layout = self._sizes.layout(state.shape[3] // (BLOCK + 1))
        if state.role is StateRole.KEY_CACHE:
            return layout, layout.ports * LANES, layout.key_tile_words, layout.key_words
        return layout, BLOCK, layout.value_tile_words, layout.value_words

    def _heads(self, state: State, span: range) -> Iterator[tuple[int, range]]:
        """Yield the number of each head of each row, and the memory words of its tiles on one port."""
        _, tile, tile_words, words = self._tiles(state)
        first = self._places[state.name] + span.start // tile * tile_words
        # Values are behind the keys of all layers.
        first += 0 if state.role is StateRole.KEY_CACHE else self._sizes.key_words
        for number in range(prod(state.shape[:2])):
            at = first + number * words
            yield number, range(at, at + len(span) // tile * tile_words)

    def _sections(self, words: range) -> Array:
        """Return memory words of every weight port, int8 [ports, words, 16]."""
        names, together = self._axi
        size = together * WORD_BYTES
        parts = [self._unit.read(name, len(words) * size, words.start * size) for name in names]
        # An AXI port carries several weight ports word by word: the swap takes them apart.
        ports = np.stack(parts).view(np.int8).reshape(len(names), len(words), together, WORD_BYTES).swapaxes(1, 2)
        return ports.reshape(-1, len(words), WORD_BYTES)

    def _store_sections(self, words: range, sections: Array) -> None:
        """Write memory words of every weight port."""
        names, together = self._axi
        ports = sections.view(np.uint8).reshape(len(names), together, len(words), WORD_BYTES).swapaxes(1, 2)
        for name, part in zip(names, ports, strict=True):
            self._unit.write(name, part.reshape(-1), words.start * together * WORD_BYTES)

    @property
    def _axi(self) -> tuple[list[str], int]:
        """The arguments that hold keys and values, and how many weight ports each carries."""
        names = self._unit.kernel.caches()
        return names, self._sizes.ports // len(names)


def _slot_bytes(state: State) -> int:
    """Return the bytes of a slot of replay. A count has a memory word."""
    counts = state.role is StateRole.CHAIN_COUNT
    return prod(state.shape[1:]) * (WORD_BYTES if counts else state.format.itemsize)
