"""The HLS C simulation backend: the host program in TVM, every MLP of the decode through the emitted C++."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
import tvm
from torch import Tensor

from fastcar_compile.codegen.hls.csim import CsimLibrary
from fastcar_compile.codegen.tvm.converters import GATE_FUNCTION, OFFLOAD_FUNCTION
from fastcar_compile.drs.table import Opcode
from fastcar_compile.errors import InternalError
from fastcar_compile.ops import offload_gate
from fastcar_compile.ops.offload import bound_accelerator, current_accelerator
from fastcar_compile.ops.offload_gate import GateDecision, bound_gate_unit
from fastcar_compile.runtime.backends.base import Array, StepResult
from fastcar_compile.runtime.backends.board import BoardLibrary
from fastcar_compile.runtime.backends.controller import GateController
from fastcar_compile.runtime.backends.cpu import CpuBackend


def cache_folder() -> Path:
    """Where C simulation libraries are kept: $FASTCAR_CACHE, else ~/.cache/fastcar_compile."""
    return Path(os.environ.get("FASTCAR_CACHE", Path.home() / ".cache" / "fastcar_compile")) / "csim"


@tvm.register_global_func(OFFLOAD_FUNCTION, override=True)
def _offloaded(x: Any, replay: Any, cached: Any, layer: int, out: Any) -> None:
    """TVM calls the accelerator bound to the session that is stepping."""
    arguments = [torch.from_numpy(np.array(t.numpy())) for t in (x, replay, cached)]
    out.copyfrom(current_accelerator()(int(layer), *arguments).numpy())


@tvm.register_global_func(GATE_FUNCTION, override=True)
def _gated(*arguments: Any) -> None:
    """The same for the gate. The key cache is not copied: the unit reads one row of it."""
    query, keys, chain, position, step = (torch.from_dlpack(t) for t in arguments[:5])
    stride, layer, *results = arguments[5:]
    decision = offload_gate.decide(query, keys, chain, int(position), int(step), int(stride), int(layer))
    for result, value in zip(results, (decision.replay, decision.score, decision.chain), strict=True):
        result.copyfrom(value.numpy())


class HlsCsimBackend(CpuBackend):
    """CpuBackend whose gates and offloaded MLPs run in the g++ build of the artifact's HLS sources.

    As on the board, the TAS unit gets q and the cached key and decides, the DRS controller says which rows the MLP
    kernel computes, and the host follows. Prefill stays on the host.

    Args:
        root: the artifact's folder. weights: `layer_<i>` -> uint8 [stream bytes]. table: drs/table.bin.
        library: what runs the kernels, with weights as it takes them; None: the C simulation.
        options: as for CpuBackend.

    Raises:
        BackendError: g++ or the ap_types headers are missing, or the sources do not compile.
        UserError: the table is not valid.
    """

    library_type: ClassVar[type[CsimLibrary]] = CsimLibrary

    def __init__(
        self,
        root: Path,
        weights: Mapping[str, Any],
        table: bytes,
        library: CsimLibrary | BoardLibrary | None = None,
        **options: Any,
    ) -> None:
        self._library: Any = library or self.library_type.build(root / "hls", cache_folder())
        self._weights, self._gate = dict(weights), GateController(self._library.drs, table)
        self._fetched: int | None = None
        super().__init__(root, decode="offload", **options)

    def reset(self) -> None:
        """Set every state to zero and empty the prefetch buffer."""
        super().reset()
        self._gate.reset()
        self._fetched = None

    def decode(self, inputs: Array, position: int, step: int, thresholds: Array) -> StepResult:
        """One decode forward; see Backend.decode."""
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
