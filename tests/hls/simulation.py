"""A design in C simulation: the engine as a session calls it, on whole weight streams, and the exact sums."""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np

from fastcar_compile.artifact.offload import Op
from fastcar_compile.artifact.sections import KernelPart
from fastcar_compile.codegen.hls.controller_project import control_sizes, table_of_sizes
from fastcar_compile.codegen.hls.design.design import Design
from fastcar_compile.codegen.hls.design.product import Product
from fastcar_compile.codegen.hls.interface import engine_interface
from fastcar_compile.codegen.hls.project import emit_hls
from fastcar_compile.runtime.backends.accelerator.engine import ALL_ROWS, Engine, padded_rows
from fastcar_compile.runtime.backends.hls_csim import CsimUnit, aligned, folder_sources, open_library
from hls.library import Array

ROOM = 1 << 22


class Simulation:
    """The engine of `made` in a loaded library.

    Args:
        suffix: of the names of its functions there.
    """

    def __init__(self, library: ctypes.CDLL, made: Design, suffix: str = "") -> None:
        self.design, self.batch, self.hidden = made, made.mlp.batch, made.mlp.hidden
        kernel = engine_interface(made, control_sizes(table_of_sizes(made))).part
        # Room for any linear, not only those of the design.
        arguments = (a if a.kind == "scalar" else a.model_copy(update={"bytes": ROOM}) for a in kernel.arguments)
        unit = CsimUnit(library, KernelPart(name=kernel.name + suffix, arguments=tuple(arguments)))
        self.engine = Engine(unit, self.hidden, self.batch)
        self._sums = getattr(library, f"fastcar_csim_sums{suffix}")

    @classmethod
    def build(cls, made: Design, folder: Path, libraries: Path) -> Simulation:
        """Emit the project into `folder` and build it."""
        emit_hls(made, folder)
        return cls(open_library(folder_sources(folder), libraries), made)

    def mlp(self, x: Array, index_register: int, cached: Array, stream: Array) -> Array:
        """As Engine.mlp."""
        return self.engine.mlp(x, index_register, cached, self.engine.load("mlp", stream))

    def linear(self, x: Array, product: Product, stream: Array, rows: int = ALL_ROWS, y: Array | None = None) -> Array:
        """As Engine.linear; rows that are not computed keep what `y` (zeros) holds."""
        before = np.zeros((self.batch, product.channels), np.float32) if y is None else y
        self.engine.unit.write("y", padded_rows(before))
        return self.engine.linear(x, product.part, self.engine.load("linear", stream), rows)

    def mlp_sums(self, x: Array, stream: Array) -> tuple[Array, ...]:
        """The exact sums of every row, from the kernel's own functions.

        Returns:
            Per linear, in the order of `pack_mlp`: int32 [B, N]; for w4a8 int32 [B, N, groups].
        """
        made, parts = self.design, 2 if self.design.mlp.gated else 1
        sizes = [p.channels * p.sums for p in (made.gate_up, made.down)]
        found = np.stack([self._row(row, stream, Op.MLP, (0, 0, 0, 0), sum(sizes)) for row in x])
        first = found[:, : sizes[0]].reshape(self.batch, -1, parts, made.gate_up.sums)
        down = found[:, sizes[0] :].reshape(self.batch, -1, made.down.sums)
        sums = (*(first[:, :, part] for part in range(parts)), down)
        return sums if made.mlp.weight_bits == 4 else tuple(s[..., 0] for s in sums)

    def linear_sums(self, x: Array, product: Product, stream: Array) -> Array:
        """The same of one linear call."""
        op, size = Op.LINEAR_BIAS if product.bias else Op.LINEAR, product.channels * product.sums
        request = (product.inputs, product.channels, product.tile, product.tiles)
        found = np.stack([self._row(row, stream, op, request, size) for row in x])
        sums = found.reshape(self.batch, product.channels, product.sums)
        return sums if product.bits == 4 else sums[..., 0]

    def refuses(self, op: int, request: tuple[int, int, int, int]) -> bool:
        """Whether the engine refuses a linear of these inputs, channels, tile and tiles, and writes nothing."""
        x, sums = np.zeros(400, np.float32), np.full(400, 7, np.int32)
        done = self._sums(_at(x), None, ctypes.c_uint32(op), *request, _at(sums))
        return done == 0 and bool((sums == 7).all())

    def _row(self, x: Array, stream: Array, op: int, request: tuple[int, ...], size: int) -> Array:
        sums, weights, row = np.zeros(size, np.int32), aligned(stream), np.ascontiguousarray(x)
        assert self._sums(_at(row), _at(weights), ctypes.c_uint32(op), *request, _at(sums)) == 1
        return sums


def _at(array: Array) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)
