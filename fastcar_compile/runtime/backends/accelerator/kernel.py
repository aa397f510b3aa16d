"""The kernel on a unit: it keeps a control table with its program. A launch runs the instructions up to an END.

hls_templates/host/fastcar_accelerator.hpp is the same in C++.
"""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from fastcar_compile.artifact.engine import WORD_BYTES, float_words
from fastcar_compile.codegen.hls.control_table.reader import read_table
from fastcar_compile.codegen.hls.control_table.simulator import RESULT_WORDS, LayerCall, LayerTrace, read_result
from fastcar_compile.codegen.hls.control_table.table import TableStatus, pack_rows, with_thresholds
from fastcar_compile.codegen.hls.step_program.cache_layout import ALL_ROWS, Rows
from fastcar_compile.codegen.hls.step_program.instructions import Linear, Mlp
from fastcar_compile.codegen.hls.step_program.program import StepOp, StepStatus, read_program
from fastcar_compile.codegen.hls.step_program.replaying import DecideRows
from fastcar_compile.errors import ArtifactError, BackendError, InputError, InternalError
from fastcar_compile.gates.base import Array
from fastcar_compile.runtime.backends.accelerator.calls import Bytes, ComputeUnit

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
