"""A design in C simulation: the kernel's MLP and linears on whole weight streams, and the exact sums."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from fastcar_compile.artifact.accelerator_section import KernelPart
from fastcar_compile.codegen.hls.design.design import Design
from fastcar_compile.codegen.hls.design.product import Product
from fastcar_compile.codegen.hls.design.step_usage import StepDesign
from fastcar_compile.codegen.hls.interface import kernel_interface
from fastcar_compile.codegen.hls.project import emit_hls, table_of_sizes
from fastcar_compile.codegen.hls.step_program.builder import short_program
from fastcar_compile.codegen.hls.step_program.rows import ALL_ROWS
from fastcar_compile.runtime.backends.accelerator.calls import ComputeUnit
from fastcar_compile.runtime.backends.accelerator.kernel import Kernel, padded_rows
from fastcar_compile.runtime.backends.hls_csim import CsimUnit, aligned, open_library
from hls.library import Array
from hls.sources import folder_sources

NULL = SimpleNamespace(ctypes=SimpleNamespace(data=None))
"""A buffer at address 0."""

ROOM = 1 << 22
MLP, LINEAR, LINEAR_BIAS = range(3)
"""What fastcar_csim_sums is asked for."""


class OneCall(Kernel):
    """A kernel whose program is one call of the MLP or of any linear, and whose weights are its stream."""

    def _bytes(self, tensors: Mapping[str, Array], name: str) -> Array:
        return tensors[name]


class Simulation:
    """The kernel of `made` in a loaded library.

    Args:
        suffix: of the names of its functions there.
    """

    def __init__(self, library: ctypes.CDLL, made: Design, suffix: str = "") -> None:
        self.design, self.batch, self.hidden = made, made.mlp.batch, made.mlp.hidden
        table = table_of_sizes(made)
        kernel = kernel_interface(made, StepDesign.of(short_program(made, table)), table).part
        # Room for any linear, not only those of the design.
        arguments = (a if a.kind == "scalar" else a.model_copy(update={"bytes": ROOM}) for a in kernel.arguments)
        self.unit: ComputeUnit = CsimUnit(library, KernelPart(name=kernel.name + suffix, arguments=tuple(arguments)))
        self._sums = getattr(library, f"fastcar_csim_sums{suffix}")

    @classmethod
    def build(cls, made: Design, folder: Path, libraries: Path) -> Simulation:
        """Emit the project into `folder` and build it."""
        emit_hls(made, folder)
        return cls(open_library(folder_sources(folder), libraries), made)

    def table(self, product: Product | None = None) -> bytes:
        """A table whose program is the MLP, or this linear."""
        mlp, linears = (
            replace(self.design.mlp, layers=int(product is None)),
            {} if product is None else {"any": product},
        )
        return short_program(replace(self.design, mlp=mlp, linears=linears)).to_bytes(table_of_sizes(self.design))

    def kernel(self, stream: Array, product: Product | None = None) -> Kernel:
        """The kernel with one call and its weights."""
        names = self.unit.kernel.weights()
        parts = stream.reshape(len(names), -1)
        return OneCall(self.unit, self.table(product), dict(zip(names, parts, strict=True)))

    def mlp(self, x: Array, active: int, cached: Array, stream: Array) -> Array:
        """As Kernel.mlp."""
        return self.kernel(stream).mlp(0, x, active, cached)

    def linear(self, x: Array, product: Product, stream: Array, rows: int = ALL_ROWS, y: Array | None = None) -> Array:
        """As Kernel.linear; rows that are not computed keep what `y` (zeros) holds."""
        before = np.zeros((self.batch, product.channels), np.float32) if y is None else y
        kernel = self.kernel(stream, product)
        self.unit.write("outputs", padded_rows(before))
        return kernel.linear(0, x, rows)

    def mlp_sums(self, x: Array, stream: Array) -> tuple[Array, ...]:
        """The exact sums of every row, from the kernel's own functions.

        Returns:
            Per linear, in the order of `pack_mlp`: int32 [B, N]; for w4a8 int32 [B, N, groups].
        """
        made, parts = self.design, 2 if self.design.mlp.gated else 1
        sizes = [p.channels * p.sums for p in (made.gate_up, made.down)]
        found = np.stack([self._row(row, stream, MLP, (0, 0, 0, 0), sum(sizes)) for row in x])
        first = found[:, : sizes[0]].reshape(self.batch, -1, parts, made.gate_up.sums)
        down = found[:, sizes[0] :].reshape(self.batch, -1, made.down.sums)
        sums = (*(first[:, :, part] for part in range(parts)), down)
        return sums if made.mlp.weight_bits == 4 else tuple(s[..., 0] for s in sums)

    def linear_sums(self, x: Array, product: Product, stream: Array) -> Array:
        """The same of one linear call."""
        op, size = LINEAR_BIAS if product.bias else LINEAR, product.channels * product.sums
        request = (product.inputs, product.channels, product.tile, product.tiles)
        found = np.stack([self._row(row, stream, op, request, size) for row in x])
        sums = found.reshape(self.batch, product.channels, product.sums)
        return sums if product.bits == 4 else sums[..., 0]

    def refuses(self, op: int, request: tuple[int, int, int, int]) -> bool:
        """Whether the array refuses a linear of these inputs, channels, tile and tiles, and writes nothing."""
        x, sums = np.zeros(400, np.float32), np.full(400, 7, np.int32)
        done = self._sums(_at(x), None, ctypes.c_uint32(op), *request, _at(sums))
        return done == 0 and bool((sums == 7).all())

    def _row(self, x: Array, stream: Array, op: int, request: tuple[int, ...], size: int) -> Array:
        sums, weights, row = np.zeros(size, np.int32), aligned(stream), np.ascontiguousarray(x)
        assert self._sums(_at(row), _at(weights), ctypes.c_uint32(op), *request, _at(sums)) == 1
        return sums


def rows(library: Simulation, width: int, rng: np.random.Generator, exponent: float = 0.0) -> Array:
    """float32 [B, width] around 10 ** exponent."""
    return (rng.normal(size=(library.batch, width)) * 10.0**exponent).astype(np.float32)


def _at(array: Array) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)
