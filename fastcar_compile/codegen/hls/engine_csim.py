"""C simulation of the engine: the MLP and the DRS controller as for any project, and linears."""

from __future__ import annotations

import ctypes
from typing import ClassVar

import numpy as np

from fastcar_compile.codegen.hls.csim import Array, CsimLibrary, _at
from fastcar_compile.codegen.hls.csim_drs import aligned
from fastcar_compile.codegen.hls.engine_design import LinearStage
from fastcar_compile.codegen.hls.engine_interface import OP_LINEAR, OP_LINEAR_BIAS
from fastcar_compile.errors import InputError, UserError


class EngineLibrary(CsimLibrary):
    """One emitted engine as a loaded library."""

    SOURCES: ClassVar[tuple[str, ...]] = (
        "csim_drs_entry.cpp",
        "csim_entry.cpp",
        "engine_csim_entry.cpp",
        "fastcar_drs.cpp",
        "fastcar_engine.cpp",
    )

    def linear(
        self, x: Array, stage: LinearStage, weights: Array, rows: int = 0xFFFFFFFF, y: Array | None = None
    ) -> Array:
        """One engine call.

        Args:
            x: float32 [B, K].
            stage: the product as it was packed.
            weights: uint8 [stage.stream_bytes].
            rows: bit b = 1: row b is computed; other rows keep what `y` holds.
            y: float32 [B, N]; default: zeros.

        Returns:
            float32 [B, N].

        Raises:
            InputError: x or y has another shape or dtype. UserError: so has the stream.
        """
        x = self._checked("x", x, stage.inputs)
        shape = (self.batch, stage.channels)
        out = np.zeros(shape, np.float32) if y is None else self._checked("y", y, stage.channels).copy()
        stream = _stream(weights, stage)
        self._library.fastcar_csim_linear(
            _at(x), ctypes.c_uint32(rows & 0xFFFFFFFF), _at(stream), _at(out), *_request(stage)
        )
        return out

    def linear_sums(self, x: Array, stage: LinearStage, weights: Array) -> Array:
        """The exact sums of every row of x (float32 [B, K]), from the kernel's own compute cores.

        Returns:
            int32 [B, N]; for w4a8 int32 [B, N, groups].

        Raises:
            UserError: the engine refuses the request; also as for `linear`.
        """
        x, stream = self._checked("x", x, stage.inputs), _stream(weights, stage)
        sums = np.zeros((self.batch, stage.channels, stage.sums), np.int32)
        for row in range(self.batch):
            done = self._library.fastcar_csim_linear_sums(_at(x[row]), _at(stream), *_request(stage), _at(sums[row]))
            if not done:
                raise UserError(f"the engine has no room for {stage}", hint="choose the design again with this linear")
        return sums if stage.bits == 4 else sums[..., 0]

    def _checked(self, name: str, rows: Array, width: int) -> Array:
        if rows.shape != (self.batch, width) or rows.dtype != np.float32:
            raise InputError(
                f"{name} is {rows.dtype} {list(rows.shape)}; the engine takes float32 {[self.batch, width]}"
            )
        return np.ascontiguousarray(rows)


def _request(stage: LinearStage) -> tuple[ctypes.c_uint32 | int, ...]:
    op = OP_LINEAR_BIAS if stage.bias else OP_LINEAR
    return ctypes.c_uint32(op), stage.inputs, stage.channels, stage.tile, stage.tiles


def _stream(weights: Array, stage: LinearStage) -> Array:
    if weights.shape != (stage.stream_bytes,) or weights.dtype != np.uint8:
        raise UserError(
            f"the weight stream is {weights.dtype} {list(weights.shape)}; the linear takes uint8 [{stage.stream_bytes}]",
            hint="pack the weights with pack_linear and the stage of this call",
        )
    return aligned(np.ascontiguousarray(weights))
