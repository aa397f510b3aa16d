"""The TVM backend: one call of the VM per forward, state updated in place, weights shared without a copy."""

from __future__ import annotations

import platform
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from importlib import metadata
from typing import Any, Literal

import numpy as np

from fastcar_compile.artifact.layout import EMBEDDED
from fastcar_compile.artifact.reader import StoredArtifact
from fastcar_compile.artifact.sections import DecoderSection, HostSection, ProgramPart, ProgramsPart, State
from fastcar_compile.errors import BackendError
from fastcar_compile.ir.draws import DRAW_NUMBERS, table
from fastcar_compile.ir.types import CONTEXT_ROLES, PROMPT, REPLAY_ROLES, DecoderConfig
from fastcar_compile.runtime.backends.accelerator.calls import register_functions
from fastcar_compile.runtime.backends.base import (
    Array,
    BackendOptions,
    Index,
    Numbers,
    Parts,
    Stepper,
    StepResult,
    each_threshold,
    in_rows,
)
from fastcar_compile.runtime.guard import thread_count, use_threads
from fastcar_compile.runtime.state import StateArena
from fastcar_compile.runtime.tvm_runtime import Machine, adopt, aligned, as_array, element
from fastcar_compile.support.machine import cpu_flags

SINGLE_TOKENS = 16
"""A prefill chunk takes as long as decode steps for a 16th of its tokens: w8a8, chunks of 64 and 256."""


@dataclass(frozen=True)
class Library:
    """Compiled programs. content: bytes of the library's file; programs: what is in it."""

    content: bytes = field(repr=False)
    programs: ProgramsPart

    def open(self) -> Machine:
        """Load the library.

        Raises:
            BackendError: it cannot be loaded.
        """
        if self.programs.offload is not None:
            register_functions()
        return Machine(self.programs.library, self.content)


def open_stepper(artifact: StoredArtifact, options: BackendOptions) -> CpuStepper:
    """Open an artifact on this CPU; see OpenStepper."""
    return CpuStepper(library_of(artifact), artifact.manifest.decoder, artifact.arrays(), options.threads)


def library_of(artifact: StoredArtifact) -> Library:
    """Return the best library of an artifact that this CPU runs.

    Raises:
        BackendError: the artifact has no libraries, or they are for another TVM.
    """
    check_tvm(artifact.manifest.producer)
    programs = programs_for(artifact.manifest.host, f"{platform.machine()}-linux-gnu", cpu_flags())
    return Library(artifact.files.data(programs.library), programs)


def check_tvm(producer: Mapping[str, str]) -> None:
    """Raise BackendError unless TVM here has the major and minor version that compiled the artifact.

    The format of its libraries and the names of the functions that they call change between minor versions.
    """
    written, here = producer.get("tvm", "none"), metadata.version("apache-tvm")
    if written.split(".")[:2] != here.split(".")[:2]:
        what = f"the artifact's libraries need TVM {written!r:.40}, installed is {here}"
        hint = "compile the model again with this TVM, or install that one in an environment of its own"
        raise BackendError(what, where="apache-tvm", hint=hint)


def programs_for(host: HostSection, triple: str, flags: frozenset[str]) -> ProgramsPart:
    """Return the best programs that a CPU runs: one of the variants, or the programs of the board.

    Args:
        triple: of the CPU. flags: what it offers, as /proc/cpuinfo names it.

    Raises:
        BackendError: no library is for this CPU.
    """
    # The manifest lists the best variant of an architecture first.
    for variant in host.variants:
        if variant.triple == triple and flags >= set(variant.flags):
            return variant.programs
    board = host.board
    if board is not None and board.triple == triple:
        if not board.linked:
            what = f"the library for {triple} is an archive of object files, not linked"
            hint = f"compile again where {board.compiler} is on PATH; docs/tutorial/board.md"
            raise BackendError(what, where=board.programs.library, hint=hint)
        return board.programs
    known = [f"{v.instruction_set} ({v.triple})" for v in host.variants]
    known += [f"{board.cpu} ({board.triple})"] if board else []
    what = f"this artifact has no library for this CPU ({triple}), only for {', '.join(known)}"
    hint = "compile it with host_cpus naming an instruction set of this CPU, or on this machine with 'native'"
    raise BackendError(what, hint=hint)


