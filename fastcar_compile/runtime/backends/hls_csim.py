"""The HLS C simulation backend: the host program in TVM, every MLP of the decode through the emitted C++."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from fastcar_compile.artifact.layout import HLS
from fastcar_compile.artifact.reader import StoredArtifact
from fastcar_compile.artifact.sections import AcceleratorSection
from fastcar_compile.artifact.tensor_files import load_tensors
from fastcar_compile.codegen.hls.csim import CsimLibrary
from fastcar_compile.codegen.tvm.converters import GATE_FUNCTION, OFFLOAD_FUNCTION
from fastcar_compile.drs.table import Opcode
from fastcar_compile.errors import BackendError, InternalError
from fastcar_compile.ops import offload_gate
from fastcar_compile.ops.offload import bound_accelerator, current_accelerator
from fastcar_compile.ops.offload_gate import GateDecision, bound_gate_unit
from fastcar_compile.runtime.backends.base import Array, BackendOptions, StepResult
from fastcar_compile.runtime.backends.board import BoardLibrary
from fastcar_compile.runtime.backends.controller import GateController
from fastcar_compile.runtime.backends.cpu import CpuStepper, libraries_of
from fastcar_compile.runtime.tvm_runtime import as_array, fill, register


def cache_folder() -> Path:
    """Where C simulation libraries are kept: $FASTCAR_CACHE, else ~/.cache/fastcar_compile."""
    return Path(os.environ.get("FASTCAR_CACHE", Path.home() / ".cache" / "fastcar_compile")) / "csim"


def _offloaded(x: Any, replay: Any, cached: Any, layer: int, out: Any) -> None:
    """TVM calls the accelerator bound to the session that is stepping."""
    arguments = [torch.from_numpy(np.array(as_array(t))) for t in (x, replay, cached)]
    fill(out, current_accelerator()(int(layer), *arguments).numpy())


def _gated(*arguments: Any) -> None:
    """The same for the gate. The key cache is not copied: the unit reads one row of it."""
    query, keys, chain, position, step = (torch.from_dlpack(t) for t in arguments[:5])
    stride, layer, *results = arguments[5:]
    decision = offload_gate.decide(query, keys, chain, int(position), int(step), int(stride), int(layer))
    for result, value in zip(results, (decision.replay, decision.score, decision.chain), strict=True):
        fill(result, value.numpy())


register(OFFLOAD_FUNCTION, _offloaded)
register(GATE_FUNCTION, _gated)


class HlsCsimBackend(CpuStepper):
    """CpuStepper whose gates and offloaded MLPs run in the g++ build of the artifact's HLS sources.

    As on the board, the TAS unit gets q and the cached key and decides, the DRS controller says which rows the MLP
    kernel computes, and the host follows. Prefill stays on the host.

    Args:
        hls: folder of the sources. weights: `layer_<i>` -> uint8 [stream bytes]. table: drs/table.bin.
        library: what runs the kernels, with weights as it takes them; None: the C simulation.
        options: as for CpuStepper.

    Raises:
        BackendError: g++ or the ap_types headers are missing, or the sources do not compile.
        UserError: the table is not valid.
    """

    library_type: ClassVar[type[CsimLibrary]] = CsimLibrary

    def __init__(
        self,
        hls: Path,
        weights: Mapping[str, Any],
        table: bytes,
        library: CsimLibrary | BoardLibrary | None = None,
        **options: Any,
    ) -> None:
        self._library: Any = library or self.library_type.build(hls, cache_folder())
        self._weights, self._gate = dict(weights), GateController(self._library.drs, table)
        self._fetched: int | None = None
        super().__init__(decode="offload", **options)

    def reset(self) -> None:
        """Set every state to zero and empty the prefetch buffer."""
        super().reset()
        self._gate.reset()
        self._fetched = None

    def decode(self, inputs: Array, position: int, step: int, thresholds: Array) -> StepResult:
        """One decode forward; see Stepper.decode."""
        self._gate.start(step, thresholds)
        with bound_accelerator(self._mlp), bound_gate_unit(self._decide):
            return super().decode(inputs, position, step, thresholds)

    def _decide(self, layer: int, *operands: Any) -> GateDecision:
        """The gate of one layer. PREFETCH_NEXT is followed here: an MLP whose rows all replay may not be called."""
        decision = self._gate(layer, *operands)
        following = self._gate.to_prefetch(layer)
        if following is not None and self._library.prefetch_bytes:
            self._library.prefetch(self._weights[f"layer_{following}"])
            self._fetched = following
        return decision

    def _mlp(self, layer: int, x: Tensor, replay: Tensor, cached: Tensor) -> Tensor:
        """The rows that the controller dispatched; of a layer without a gate in its table, those of the host's mask."""
        records = self._gate.dispatched(layer).records
        computed = sum(1 << r.row for r in records if r.opcode is Opcode.COMPUTE_MLP and r.row is not None)
        wanted = sum(1 << row for row, replayed in enumerate(replay.tolist()) if not replayed)
        if not self._gate.decides(layer):
            computed &= wanted
        if computed != wanted:
            raise InternalError(f"layer {layer}: the host's replay mask is not what the DRS controller dispatched")
        return torch.from_numpy(self._call(layer, computed, x.numpy(), cached.numpy()))

    def _call(self, layer: int, computed: int, x: Array, cached: Array) -> Array:
        """The MLP kernel, whose weights begin in the prefetch buffer where LOAD_WEIGHTS says so."""
        weights = self._weights[f"layer_{layer}"]
        if not self._library.prefetch_bytes:
            return self._library.mlp(x, computed, cached, weights)
        held = self._gate.prefetched(layer)
        if held and (held, layer) != (self._library.prefetch_bytes, self._fetched):
            there = f"the kernel has layer {self._fetched} in {self._library.prefetch_bytes} bytes"
            raise InternalError(f"layer {layer}: the controller counts on {held} prefetched bytes; {there}")
        return self._library.mlp(x, computed, cached, weights, held=held > 0)


def accelerator_of(artifact: StoredArtifact) -> AcceleratorSection:
    """Return the accelerator's section.

    Raises:
        BackendError: there is none.
    """
    if artifact.manifest.accelerator is None:
        hint = "compile for a target with an accelerator and quant='w8a8' or 'w4a8'"
        raise BackendError("this artifact has no accelerator kernels", hint=hint)
    return artifact.manifest.accelerator


def open_stepper(
    artifact: StoredArtifact, options: BackendOptions, library: BoardLibrary | None = None
) -> HlsCsimBackend:
    """Open an artifact on the C simulation of its kernels, or on `library`; see OpenStepper."""
    from fastcar_compile.codegen.hls.engine_design import LinearStage
    from fastcar_compile.runtime.backends.hls_csim_engine import HlsCsimEngineBackend

    accelerator = accelerator_of(artifact)
    weights: dict[str, Any] = dict(load_tensors(artifact.path / accelerator.weights))
    if library is not None:
        weights = {name: library.load(name, stream) for name, stream in weights.items()}
    given: dict[str, Any] = {
        "hls": artifact.path / HLS,
        "weights": weights,
        "table": (artifact.path / accelerator.table).read_bytes(),
        "library": library,
        "libraries": libraries_of(artifact),
        "decoder": artifact.manifest.decoder,
        "params": artifact.arrays(),
        "threads": options.threads,
    }
    if accelerator.offload != "linears":
        return HlsCsimBackend(**given)
    stages = {name: LinearStage(**stage.model_dump()) for name, stage in (accelerator.design.linears or {}).items()}
    return HlsCsimEngineBackend(stages=stages, **given)
