"""A session whose gates, MLPs and linears run on an accelerator; the host program is TVM's."""

from __future__ import annotations

import numpy as np

from fastcar_compile.artifact.offload import NETWORK
from fastcar_compile.artifact.reader import StoredArtifact
from fastcar_compile.artifact.sections import AcceleratorSection
from fastcar_compile.drs.inputs import GateInputs
from fastcar_compile.drs.reader import read_table
from fastcar_compile.errors import BackendError
from fastcar_compile.runtime.backends.accelerator.calls import stepping
from fastcar_compile.runtime.backends.accelerator.controller import Controller, GateController
from fastcar_compile.runtime.backends.accelerator.engine import Array, Engine
from fastcar_compile.runtime.backends.accelerator.step import StepStepper
from fastcar_compile.runtime.backends.accelerator.unit import ComputeUnit
from fastcar_compile.runtime.backends.base import BackendOptions, Stepper, StepResult
from fastcar_compile.runtime.backends.cpu import CpuStepper, library_of


def accelerator_of(artifact: StoredArtifact) -> AcceleratorSection:
    """Return the accelerator's section.

    Raises:
        BackendError: there is none.
    """
    if artifact.manifest.accelerator is None:
        hint = "compile for a target with an accelerator and quant='w8a8' or 'w4a8'"
        raise BackendError("this artifact has no accelerator kernels", hint=hint)
    return artifact.manifest.accelerator


def stepper_on(artifact: StoredArtifact, options: BackendOptions, unit: ComputeUnit) -> Stepper:
    """Return a stepper on the artifact's kernel: one of whole steps where the accelerator runs them.

    Raises:
        UserError: a file of the accelerator is not valid. BackendError: the kernel refuses one.
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
        """Return the rows of one layer's MLP; replayed rows are those of `cached`."""
        wanted = sum(1 << row for row, replayed in enumerate(replay.tolist()) if not replayed)
        self._gate.require(layer, wanted)
        if not wanted:  # nothing to launch
            return cached
        return self._engine.mlp(x, wanted, cached, self._weights[f"layer_{layer}"])

    def linear(self, name: str, x: Array) -> Array:
        """Return every row of one linear call."""
        return self._engine.linear(x, self._linears[name], self._weights[name])
