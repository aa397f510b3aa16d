"""Sessions whose decode steps run on an accelerator: whole, a launch per token, or their gates, MLPs and linears."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from fastcar_compile.artifact.accelerator_section import AcceleratorSection
from fastcar_compile.artifact.engine import float_words
from fastcar_compile.artifact.reader import StoredArtifact
from fastcar_compile.artifact.sections import DecoderSection, State
from fastcar_compile.codegen.hls.control_table.simulator import LayerCall
from fastcar_compile.codegen.hls.control_table.table import pack_inputs
from fastcar_compile.codegen.hls.step_program.cache_layout import Rows
from fastcar_compile.codegen.hls.step_program.program import StepProgram
from fastcar_compile.codegen.hls.step_program.replaying import Decide
from fastcar_compile.config.targets import ON_A_BOARD
from fastcar_compile.errors import ArtifactError, BackendError, InternalError
from fastcar_compile.gates.base import Array, GateInputs
from fastcar_compile.runtime.backends.accelerator.calls import ComputeUnit, stepping
from fastcar_compile.runtime.backends.accelerator.kernel import Kernel, KernelStates, LiveTable
from fastcar_compile.runtime.backends.base import BackendOptions, Index, Numbers, Stepper, StepResult
from fastcar_compile.runtime.backends.cpu import CpuStepper, Embedding, Library, library_of


@dataclass(frozen=True)
class Loaded:
    """What sessions on an accelerator take from their artifact, which may be closed then.

    Args:
        table: the control table. streams: weight streams and constants of the kernel. params: weights of the host.
        threads: CPU threads; None: every core that the process may use.
    """

    library: Library
    decoder: DecoderSection
    accelerator: AcceleratorSection
    table: bytes
    streams: Mapping[str, Array]
    params: Mapping[str, Array]
    threads: int | None

    @classmethod
    def of(cls, artifact: StoredArtifact, options: BackendOptions) -> Loaded:
        """Load it.

        Raises:
            ArtifactError: a file was written since the check. BackendError: the artifact has nothing for this machine.
        """
        section = accelerator_of(artifact)
        table, streams = artifact.files.data(section.table), artifact.tensors(section.weights)
        host = library_of(artifact), artifact.manifest.decoder
        return cls(*host, section, table, streams, artifact.arrays(), options.threads)

    def kernel(self, unit: ComputeUnit) -> tuple[Kernel, LiveTable]:
        """Return the kernel with its control table loaded, and that table.

        Raises:
            UserError: the program, the table or the streams are not valid. BackendError: the kernel refuses one.
        """
        return Kernel(unit, self.table, self.streams), LiveTable(self.table)


class StepStepper(Stepper):
    """Decode and prefill on the step kernel, which keeps the states.

    A launch reads as many positions of a prompt as a video has rows. Where a video has several, what they change of
    replay is committed by the next launch.

    Args:
        unit: the artifact's kernel on a device.

    Raises:
        UserError: the program, the table or the weights are not valid, or belong to another decoder.
        BackendError: the kernel refuses one of them.
    """

    row_thresholds = False  # the control table has one for each layer

    def __init__(self, loaded: Loaded, unit: ComputeUnit) -> None:
        section, decoder = loaded.accelerator, loaded.decoder
        if section.step is None:
            raise InternalError("the artifact's accelerator runs no whole steps")
        self._loaded, self._config = loaded, decoder.config
        self._embed = Embedding(loaded.library, decoder.config, loaded.params, loaded.threads)
        self._kernel, self._live = loaded.kernel(unit)
        self._program = program = self._kernel.program
        self._check(program, section.table)
        self._kept = KernelStates(self._kernel, section.step.states, decoder.state)
        self.stages = program.sizes.staged > 0
        self._staged = np.zeros(program.sizes.rows, np.int64)
        """1 + the forward number of each row whose changes the next launch commits; 0: it has none."""
        self._gated = [i.layer for i in program.instructions if isinstance(i, Decide)]

    def reset(self) -> None:
        """Set every state to zero."""
        self._kernel.clear()
        self._staged[:] = 0

    def prefill(self, inputs: Array, position: int) -> Array:
        """Run the positions of a prompt, one for each row of a video per launch; see Stepper.prefill."""
        sizes, logits = self._program.sizes, list[Array]()
        own = sizes.rows // sizes.videos
        for first in range(0, inputs.shape[1], own):
            chunk = inputs[:, first : first + own]
            given = np.zeros((sizes.videos, own, *inputs.shape[2:]), inputs.dtype)
            given[:, : chunk.shape[1]] = chunk
            rows = Rows.at(sizes, position + first, count=chunk.shape[1])
            found = self._run(given.reshape(sizes.rows, 1, *inputs.shape[2:]), rows)
            logits.append(found.reshape(sizes.videos, own, -1)[:, : chunk.shape[1]])
        return np.concatenate(logits, 1)

    def decode(self, inputs: Array, position: Numbers, step: Numbers, thresholds: Array) -> StepResult:
        """Run one decode forward; see Stepper.decode. Changed thresholds are loaded first, in a launch."""
        changed = self._live.follow(thresholds.reshape(len(thresholds), -1)[:, 0])
        if changed is not None:
            self._kernel.load(changed)
        rows = self._rows(position, step)
        # An inactive row has any output: its logits are zero.
        logits = np.where(rows.active[:, None], self._run(inputs, rows), np.float32(0))[:, None]
        decisions = np.zeros((len(thresholds), len(logits)), np.bool_)
        scores = np.zeros((len(thresholds), len(logits)), np.float32)
        for layer, trace in zip(self._gated, self._kernel.answers(self._gated), strict=True):
            decisions[layer], scores[layer] = self._live.replayed(trace), self._live.scores(trace)
        return StepResult(logits, decisions, scores)

    def withdraw(self, rows: Array) -> None:
        """Commit nothing of these rows; see Stepper.withdraw. There are no rings where a video has several rows."""
        self._staged[rows] = 0

    def states(self) -> Sequence[State]:
        """Return what every state is; see Stepper.states."""
        return self._loaded.decoder.state

    def read(self, name: str, index: Index) -> Array:
        """Return a part of a state; see Stepper.read."""
        self._commit()
        return self._kept.read(name, index)

    def write(self, changes: Iterable[tuple[str, Index, Array]]) -> None:
        """Write parts of states; see Stepper.write."""
        self._commit()
        for change in changes:
            self._kept.write(*change)

    def again(self) -> StepStepper:
        """Return a stepper on another unit; see Stepper.again."""
        return StepStepper(self._loaded, self._kernel.unit.again())

    def _rows(self, position: Numbers, step: Numbers) -> Rows:
        """Return what a decode step says of its rows."""
        sizes = self._program.sizes
        places, steps = (np.broadcast_to(np.asarray(n, np.int64), sizes.rows) for n in (position, step))
        return Rows(sizes.videos, places, steps, places >= 0, np.zeros(sizes.rows, np.int32))

    def _run(self, inputs: Array, rows: Rows) -> Array:
        """Return the logits of every row, float32 [B, V]."""
        # A decoder whose rows share their numbers has one position for all of them.
        position = rows.position if self._config.rows is not None else rows.position[:1]
        x = self._embed(inputs, position)[:, 0]
        return self._launch(x, rows)[:, : self._config.vocab_size or self._config.hidden_size]

    def _launch(self, x: Array, rows: Rows) -> Array:
        """Return the output of the kernel, which commits what is staged."""
        output = self._kernel.step(x, replace(rows, before=self._staged))
        self._staged = np.where(rows.deciding, rows.step + 1, 0) if self.stages else self._staged
        return output

    def _commit(self) -> None:
        """Commit what is staged, in a launch without rows."""
        if self._staged.any():
            sizes = self._program.sizes
            self._launch(np.zeros((sizes.rows, self._config.hidden_size), np.float32), Rows.at(sizes, active=0))

    def _check(self, program: StepProgram, file: str) -> None:
        """Raise ArtifactError where a program belongs to another decoder."""
        config, sizes = self._config, program.sizes
        rows = config.decode_rows
        words = rows + rows * float_words(config.hidden_size)
        logits = rows * float_words(config.vocab_size or config.hidden_size)
        own = (sizes.rows, sizes.videos, sizes.input_words, sizes.output_words)
        if own != (rows, config.batch_size, words, logits):
            what = "the program is of another decoder than the manifest"
            raise ArtifactError(what, where=file, hint="use the files of one artifact together")


def accelerator_of(artifact: StoredArtifact) -> AcceleratorSection:
    """Return the accelerator's section.

    Raises:
        BackendError: the artifact has no accelerator.
    """
    if artifact.manifest.accelerator is None:
        raise BackendError("this artifact has no accelerator kernels", hint=ON_A_BOARD)
    return artifact.manifest.accelerator


def stepper_on(artifact: StoredArtifact, options: BackendOptions, unit: ComputeUnit) -> Stepper:
    """Return a stepper on the artifact's kernel: a stepper of whole steps where the accelerator runs whole steps.

    Raises:
        UserError: a file of the accelerator is not valid. BackendError: the kernel refuses a file.
    """
    loaded = Loaded.of(artifact, options)
    return (AcceleratorStepper if loaded.accelerator.step is None else StepStepper)(loaded, unit)


class AcceleratorStepper(CpuStepper):
    """CpuStepper whose gates, MLPs and offloaded linears run on an accelerator. Prefill stays on the host.

    The score unit gets what the gate reads and decides. The host gives the array the Index Register that the DRS
    controller decided, or its own mask in a layer whose gate it decides itself.

    Args:
        unit: the artifact's kernel on a device.

    Raises:
        UserError: the program, the table or the weights are not valid.
    """

    def __init__(self, loaded: Loaded, unit: ComputeUnit) -> None:
        self._loaded = loaded
        self._kernel, live = loaded.kernel(unit)
        self._gate = GateController(self._kernel, live)
        self._linears = [call.name for call in loaded.accelerator.linears]
        super().__init__(loaded.library, loaded.decoder, loaded.params, loaded.threads, decode="offload")

    def reset(self) -> None:
        """Set every state but the context's to zero."""
        super().reset()
        self._gate.reset()

    def decode(self, inputs: Array, position: Numbers, step: Numbers, thresholds: Array) -> StepResult:
        """Run one decode forward; see Stepper.decode."""
        self._gate.start(int(step), thresholds)
        with stepping(self):
            return super().decode(inputs, position, step, thresholds)

    def again(self) -> AcceleratorStepper:
        """Return a stepper on another unit, as a kernel's control table belongs to one session; see Stepper.again."""
        return AcceleratorStepper(self._loaded, self._kernel.unit.again())

    def gate(self, layer: int, inputs: GateInputs[Array], chain: Array) -> tuple[Array, Array, Array]:
        """Return replay bool [B], score float32 [B] and chain int32 [B] of one layer."""
        return self._gate.decide(layer, inputs, chain)

    def mlp(self, layer: int, x: Array, replay: Array, cached: Array) -> Array:
        """Return float32 [B, H]: row b of one layer's MLP(x), or cached[b] where replay[b]."""
        wanted = sum(1 << row for row, replayed in enumerate(replay.tolist()) if not replayed)
        self._gate.require(layer, wanted)
        if not wanted:  # nothing to launch
            return cached
        return self._kernel.mlp(layer, x, wanted, cached)

    def linear(self, name: str, x: Array) -> Array:
        """Return float32 [B, N] of x float32 [B, K] through the linears of call `name`."""
        return self._kernel.linear(self._linears.index(name), x)


