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

from fastcar_compile.codegen.drs.table import Opcode, Status
from fastcar_compile.codegen.hls.csim import CsimLibrary
from fastcar_compile.errors import BackendError
from fastcar_compile.lowering.converters import OFFLOAD_FUNCTION
from fastcar_compile.ops.offload import bound_accelerator, current_accelerator
from fastcar_compile.runtime.backends.base import Array, StepResult
from fastcar_compile.runtime.backends.cpu import CpuBackend


def cache_folder() -> Path:
    """Where C simulation libraries are kept: $FASTCAR_CACHE, else ~/.cache/fastcar_compile."""
    return Path(os.environ.get("FASTCAR_CACHE", Path.home() / ".cache" / "fastcar_compile")) / "csim"


@tvm.register_global_func(OFFLOAD_FUNCTION, override=True)
def _offloaded(x: Any, replay: Any, cached: Any, layer: int, out: Any) -> None:
    """TVM calls the accelerator bound to the session that is stepping."""
    arguments = [torch.from_numpy(np.array(t.numpy())) for t in (x, replay, cached)]
    out.copyfrom(current_accelerator()(int(layer), *arguments).numpy())


class HlsCsimBackend(CpuBackend):
    """CpuBackend whose offloaded MLPs run in the g++ build of the artifact's HLS sources.

    As on the board, the DRS controller reads the control table and decides which rows the MLP kernel computes. Prefill
    stays on the host.

    Args:
        root: the artifact's folder. weights: `layer_<i>` -> uint8 [stream bytes]. table: drs/table.bin.
        options: as for CpuBackend.

    Raises:
        BackendError: g++ or the ap_types headers are missing, or the sources do not compile.
    """

    library_type: ClassVar[type[CsimLibrary]] = CsimLibrary

    def __init__(self, root: Path, weights: Mapping[str, Array], table: bytes, **options: Any) -> None:
        self._library = self.library_type.build(root / "hls", cache_folder())
        self._weights, self._table = dict(weights), table
        super().__init__(root, decode="offload", **options)

    def decode(self, inputs: Array, position: int, step: int, thresholds: Array) -> StepResult:
        """One decode forward; see Backend.decode."""
        with bound_accelerator(self._mlp):
            return super().decode(inputs, position, step, thresholds)

    def _mlp(self, layer: int, x: Tensor, replay: Tensor, cached: Tensor) -> Tensor:
        register = sum(1 << row for row, replayed in enumerate(replay.tolist()) if not replayed)
        records, status = self._library.drs(self._table, layer, register)
        if status is not Status.OK:
            what = f"the DRS controller stopped with status {status.name}"
            raise BackendError(what, where=f"layer {layer}", mend="compile the model again")
        computed = sum(1 << r.row for r in records if r.opcode is Opcode.COMPUTE_MLP and r.row is not None)
        y = self._library.mlp(x.numpy(), computed, cached.numpy(), self._weights[f"layer_{layer}"])
        return torch.from_numpy(y)
