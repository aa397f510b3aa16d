"""The accelerator on a board, with the calls of the C simulation library: fastcar_accelerator.hpp in Python."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastcar_compile.artifact.reader import StoredArtifact
from fastcar_compile.codegen.hls.board.kernels import Kernel
from fastcar_compile.codegen.hls.csim_drs import read_result
from fastcar_compile.codegen.hls.engine_design import LinearStage
from fastcar_compile.codegen.hls.engine_interface import OP_LINEAR, OP_LINEAR_BIAS, OP_MLP
from fastcar_compile.codegen.hls.interface import RESULT_WORDS
from fastcar_compile.drs.simulator import LayerCall, LayerTrace
from fastcar_compile.drs.table import NO_LAYER
from fastcar_compile.errors import UserError
from fastcar_compile.runtime.backends.base import BackendOptions, Stepper
from fastcar_compile.runtime.backends.board_device import ComputeUnit, Device

Array = NDArray[Any]
WORD_BYTES = 16
"""Bytes of a memory word; every row and every head begins one."""


class BoardController:
    """TAS unit and DRS controller; the counterpart of csim_drs.DrsLibrary."""

    def __init__(self, unit: ComputeUnit) -> None:
        self._unit, self._table = unit, b""
        self._words = unit.argument("result").bytes // 4

    def run(self, table: bytes, call: LayerCall, rows: int) -> LayerTrace:
        """One call; `rows` of the batch. The table is sent when it is another one than before."""
        unit = self._unit
        if table != self._table:
            unit.write("table", np.frombuffer(table, np.uint8))
            self._table = table
        for name, words in (("query", call.query), ("key", call.key), ("chain", call.chain.astype(np.int32))):
            unit.fill(name)
            unit.write(name, np.ascontiguousarray(words).view(np.uint8).reshape(-1))
        scalars = {
            "table_bytes": len(table),
            "layer": call.layer,
            "step": call.step,
            "query_words": len(call.query),
            "key_words": len(call.key),
            "held": NO_LAYER if call.held is None else call.held,
            "capacity": (self._words - RESULT_WORDS) // 2,
        }
        for name, value in scalars.items():
            unit.set(name, value)
        unit.run()
        return read_result(unit.read("result", 4 * self._words).view(np.uint32), rows)


class BoardLibrary:
    """The kernels of an artifact on a device, called as CsimLibrary is.

    Args:
        kernels: the manifest's, compute kernel first, controller second. hidden: H. batch: B.

    Attributes:
        drs: TAS unit and DRS controller.
        prefetch_bytes: 0: the kernel's prefetch buffer is not used (docs/tutorial/board.md).

    Raises:
        BackendError: pyxrt, the device or the xclbin is missing, or the xclbin is of another design.
    """

    prefetch_bytes = 0

    def __init__(self, kernels: Sequence[Mapping[str, Any]], hidden: int, batch: int) -> None:
        compute, controller = (Kernel.from_json(k) for k in kernels)
        device = Device([compute, controller])
        self.hidden, self.batch = hidden, batch
        self._unit = ComputeUnit(device, compute)
        self._ports = compute.weights()
        self.drs = BoardController(ComputeUnit(device, controller))

    def load(self, name: str, stream: Array) -> list[Any]:
        """A weight stream, uint8 [ports * section], as one buffer per port on the device.

        Raises:
            UserError: it is not of this design.
        """
        section, rest = divmod(stream.size, len(self._ports))
        most = self._unit.argument(self._ports[0]).bytes
        if rest or section > most or section % WORD_BYTES:
            what = (
                f"`{name}` has {stream.size} bytes; the kernel takes at most {most} on each of its {len(self._ports)}"
            )
            raise UserError(f"{what} weight ports", hint="use the files of one artifact together")
        parts = stream.reshape(len(self._ports), section)
        return [self._unit.make_buffer(port, part) for port, part in zip(self._ports, parts, strict=True)]

    def mlp(self, x: Array, index_register: int, cached: Array, weights: Sequence[Any]) -> Array:
        """As CsimLibrary.mlp, with the buffers of `load`. Without a row to compute, no kernel is launched."""
        if not index_register & (1 << self.batch) - 1:
            return cached.copy()
        self._write_rows("cached", cached)
        if self._unit.has("op"):
            self._set({"op": OP_MLP, "inputs": 0, "channels": 0, "tile": 0, "tiles": 0})
        return self._run(x, index_register, weights, self.hidden)

    def linear(self, x: Array, stage: LinearStage, weights: Sequence[Any]) -> Array:
        """As EngineLibrary.linear for every row, with the buffers of `load`."""
        self._unit.fill("cached")
        self._set({"op": OP_LINEAR_BIAS if stage.bias else OP_LINEAR})
        self._set({name: getattr(stage, name) for name in ("inputs", "channels", "tile", "tiles")})
        return self._run(x, 0xFFFFFFFF, weights, stage.channels)

    def _set(self, scalars: Mapping[str, int]) -> None:
        for name, value in scalars.items():
            self._unit.set(name, value)

    def _run(self, x: Array, index_register: int, weights: Sequence[Any], width: int) -> Array:
        for port, buffer in zip(self._ports, weights, strict=True):
            self._unit.bind(port, buffer)
        self._write_rows("x", x)
        self._set({"index_register": index_register, "prefetch": 0})
        self._unit.run()
        pitch = _pitch(width)
        rows = self._unit.read("y", self.batch * pitch).reshape(self.batch, pitch)
        return np.ascontiguousarray(rows.view(np.float32)[:, :width])

    def _write_rows(self, name: str, rows: Array) -> None:
        padded = np.zeros((self.batch, _pitch(rows.shape[1]) // 4), np.float32)
        padded[:, : rows.shape[1]] = rows
        self._unit.write(name, padded.view(np.uint8).reshape(-1))


def _pitch(width: int) -> int:
    """Bytes from row to row."""
    return -(-4 * width // WORD_BYTES) * WORD_BYTES


def open_stepper(artifact: StoredArtifact, options: BackendOptions) -> Stepper:
    """Open an artifact on the board; see OpenStepper."""
    from fastcar_compile.runtime.backends.hls_csim import accelerator_of, open_stepper

    config = artifact.manifest.decoder.config
    kernels = [kernel.model_dump() for kernel in accelerator_of(artifact).kernels]
    return open_stepper(artifact, options, BoardLibrary(kernels, config.hidden_size, config.batch_size))