class GateController:
    """Decides layer by layer through a kernel whose table is loaded."""

    def __init__(self, kernel: Kernel, live: LiveTable) -> None:
        self._kernel, self._live = kernel, live
        self.reset()

    def reset(self) -> None:
        """Forget the last forward."""
        self._step = 0
        self._registers: dict[int, int] = {}

    def start(self, step: int, thresholds: Array) -> None:
        """Begin decode forward number `step`; thresholds float32 [L].

        Others than before are a new table, which is loaded once.

        Raises:
            BackendError: the kernel refuses the table.
        """
        self._step = step
        self._registers.clear()
        changed = self._live.follow(thresholds)
        if changed is not None:
            self._kernel.load(changed)

    def decide(self, layer: int, inputs: GateInputs[Array], chain: Array) -> tuple[Array, Array, Array]:
        """Return replay bool [B], score float32 [B] and chain int32 [B] with this forward, of one layer.

        Args:
            inputs: what the layer's gate reads. chain: int32 [B], replays in a row at this slot.

        Raises:
            BackendError: the controller stopped with a status other than OK.
        """
        trace = self._kernel.decide(LayerCall(layer, self._step, *pack_inputs(inputs), chain))
        self._registers[layer] = trace.index_register
        return self._live.replayed(trace), self._live.scores(trace), np.array(trace.chain, np.int32)

    def require(self, layer: int, mask: int) -> None:
        """Raise InternalError where bit b of a layer's `mask`, 1: row b computes, is not what was decided for row b."""
        if self._live.decides(layer) and self._registers[layer] != mask:
            raise InternalError(f"layer {layer}: the host's replay mask is not what the DRS controller decided")