class _Program:
    """One program of a library with its arguments in place: every call hands over the same list.

    Args:
        known: inputs and parameters by name; the program keeps the values that it takes.

    Attributes:
        names, arguments: what the program takes, in its order.
    """

    def __init__(self, machine: Machine, spec: ProgramPart, known: Mapping[str, Any]) -> None:
        self.names = (*spec.inputs, *spec.params)
        if lacking := [n for n in self.names if n not in known]:
            what, hint = f"the library needs arguments that are not given: {lacking}", "compile the model again"
            raise BackendError(what, where=machine.name, hint=hint)
        self._run = machine.function(spec.function)
        self._places = {name: i for i, name in enumerate(spec.outputs)}
        self.arguments = [known[n] for n in self.names]
        try:
            machine.function(spec.check)(*self.arguments)  # once is enough for arguments that stay
        except (TypeError, ValueError, RuntimeError) as error:
            raise BackendError(f"the library does not take these arguments: {error}", where=machine.name) from error

    def __call__(self, *names: str) -> dict[str, Array]:
        """Run the program; return the results of these names that it has.

        The results are views of the VM's memory, which the VM uses again once they are gone.
        """
        results = self._run(*self.arguments)
        # `as_array` makes no copy. Whoever keeps a result beyond the next call has to copy it.
        return {n: as_array(element(results, self._places[n])) for n in names if n in self._places}


class _Prefill:
    """The prefill program over a part of the states: those of one video, or of all."""

    def __init__(
        self, machine: Machine, spec: ProgramPart, known: Mapping[str, Any], states: Mapping[str, Array], part: slice
    ) -> None:
        parts = {name: states[name][part] for name in spec.inputs if name in states}
        # TVM's code takes memory from a cache line on. A video's states may begin within one: then a copy is used.
        own = {name: aligned(array) for name, array in parts.items()}
        self._copies = [(own[name], array) for name, array in parts.items() if own[name] is not array]
        self._program = _Program(machine, spec, {**known, **{name: adopt(array) for name, array in own.items()}})

    def __call__(self) -> Array:
        """Run the program; return its logits."""
        for copy, array in self._copies:
            copy[...] = array
        logits = self._program("logits")["logits"]
        for copy, array in self._copies:
            array[...] = copy
        return logits


class _Feeds:
    """Inputs that change from call to call, in memory that does not.

    Attributes:
        tensors: name -> the memory for TVM.
    """

    def __init__(self, blank: Mapping[str, Array]) -> None:
        self._arrays = {name: aligned(array) for name, array in blank.items()}
        self.tensors = {name: adopt(array) for name, array in self._arrays.items()}

    def set(self, values: Mapping[str, Any]) -> None:
        for name, value in values.items():
            self._arrays[name][...] = value


def _forward_feeds(config: DecoderConfig, length: int) -> _Feeds:
    """Return memory for what a forward of `length` tokens takes."""
    rows = config.decode_rows if length == 1 else config.batch_size if config.rows is None else 1
    kind = np.float32 if config.takes_embeddings else np.int64
    given: Array = np.zeros((rows, length, *config.input_shape), kind)
    count = 1 if config.rows is None or length > 1 else rows
    numbers: dict[str, Array] = {name: np.zeros(count, np.int64) for name in ("position", "step")}
    return _Feeds(
        numbers
        | {config.input_name: given, "thresholds": each_threshold(config, np.zeros(config.num_layers, np.float32))}
    )


class _Draws:
    """The program that draws tokens, of at most as many rows as a decode step has."""

    def __init__(self, machine: Machine, spec: ProgramPart, config: DecoderConfig) -> None:
        logits = np.zeros((config.decode_rows, 1, config.vocab_size or config.hidden_size), np.float32)
        given = [aligned(array) for array in (logits, np.zeros(len(DRAW_NUMBERS), np.int64), np.ones(1), table())]
        self._logits, self._numbers, self._temperature, _ = given
        self._program = _Program(machine, spec, dict(zip(spec.inputs, map(adopt, given), strict=True)))

    def __call__(
        self, logits: Array, temperature: float, position: int, code: int, seed: int, top_k: int
    ) -> Array | None:
        """Return tokens; see Stepper.draw."""
        videos, count, width = logits.shape
        rows = videos * count
        if rows > len(self._logits) or width > self._logits.shape[2]:
            return None
        self._logits[:rows, 0, :width] = logits.reshape(rows, width)
        self._numbers[:] = rows, count, position, code, seed & 0xFFFFFFFF, seed >> 32, top_k, 0, width
        self._temperature[0] = temperature
        return self._program("tokens")["tokens"][:rows].reshape(videos, count).copy()


