"""The calls of the engine on a unit: MLPs, linears, and filling the prefetch buffer.

hls_templates/host/fastcar_accelerator.hpp is the same in C++.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastcar_compile.artifact.offload import Op, Prefetch
from fastcar_compile.artifact.sections import ProductPart
from fastcar_compile.drs.table import NO_LAYER
from fastcar_compile.errors import InputError, UserError
from fastcar_compile.runtime.backends.accelerator.unit import Buffer, ComputeUnit

Array = NDArray[Any]
ALL_ROWS = 0xFFFFFFFF
WORD_BYTES = 16
"""Bytes of a memory word; every row begins one."""

_MLP = {"op": Op.MLP, "inputs": 0, "channels": 0, "tile": 0, "tiles": 0}
_CONTROLLED = ("table", "query", "key", "chain")


class Engine:
    """The compute kernel.

    Args:
        unit: that runs it. hidden: H. batch: B.
    """

    def __init__(self, unit: ComputeUnit, hidden: int, batch: int) -> None:
        self.unit, self.hidden, self.batch = unit, hidden, batch
        self._ports = unit.kernel.weights()
        unit.set({a.name: 0 for a in unit.kernel.arguments if a.kind == "scalar"})

    def load(self, name: str, stream: Array) -> list[Buffer]:
        """Return a weight stream, uint8 [ports * section], as one buffer per port on the device.

        Raises:
            UserError: it is not of this design.
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

    def mlp(
        self, x: Array, index_register: int, cached: Array, weights: Sequence[Buffer], *, held: bool = False
    ) -> Array:
        """Return the rows of an MLP of no layer, which the controller has no part in, float32 [B, H].

        Args:
            x: float32 [B, H].
            index_register: bit b = 1: row b computes, 0: row b is copied from `cached`.
            cached: float32 [B, H].
            weights: buffers of `load`; not read when no row computes.
            held: the prefetch buffer holds the beginning of these weights, and is read instead of it.
        """
        self.unit.set({"layer": NO_LAYER, "prefetch": Prefetch.HELD if held else Prefetch.MEMORY})
        return self.execute(x, index_register, cached, weights)

    def execute(self, x: Array, index_register: int, cached: Array, weights: Sequence[Buffer]) -> Array:
        """Return the rows of one layer's MLP, float32 [B, H]; the arguments of the controller are set.

        Args:
            x, cached: float32 [B, H].
            index_register: bit b = 1: row b computes; of a layer whose gate the host decides.
            weights: buffers of `load`.
        """
        self._write_rows("cached", cached, self.hidden)
        self.unit.set(_MLP)
        return self._run(x, index_register, weights, self.hidden, self.hidden)

    def prefetch(self, weights: Sequence[Buffer]) -> None:
        """Fill the prefetch buffer with the beginning of these weights; no row is touched."""
        self.unit.fill("x", "cached", *_CONTROLLED)
        self.unit.set(_MLP | {"layer": NO_LAYER, "prefetch": Prefetch.FILL, "index_register": ALL_ROWS})
        self.bind(weights)
        self.unit.run()

    def linear(self, x: Array, call: ProductPart, weights: Sequence[Buffer], rows: int = ALL_ROWS) -> Array:
        """Return the rows of one linear call, float32 [B, N].

        Args:
            x: float32 [B, K]. call: the product as it was packed. weights: buffers of `load`.
            rows: bit b = 1: row b is computed; other rows of `y` are not written.
        """
        self.unit.fill("cached")
        self.unit.set({name: getattr(call, name) for name in ("inputs", "channels", "tile", "tiles")})
        self.unit.set({"op": Op.LINEAR_BIAS if call.bias else Op.LINEAR, "prefetch": Prefetch.MEMORY})
        return self._run(x, rows, weights, call.inputs, call.channels)

    def _run(self, x: Array, index_register: int, weights: Sequence[Buffer], inputs: int, outputs: int) -> Array:
        self.bind(weights)
        self.unit.fill(*_CONTROLLED)
        self._write_rows("x", x, inputs)
        self.unit.set({"index_register": index_register})
        self.unit.run()
        pitch = row_bytes(outputs)
        rows = self.unit.read("y", self.batch * pitch).reshape(self.batch, pitch)
        return np.ascontiguousarray(rows.view(np.float32)[:, :outputs])

    def bind(self, weights: Sequence[Buffer]) -> None:
        """Make the weight ports read these buffers: of the call's stream, or for a decision of the next layer's."""
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
