"""The step kernel on a unit: it keeps a step program and a control table, and runs a token per launch.

hls_templates/host/fastcar_step_accelerator.hpp is the same in C++.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastcar_compile.artifact.offload import CONSTANTS
from fastcar_compile.drs.result import RESULT_WORDS, read_result
from fastcar_compile.drs.simulator import LayerTrace
from fastcar_compile.drs.table import Status as TableStatus
from fastcar_compile.errors import ArtifactError, BackendError
from fastcar_compile.runtime.backends.accelerator.unit import Bytes, ComputeUnit
from fastcar_compile.step.program import Status as ProgramStatus
from fastcar_compile.step.program import StepOp, StepProgram, StepStatus
from fastcar_compile.step.simulator import NO_STEP

Array = NDArray[Any]

WORD_BYTES = 16
_HINT = "build the device binary from this artifact, or compile the model again"


@dataclass(frozen=True)
class Token:
    """What a step is of: a position, and the number of the decode forward, or NO_STEP for a position of a prompt."""

    position: int
    step: int = NO_STEP


class StepKernel:
    """One step program on a unit. Its buffers are bound once.

    Args:
        unit: that runs the kernel. program: it is loaded here. tensors: weights of every port, and the constants.

    Raises:
        ArtifactError: the tensors are not those of the kernel. BackendError: the kernel refuses the program.
    """

    def __init__(self, unit: ComputeUnit, program: StepProgram, tensors: Mapping[str, Array]) -> None:
        self._unit, self._sizes = unit, program.sizes
        self._report: NDArray[np.uint32] = np.zeros(0, np.uint32)
        for name in (*unit.kernel.weights(), CONSTANTS):
            unit.bind(name, unit.make_buffer(name, self._bytes(tensors, name)))
        unit.fill("input")
        unit.set(dict.fromkeys(("op", "bytes", "position", "step"), 0))
        self.clear()
        status = ProgramStatus(self._load(StepOp.LOAD_PROGRAM, program.to_bytes()))
        if status is not ProgramStatus.OK:
            what = f"the step kernel refuses the step program with status {status.name}"
            raise BackendError(what, where=unit.kernel.name, hint=_HINT)

    def load_table(self, table: bytes) -> None:
        """Load a control table.

        Raises:
            BackendError: the kernel refuses it.
        """
        status = TableStatus(self._load(StepOp.LOAD_TABLE, table))
        if status is not TableStatus.OK:
            what = f"the step kernel refuses the control table with status {status.name}"
            raise BackendError(what, where=self._unit.kernel.name, hint=_HINT)

    def clear(self) -> None:
        """Set keys, values and everything of replay to zero."""
        self._unit.clear(*self._unit.kernel.caches(), "replay")

    def run(self, rows: Array, token: Token) -> Array:
        """Return the output of one step, float32 [B, N], N a multiple of 4; rows float32 [B, H].

        Raises:
            BackendError: the kernel stopped.
        """
        unit = self._unit
        unit.write("input", np.ascontiguousarray(rows).view(np.uint8).reshape(-1))
        unit.set({"op": StepOp.RUN, "position": token.position, "step": token.step})
        unit.run()
        self._report = unit.read("report", unit.argument("report").bytes).view(np.uint32)
        status, number = self._report[:2].tolist()
        if status != StepStatus.DONE:
            text = StepStatus(status).name if status in tuple(StepStatus) else str(status)
            what = f"the step kernel stopped with status {text} at instruction {number}"
            raise BackendError(what, where=unit.kernel.name, hint=_HINT)
        output = unit.read("output", self._sizes.output_words * WORD_BYTES)
        return output.view(np.float32).reshape(self._sizes.rows, -1)

    def answers(self, layers: list[int]) -> list[LayerTrace]:
        """Return what the controller decided in the last run, for each of these layers.

        Raises:
            BackendError: it stopped in one of them.
        """
        # The first memory word of the report is the status; an answer per layer follows.
        words = self._report[WORD_BYTES // 4 :].reshape(-1, RESULT_WORDS)
        return [self._answer(layer, words[layer]) for layer in layers]

    def sections(self) -> tuple[Array, Array]:
        """Return keys and values as they are in memory: int8 [ports, words, 16]."""
        sizes, names = self._sizes, self._unit.kernel.caches()
        words, together = sizes.key_words + sizes.value_words, sizes.ports // len(names)
        parts = [self._unit.read(name, words * together * WORD_BYTES).view(np.int8) for name in names]
        # An AXI port carries several logical ports word by word: the swap takes them apart.
        ports = np.stack(parts).reshape(len(names), words, together, WORD_BYTES).swapaxes(1, 2)
        whole = ports.reshape(sizes.ports, words, WORD_BYTES)
        return whole[:, : sizes.key_words], whole[:, sizes.key_words :]

    def replay(self) -> Bytes:
        """Return the replay buffer."""
        return self._unit.read("replay", self._sizes.replay_words * WORD_BYTES)

    def _answer(self, layer: int, words: Array) -> LayerTrace:
        trace = read_result(words, self._sizes.rows)
        if trace.status is not TableStatus.OK:
            where = f"{self._unit.kernel.name}, layer {layer}"
            what = f"the DRS controller stopped with status {trace.status.name}"
            raise BackendError(what, where=where, hint=_HINT)
        return trace

    def _load(self, operation: StepOp, data: bytes) -> int:
        """Return the status of loading a program or a table."""
        self._unit.write("program", np.frombuffer(data + bytes(-len(data) % WORD_BYTES), np.uint8))
        self._unit.set({"op": operation, "bytes": len(data)})
        self._unit.run()
        return int(self._unit.read("report", WORD_BYTES).view(np.uint32)[0])

    def _bytes(self, tensors: Mapping[str, Array], name: str) -> Bytes:
        """Return the bytes of an argument.

        Raises:
            ArtifactError: it is missing, or not as long as the kernel's argument.
        """
        wanted = self._unit.argument(name).bytes
        found = tensors.get(name)
        if found is None or found.nbytes != wanted:
            what = f"`{name}` has {0 if found is None else found.nbytes} bytes; the step kernel reads {wanted}"
            raise ArtifactError(what, where=self._unit.kernel.name, hint="use the files of one artifact together")
        return found.view(np.uint8).reshape(-1)