class Embedding:
    """The host's program for an accelerator that runs whole decode steps: the rows of one token per batch row.

    Args:
        params: weights by name. threads: TVM threads; None: every core that the process may use.

    Raises:
        BackendError: the library cannot be loaded, or needs a parameter that is not given.
    """

    def __init__(
        self, library: Library, config: DecoderConfig, params: Mapping[str, Array], threads: int | None
    ) -> None:
        self._config, self._threads = config, thread_count(threads)
        use_threads(self._threads)
        self._feeds, self._program, spec = _forward_feeds(config, 1), None, library.programs.embed
        if spec is not None:
            known = {name: adopt(params[name]) for name in spec.params if name in params}
            self._program = _Program(library.open(), spec, known | self._feeds.tensors)
        elif not config.takes_embeddings:
            hint = "compile the model again"
            raise BackendError("the artifact has no program `embed`", where=library.programs.library, hint=hint)

    def __call__(self, inputs: Array, position: Numbers) -> Array:
        """Return float32 [B, 1, H] of tokens int64 [B, 1], or of embeddings float32 [B, 1, H], at `position`."""
        if self._program is None:
            return inputs
        use_threads(self._threads)
        self._feeds.set({self._config.input_name: inputs, "position": position})
        return self._program(EMBEDDED)[EMBEDDED]


