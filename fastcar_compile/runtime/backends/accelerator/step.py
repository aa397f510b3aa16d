"""A session whose decode steps run on an accelerator, a launch per token; the host embeds and samples."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastcar_compile.artifact.offload import CONSTANTS, NETWORK
from fastcar_compile.artifact.reader import StoredArtifact
from fastcar_compile.artifact.sections import AcceleratorSection, State
from fastcar_compile.artifact.sections.accelerator import StepPart
from fastcar_compile.codegen.hls.control_table.reader import read_table
from fastcar_compile.codegen.hls.control_table.simulator import RESULT_WORDS, LayerTrace, read_result
from fastcar_compile.codegen.hls.control_table.table import Status as TableStatus
from fastcar_compile.codegen.hls.step_program.cache_layout import BLOCK, CacheLayout
from fastcar_compile.codegen.hls.step_program.instructions import CHAIN_WORDS, Decide
from fastcar_compile.codegen.hls.step_program.program import Status as ProgramStatus
from fastcar_compile.codegen.hls.step_program.program import StepOp, StepProgram, StepStatus, read_program
from fastcar_compile.codegen.hls.step_program.simulator import NO_STEP
from fastcar_compile.errors import ArtifactError, BackendError, InternalError
from fastcar_compile.gates.base import GateInputs
from fastcar_compile.ir.types import StateRole
from fastcar_compile.runtime.backends.accelerator.calls import Bytes, ComputeUnit, stepping
from fastcar_compile.runtime.backends.accelerator.controller import Controller, GateController, LiveTable
from fastcar_compile.runtime.backends.accelerator.engine import Engine
from fastcar_compile.runtime.backends.base import BackendOptions, Stepper, StepResult
from fastcar_compile.runtime.backends.cpu import CpuStepper, Embedding, library_of

# The step kernel on a unit: it keeps a step program and a control table, and runs a token per launch.
#
# hls_templates/host/fastcar_step_accelerator.hpp is the same in C++.


Array = NDArray[Any]

WORD_BYTES = 16
_HINT = "build the device binary from this artifact, or compile the model again"


@dataclass(frozen=True)
class Token:
    """The place of a step: a position, and the number of the decode forward, or NO_STEP for a position of a prompt."""

    position: int
    step: int = NO_STEP


class StepKernel:
    """One step program on a unit. Its buffers are bound once.

    Args:
        unit: unit that runs the kernel. program: step program, which is loaded here. tensors: weights of every port,
            and the constants.

    Raises:
        ArtifactError: the tensors do not fit the kernel. BackendError: the kernel refuses the program.
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
            BackendError: the controller stopped in one of these layers.
        """
        # The first memory word of the report is the status; an answer per layer follows.
        words = self._report[WORD_BYTES // 4 :].reshape(-1, RESULT_WORDS)
        return [self._answer(layer, words[layer]) for layer in layers]

    def sections(self) -> tuple[Array, Array]:
        """Return keys and values as they are in memory: int8 [ports, words, 16]."""
        sizes, names = self._sizes, self._unit.kernel.caches()
        words, together = sizes.key_words + sizes.value_words, sizes.ports // len(names)
        parts = [self._unit.read(name, words * together * WORD_BYTES).view(np.int8) for name in names]
        # An AXI port carries several logical ports word by word: the swap separates the ports.
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
            ArtifactError: the tensor is missing, or not as long as the kernel's argument.
        """
        wanted = self._unit.argument(name).bytes
        found = tensors.get(name)
        if found is None or found.nbytes != wanted:
            what = f"`{name}` has {0 if found is None else found.nbytes} bytes; the step kernel reads {wanted}"
            raise ArtifactError(what, where=self._unit.kernel.name, hint="use the files of one artifact together")
        return found.view(np.uint8).reshape(-1)


