"""The HLS C simulation backend of artifacts compiled with offload="linears"."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from fastcar_compile.codegen.hls.csim import CsimLibrary
from fastcar_compile.codegen.hls.engine_csim import EngineLibrary
from fastcar_compile.codegen.hls.engine_design import LinearStage
from fastcar_compile.codegen.tvm.converters import OFFLOAD_LINEAR_FUNCTION
from fastcar_compile.ops.offload_linear import bound_linears, current_linears
from fastcar_compile.runtime.backends.base import Array, StepResult
from fastcar_compile.runtime.backends.hls_csim import HlsCsimBackend
from fastcar_compile.runtime.tvm_runtime import as_array, fill, register


def _offloaded(x: Any, name: Any, out: Any) -> None:
    """TVM calls the accelerator bound to the session that is stepping."""
    fill(out, current_linears()(str(name), torch.from_numpy(np.array(as_array(x)))).numpy())


register(OFFLOAD_LINEAR_FUNCTION, _offloaded)


class HlsCsimEngineBackend(HlsCsimBackend):
    """HlsCsimBackend that also runs the projections and the head on the engine, every row computing.

    The host sequences these calls; they are not in the DRS table, which schedules the rows of MLPs.

    Args:
        stages: name of each linear call -> its product, as packed.
        options: as for HlsCsimBackend; `weights` also has a stream per linear call, under its name.
    """

    library_type: ClassVar[type[CsimLibrary]] = EngineLibrary

    def __init__(self, stages: Mapping[str, LinearStage], **options: Any) -> None:
        self._stages = dict(stages)
        super().__init__(**options)

    def decode(self, inputs: Array, position: int, step: int, thresholds: Array) -> StepResult:
        """One decode forward; see Stepper.decode."""
        with bound_linears(self._linear):
            return super().decode(inputs, position, step, thresholds)

    def _linear(self, name: str, x: Tensor) -> Tensor:
        return torch.from_numpy(self._library.linear(x.numpy(), self._stages[name], self._weights[name]))