class CpuStepper(Stepper):
    """Decode and prefill through the artifact's TVM library.

    Nothing is allocated per step: inputs, state and weights stay where they are, and the VM's buffers come from a pool.

    Args:
        params: weights by name.
        threads: TVM threads; None: every core that the process may use.
        decode: which of the programs is the decode step.

    Raises:
        BackendError: the library cannot be loaded, or needs a parameter that is not given; or more threads than TVM's
            pool can have.
        InputError: `threads` is not a whole number, is too large, or is not possible after a fork.
    """

    def __init__(
        self,
        library: Library,
        decoder: DecoderSection,
        params: Mapping[str, Array],
        threads: int | None,
        decode: Literal["decode", "offload"] = "decode",
    ) -> None:
        self._again = partial(CpuStepper, library, decoder, params, threads)
        self._states = decoder.state
        self._threads = thread_count(threads)
        use_threads(self._threads)
        self._config = decoder.config
        # Two arenas: `reset` clears the first, and the context's states survive it.
        self._state = StateArena([s for s in decoder.state if s.role not in CONTEXT_ROLES])
        self._context_state = StateArena([s for s in decoder.state if s.role in CONTEXT_ROLES])
        self._arrays = self._state.arrays | self._context_state.arrays
        known = {name: adopt(value) for name, value in (*params.items(), *self._arrays.items())}
        self._step, self._chunk = (_forward_feeds(self._config, n) for n in (1, self._config.prefill_chunk))
        machine, programs = library.open(), library.programs
        self._machine, self._draw = machine, programs.draw
        self._decode = _Program(machine, programs.named()[decode], known | self._step.tensors)
        self._prefill = list[_Prefill]()
        if programs.prefill is not None:
            # Where rows have positions of their own, a chunk is one video's. Else all videos stand at one position.
            parts = [slice(None)]
            if self._config.rows is not None:
                parts = [slice(video, video + 1) for video in range(self._config.batch_size)]
                self.video_chunk = self._config.prefill_chunk
            known |= self._chunk.tensors
            self._prefill = [_Prefill(machine, programs.prefill, known, self._arrays, part) for part in parts]
        self.prefill_chunk = self._config.prefill_chunk if self._prefill else 1
        # An offload program launches kernels for every single token, so a padded chunk on the host reads a prompt.
        self.together = self._config.rows or 1
        self.single_tokens = self.prefill_chunk // SINGLE_TOKENS if decode == "decode" else 0
        if programs.context is not None and (context := self._config.context) is not None:
            shape = (self._config.batch_size, context.length)
            blank: dict[str, Array] = {"context": np.zeros((*shape, context.size), np.float32)}
            self._given = _Feeds(blank | ({"context_mask": np.zeros(shape, np.bool_)} if context.masked else {}))
            self._context = _Program(machine, programs.context, known | self._given.tensors)

    def reset(self) -> None:
        """Set every state but the context's to zero."""
        self._state.clear()

    def set_context(self, context: Array, mask: Array | None) -> None:
        """Compute the states that cross-attention reads; see Stepper.set_context."""
        use_threads(self._threads)
        self._given.set({"context": context} | ({} if mask is None else {"context_mask": mask}))
        # The VM reuses the memory of its results. The states' addresses are fixed, so the values are copied there.
        for name, made in self._context(*self._context_state.arrays).items():
            self._context_state.arrays[name][...] = made

    def prefill(self, inputs: Array, position: int) -> Array:
        """Run one prefill chunk; see Stepper.prefill.

        For a few tokens, and without a prefill graph, this is decode forward number 0, after which the replay state
        of slot 0 is put back.
        """
        if inputs.shape[1] < max(self.prefill_chunk, 2):
            # Forward 0 is in the first frame, in which every row computes. It writes slot 0 of the replay state alone.
            with self._state.kept(REPLAY_ROLES, slot=0):
                never, step = np.full(self._config.num_layers, np.inf, np.float32), 0
                if self._config.rows is not None:
                    step = PROMPT
                logits = self.decode(**in_rows(self._config, inputs, position, step), thresholds=never).logits
                return logits.reshape(self._config.batch_size, self.together, -1)[:, : inputs.shape[1]]
        if len(self._prefill) == 1:
            return self.prefill_video(inputs, position, 0)
        # The logits of a video are a view of memory that the next video's call writes.
        return np.concatenate([self.prefill_video(x[None], position, v).copy() for v, x in enumerate(inputs)])

    def prefill_video(self, inputs: Array, position: int, video: int) -> Array:
        """Run one prefill chunk of one video; see Stepper.prefill_video."""
        use_threads(self._threads)
        self._chunk.set({self._config.input_name: inputs, "position": position})
        return self._prefill[video]()

    def decode(self, inputs: Array, position: Numbers, step: Numbers, thresholds: Array) -> StepResult:
        """Run one decode forward; see Stepper.decode."""
        use_threads(self._threads)
        given = {self._config.input_name: inputs, "position": position, "step": step}
        self._step.set(given | {"thresholds": each_threshold(self._config, thresholds)})
        return StepResult.of(self._decode("logits", "decisions", "scores"), len(thresholds))

    @cached_property
    def _draws(self) -> _Draws | None:
        return None if self._draw is None else _Draws(self._machine, self._draw, self._config)

    def draw(self, logits: Array, temperature: float, **numbers: int) -> Array | None:
        """Return tokens; see Stepper.draw."""
        return None if self._draws is None else self._draws(logits, temperature, **numbers)

    def states(self) -> Sequence[State]:
        """Return what every state is; see Stepper.states."""
        return self._states

    def read(self, name: str, index: Index) -> Array:
        """Return a part of a state; see Stepper.read."""
        return self._arrays[name][index]

    def write(self, changes: Iterable[tuple[str, Index, Array]]) -> None:
        """Write parts of states; see Stepper.write."""
        for name, index, value in changes:
            self._arrays[name][index] = value.view(self._arrays[name].dtype)

    def read_all(self, states: Sequence[State], index: Parts) -> Array:
        """Return a part of several states; see Stepper.read_all."""
        return self._state.together(states)[:, *index].copy()

    def write_all(self, states: Sequence[State], index: Parts, values: Array) -> None:
        """Write a part of several states; see Stepper.write_all."""
        self._state.together(states)[:, *index] = values

    def again(self) -> Stepper:
        """Return a stepper whose states are zero; see Stepper.again."""
        return self._again()