class StepStepper(Stepper):
    """Decode and prefill on the step kernel. A position of a prompt is a launch, too.

    Args:
        unit: the artifact's kernel on a device.

    Raises:
        UserError: the program, the table or the weights are not valid, or belong to another decoder.
        BackendError: the kernel refuses one of them.
    """

    def __init__(self, artifact: StoredArtifact, options: BackendOptions, unit: ComputeUnit) -> None:
        section, decoder = artifact.manifest.accelerator, artifact.manifest.decoder
        if section is None or section.step is None:
            raise InternalError("the artifact's accelerator runs no whole steps")
        self._config, self._states = decoder.config, StatePlaces(section.step, decoder.state)
        self._embed = Embedding(library_of(artifact), decoder.config, artifact.arrays(), options.threads)
        program = read_program(artifact.files.data(section.step.program))
        self._check(program, section.step.program)
        table = artifact.files.data(section.table)
        self._kernel = StepKernel(unit, program, artifact.tensors(section.weights))
        self._kernel.load_table(table)
        self._live, self._program = LiveTable(table), program
        self._gated = [i.layer for i in program.instructions if isinstance(i, Decide)]

    def reset(self) -> None:
        """Set every state to zero."""
        self._kernel.clear()

    def prefill(self, inputs: Array, position: int) -> Array:
        """Run the positions of a prompt, one per launch; see Stepper.prefill."""
        count = inputs.shape[1]
        logits = [self._run(inputs[:, i : i + 1], Token(position + i)) for i in range(count)]
        return np.stack(logits, 1)

    def decode(self, inputs: Array, position: int, step: int, thresholds: Array) -> StepResult:
        """Run one decode forward; see Stepper.decode. Changed thresholds are loaded first, in a launch."""
        changed = self._live.follow(thresholds)
        if changed is not None:
            self._kernel.load_table(changed)
        logits = self._run(inputs, Token(position, step))[:, None]
        decisions = np.zeros((len(thresholds), len(logits)), np.bool_)
        scores = np.zeros((len(thresholds), len(logits)), np.float32)
        for layer, trace in zip(self._gated, self._kernel.answers(self._gated), strict=True):
            decisions[layer] = [not trace.index_register >> row & 1 for row in range(len(logits))]
            scores[layer] = self._live.sign * np.array(trace.scores, np.float32)
        return StepResult(logits, decisions, scores)

    def states(self) -> dict[str, Array]:
        """Return every state by name, as the decoder's graph has it."""
        return self._states.read(self._kernel, self._program.sizes.ports)

    def _run(self, inputs: Array, token: Token) -> Array:
        """Return the logits of one position, float32 [B, V]."""
        rows = self._embed(inputs, token.position)[:, 0]
        return self._kernel.run(rows, token)[:, : self._config.vocab_size]

    def _check(self, program: StepProgram, file: str) -> None:
        """Raise ArtifactError where a program belongs to another decoder."""
        config, sizes = self._config, program.sizes
        # A row of the hidden size is whole memory words: the builder refuses other sizes.
        words = config.batch_size * config.hidden_size * 4 // WORD_BYTES
        logits = config.batch_size * -(-(config.vocab_size or 0) * 4 // WORD_BYTES)
        if (sizes.rows, sizes.input_words, sizes.output_words) != (config.batch_size, words, logits):
            what = "the step program is of another decoder than the manifest"
            raise ArtifactError(what, where=file, hint="use the files of one artifact together")


class StatePlaces:
    """The places of a decoder's states in the memory of a step kernel.

    Args:
        part: manifest entry with the place of each state. states: states of the decoder.
    """

    def __init__(self, part: StepPart, states: tuple[State, ...]) -> None:
        self._first, self._states = part.states, states

    def read(self, kernel: StepKernel, ports: int) -> dict[str, Array]:
        """Return every state by name: keys and values int8 [B, Hkv, S, D + ceil(D / 32)], other states as kept."""
        keys, values = kernel.sections()
        cached = {StateRole.KEY_CACHE: keys, StateRole.VALUE_CACHE: values}
        replay = kernel.replay()
        return {s.name: self._state(s, cached, replay, ports) for s in self._states}

    def _state(self, state: State, cached: Mapping[StateRole, Array], replay: Array, ports: int) -> Array:
        first = self._first[state.name]
        if state.role in cached:
            return self._rows(state, cached[state.role], first, ports)
        data = replay[first * WORD_BYTES :]
        if state.role is StateRole.CHAIN_COUNT:
            slots, rows = state.shape
            counts = data[: slots * CHAIN_WORDS * WORD_BYTES].view(np.int32).reshape(slots, -1)
            return counts[:, :rows].copy()
        return data[: state.nbytes].view(state.format.numpy).reshape(state.shape).copy()

    @staticmethod
    def _rows(state: State, sections: Array, first: int, ports: int) -> Array:
        """Return the rows of keys or values of all heads."""
        batch, heads, positions, row = state.shape
        # A row has an exponent byte per block of 32 elements: D + D / 32 bytes.
        layout = CacheLayout(ports, row * BLOCK // (BLOCK + 1), positions)
        keys = state.role is StateRole.KEY_CACHE
        words, unpack = (layout.key_words, layout.unpack_keys) if keys else (layout.value_words, layout.unpack_values)
        places = range(first, first + batch * heads * words, words)
        found = [unpack(sections[:, place : place + words], number) for number, place in enumerate(places)]
        return np.stack(found).reshape(state.shape)


# A session whose gates, MLPs and linears run on an accelerator; the host program is TVM's.


def accelerator_of(artifact: StoredArtifact) -> AcceleratorSection:
    """Return the accelerator's section.

    Raises:
        BackendError: the artifact has no accelerator.
    """
    if artifact.manifest.accelerator is None:
        hint = "compile for a target with an accelerator and quant='w8a8' or 'w4a8'"
        raise BackendError("this artifact has no accelerator kernels", hint=hint)
    return artifact.manifest.accelerator


def stepper_on(artifact: StoredArtifact, options: BackendOptions, unit: ComputeUnit) -> Stepper:
    """Return a stepper on the artifact's kernel: a stepper of whole steps where the accelerator runs whole steps.

    Raises:
        UserError: a file of the accelerator is not valid. BackendError: the kernel refuses a file.
    """
    section = accelerator_of(artifact)
    return (AcceleratorStepper if section.step is None else StepStepper)(artifact, options, unit)


class AcceleratorStepper(CpuStepper):
    """CpuStepper whose gates, MLPs and offloaded linears run on an accelerator. Prefill stays on the host.

    The score unit gets what the gate reads and decides. The host gives the array the Index Register that the DRS
    controller decided, or its own mask in a layer whose gate it decides itself.

    Args:
        unit: the artifact's kernel on a device.

    Raises:
        UserError: the table or a weight stream is not valid.
    """

    def __init__(self, artifact: StoredArtifact, options: BackendOptions, unit: ComputeUnit) -> None:
        section, config = accelerator_of(artifact), artifact.manifest.decoder.config
        self._engine = Engine(unit, config.hidden_size, config.batch_size)
        streams = artifact.tensors(section.weights)
        weights = {name: stream for name, stream in streams.items() if not name.startswith(NETWORK)}
        self._weights = {name: self._engine.load(name, stream) for name, stream in weights.items()}
        # The controller's calls need buffers on the weight ports, though they read none of them.
        self._engine.bind(self._weights["layer_0"])
        table = artifact.files.data(section.table)
        controller, words = Controller(unit), read_table(table).key_words
        for name in streams.keys() - weights.keys():
            controller.load_network(int(name.removeprefix(NETWORK)), np.asarray(streams[name]), words)
        self._gate, self._linears = GateController(controller, table), section.design.linears
        library, decoder = library_of(artifact), artifact.manifest.decoder
        super().__init__(library, decoder, artifact.arrays(), options.threads, decode="offload")

    def reset(self) -> None:
        """Set every state but the context's to zero."""
        super().reset()
        self._gate.reset()

    def decode(self, inputs: Array, position: int, step: int, thresholds: Array) -> StepResult:
        """Run one decode forward; see Stepper.decode."""
        self._gate.start(step, thresholds)
        with stepping(self):
            return super().decode(inputs, position, step, thresholds)

    def gate(self, layer: int, inputs: GateInputs[Array], chain: Array) -> tuple[Array, Array, Array]:
        """Return replay, score and chain of one layer."""
        decision = self._gate.decide(layer, inputs, chain)
        return decision.replay, decision.score, decision.chain

    def mlp(self, layer: int, x: Array, replay: Array, cached: Array) -> Array:
        """Return the rows of one layer's MLP; replayed rows are rows of `cached`."""
        wanted = sum(1 << row for row, replayed in enumerate(replay.tolist()) if not replayed)
        self._gate.require(layer, wanted)
        if not wanted:  # nothing to launch
            return cached
        return self._engine.mlp(x, wanted, cached, self._weights[f"layer_{layer}"])

    def linear(self, name: str, x: Array) -> Array:
        """Return every row of one linear call."""
        return self._engine.linear(x, self._linears[name], self._weights[name])
