"""The calls of the engine on a unit: MLPs and linears.

hls_templates/host/fastcar_accelerator.hpp is the same in C++.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastcar_compile.artifact.offload import Op
from fastcar_compile.artifact.sections import ProductPart
from fastcar_compile.errors import InputError, UserError
from fastcar_compile.runtime.backends.accelerator.calls import Buffer, ComputeUnit

Array = NDArray[Any]
ALL_ROWS = 0xFFFFFFFF
WORD_BYTES = 16
"""Bytes of a memory word; every row begins one."""

_MLP = {"op": Op.MLP, "inputs": 0, "channels": 0, "tile": 0, "tiles": 0}
_CONTROLLED = ("table", "query", "key", "chain")


class Engine:
    """The compute kernel.

    Args:
        unit: unit that runs the kernel. hidden: H. batch: B.
    """

    def __init__(self, unit: ComputeUnit, hidden: int, batch: int) -> None:
        self.unit, self.hidden, self.batch = unit, hidden, batch
        self._ports = unit.kernel.weights()
        unit.set({a.name: 0 for a in unit.kernel.arguments if a.kind == "scalar"})

    def load(self, name: str, stream: Array) -> list[Buffer]:
        """Return a weight stream, uint8 [ports * section], as one buffer per port on the device.

        Raises:
            UserError: the stream does not fit this design.
        """
        section, rest = divmod(stream.size, len(self._ports))
        most = self.unit.argument(self._ports[0]).bytes
        if stream.dtype != np.uint8 or rest or section > most or section % WORD_BYTES:
            raise UserError(
                f"`{name}` has {stream.nbytes} bytes; the kernel takes at most {most} on each of its "
                f"{len(self._ports)} weight ports",
                hint="use the files of one artifact together",
            )
        parts = stream.reshape(len(self._ports), section)
        return [self.unit.make_buffer(port, part) for port, part in zip(self._ports, parts, strict=True)]

    def mlp(self, x: Array, index_register: int, cached: Array, weights: Sequence[Buffer]) -> Array:
        """Return the rows of one MLP, float32 [B, H].

        Args:
            x, cached: float32 [B, H].
            index_register: bit b = 1: row b computes, 0: row b is copied from `cached`.
            weights: buffers of `load`; not read when no row computes.
        """
        self._write_rows("cached", cached, self.hidden)
        self.unit.set(_MLP)
        return self._run(x, index_register, weights, self.hidden, self.hidden)

    def linear(self, x: Array, call: ProductPart, weights: Sequence[Buffer], rows: int = ALL_ROWS) -> Array:
        """Return the rows of one linear call, float32 [B, N].

        Args:
            x: float32 [B, K]. call: the product as it was packed. weights: buffers of `load`.
            rows: bit b = 1: row b is computed; other rows of `y` are not written.
        """
        self.unit.fill("cached")
        self.unit.set({name: getattr(call, name) for name in ("inputs", "channels", "tile", "tiles")})
        self.unit.set({"op": Op.LINEAR_BIAS if call.bias else Op.LINEAR})
        return self._run(x, rows, weights, call.inputs, call.channels)

    def _run(self, x: Array, index_register: int, weights: Sequence[Buffer], inputs: int, outputs: int) -> Array:
        self.bind(weights)
        # The kernel needs a buffer for every memory argument, also for arguments that this operation does not read.
        self.unit.fill(*_CONTROLLED)
        self._write_rows("x", x, inputs)
        self.unit.set({"index_register": index_register})
        self.unit.run()
        # A row in memory ends with the lanes that fill its last word; they are cut off here.
        pitch = row_bytes(outputs)
        rows = self.unit.read("y", self.batch * pitch).reshape(self.batch, pitch)
        return np.ascontiguousarray(rows.view(np.float32)[:, :outputs])

    def bind(self, weights: Sequence[Buffer]) -> None:
        """Make the weight ports read these buffers."""
        self.unit.fill("x", "cached")
        for port, buffer in zip(self._ports, weights, strict=True):
            self.unit.bind(port, buffer)

    def _write_rows(self, name: str, rows: Array, width: int) -> None:
        if rows.shape != (self.batch, width) or rows.dtype != np.float32:
            raise InputError(
                f"{name} is {rows.dtype} {list(rows.shape)}; the engine takes float32 {[self.batch, width]}"
            )
        self.unit.write(name, padded_rows(rows))


def padded_rows(rows: Array) -> NDArray[np.uint8]:
    """Return float32 rows as memory words; spare lanes are zero."""
    padded = np.zeros((len(rows), row_bytes(rows.shape[1]) // 4), np.float32)
    padded[:, : rows.shape[1]] = rows
    return padded.view(np.uint8).reshape(-1)


def row_bytes(width: int) -> int:
    """Return the bytes from one row of float32 values to the next."""
    return -(-4 * width // WORD_BYTES) * WORD_BYTES
