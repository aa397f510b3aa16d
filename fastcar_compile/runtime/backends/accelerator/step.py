"""A session whose decode steps run on an accelerator, a launch per token; the host embeds and samples."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from fastcar_compile.artifact.reader import StoredArtifact
from fastcar_compile.artifact.sections import State, StateRole
from fastcar_compile.artifact.sections.accelerator import StepPart
from fastcar_compile.errors import ArtifactError, InternalError
from fastcar_compile.runtime.backends.accelerator.controller import LiveTable
from fastcar_compile.runtime.backends.accelerator.step_kernel import WORD_BYTES, Array, StepKernel, Token
from fastcar_compile.runtime.backends.accelerator.unit import ComputeUnit
from fastcar_compile.runtime.backends.base import BackendOptions, Stepper, StepResult
from fastcar_compile.runtime.backends.cpu import Embedding, library_of
from fastcar_compile.step.cache_layout import BLOCK, CacheLayout
from fastcar_compile.step.instructions import CHAIN_WORDS, Decide
from fastcar_compile.step.program import StepProgram, read_program


class StepStepper(Stepper):
    """Decode and prefill on the step kernel. A position of a prompt is a launch, too.

    Args:
        unit: the artifact's kernel on a device.

    Raises:
        UserError: the program, the table or the weights are not valid, or of another decoder.
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
        """Run one decode forward; see Stepper.decode. Other thresholds than before are loaded first, in a launch."""
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
        """Raise ArtifactError where a program is of another decoder."""
        config, sizes = self._config, program.sizes
        # A row of the hidden size is whole memory words: the builder refuses other sizes.
        words = config.batch_size * config.hidden_size * 4 // WORD_BYTES
        logits = config.batch_size * -(-(config.vocab_size or 0) * 4 // WORD_BYTES)
        if (sizes.rows, sizes.input_words, sizes.output_words) != (config.batch_size, words, logits):
            what = "the step program is of another decoder than the manifest"
            raise ArtifactError(what, where=file, hint="use the files of one artifact together")


class StatePlaces:
    """Where the states of a decoder are in the memory of a step kernel.

    Args:
        part: says it by name. states: of the decoder.
    """

    def __init__(self, part: StepPart, states: tuple[State, ...]) -> None:
        self._first, self._states = part.states, states

    def read(self, kernel: StepKernel, ports: int) -> dict[str, Array]:
        """Return every state by name: keys and values int8 [B, Hkv, S, D + ceil(D / 32)], others as they are kept."""
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
