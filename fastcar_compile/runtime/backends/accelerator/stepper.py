"""A session whose gates, MLPs and linears run on an accelerator; the host program is TVM's."""

from __future__ import annotations

from dataclasses import dataclass

from fastcar_compile.artifact.reader import StoredArtifact
from fastcar_compile.artifact.sections import AcceleratorSection
from fastcar_compile.artifact.tensor_files import load_tensors
from fastcar_compile.errors import BackendError, InternalError
from fastcar_compile.runtime.backends.accelerator.calls import register_functions, stepping
from fastcar_compile.runtime.backends.accelerator.controller import Controller, GateController
from fastcar_compile.runtime.backends.accelerator.engine import Array, Engine
from fastcar_compile.runtime.backends.base import BackendOptions, StepResult
from fastcar_compile.runtime.backends.cpu import CpuStepper, libraries_of


@dataclass(frozen=True)
class Accelerator:
    """The kernels of an artifact on a device.

    Args:
        engine, controller: its kernels.
        prefetch_bytes: of the engine's prefetch buffer, all ports; 0: it is not used.
    """

    engine: Engine
    controller: Controller
    prefetch_bytes: int = 0


def accelerator_of(artifact: StoredArtifact) -> AcceleratorSection:
    """Return the accelerator's section.

    Raises:
        BackendError: there is none.
    """
    if artifact.manifest.accelerator is None:
        hint = "compile for a target with an accelerator and quant='w8a8' or 'w4a8'"
        raise BackendError("this artifact has no accelerator kernels", hint=hint)
    return artifact.manifest.accelerator


class AcceleratorStepper(CpuStepper):
    """CpuStepper whose gates, MLPs and offloaded linears run on an accelerator. Prefill stays on the host.

    The TAS unit gets q and the cached key and decides, the DRS controller says which rows the engine computes, and the
    host follows. The host sequences the linears; they are not in the DRS table, which schedules the rows of MLPs.

    Raises:
        UserError: the table or a weight stream is not valid.
    """

    def __init__(self, artifact: StoredArtifact, options: BackendOptions, accelerator: Accelerator) -> None:
        section = accelerator_of(artifact)
        register_functions()
        self._engine, self._prefetch_bytes = accelerator.engine, accelerator.prefetch_bytes
        streams = load_tensors(artifact.path / section.weights)
        self._weights = {name: self._engine.load(name, stream) for name, stream in streams.items()}
        table = (artifact.path / section.table).read_bytes()
        self._gate, self._linears = GateController(accelerator.controller, table), section.design.linears
        self._fetched: int | None = None
        libraries, decoder = libraries_of(artifact), artifact.manifest.decoder
        super().__init__(libraries, decoder, artifact.arrays(), options.threads, decode="offload")

    def reset(self) -> None:
        """Set every state to zero and empty the prefetch buffer."""
        super().reset()
        self._gate.reset()
        self._fetched = None

    def decode(self, inputs: Array, position: int, step: int, thresholds: Array) -> StepResult:
        """Run one decode forward; see Stepper.decode."""
        self._gate.start(step, thresholds)
        with stepping(self):
            return super().decode(inputs, position, step, thresholds)

    def gate(self, layer: int, query: Array, key: Array, chain: Array) -> tuple[Array, Array, Array]:
        """Return replay, score and chain of one layer.

        PREFETCH_NEXT is followed here: an MLP whose rows all replay may not be called.
        """
        decision = self._gate.decide(layer, query, key, chain)
        following = self._gate.to_prefetch(layer)
        if following is not None and self._prefetch_bytes:
            self._engine.prefetch(self._weights[f"layer_{following}"])
            self._fetched = following
        return decision.replay, decision.score, decision.chain

    def mlp(self, layer: int, x: Array, replay: Array, cached: Array) -> Array:
        """Return the rows of one layer's MLP: those that the controller dispatched, the others from `cached`.

        Of a layer without a gate in its table, the host's mask says what computes.
        """
        computed = self._gate.computed(layer)
        wanted = sum(1 << row for row, replayed in enumerate(replay.tolist()) if not replayed)
        if not self._gate.decides(layer):
            computed &= wanted
        if computed != wanted:
            raise InternalError(f"layer {layer}: the host's replay mask is not what the DRS controller dispatched")
        if not computed:  # nothing to launch
            return cached
        held = self._gate.prefetched(layer) if self._prefetch_bytes else 0
        if held and (held, layer) != (self._prefetch_bytes, self._fetched):
            there = f"the kernel has layer {self._fetched} in {self._prefetch_bytes} bytes"
            raise InternalError(f"layer {layer}: the controller counts on {held} prefetched bytes; {there}")
        return self._engine.mlp(x, computed, cached, self._weights[f"layer_{layer}"], held=held > 0)

    def linear(self, name: str, x: Array) -> Array:
        """Return every row of one linear call."""
        return self._engine.linear(x, self._linears[name], self._weights[name])
