"""A design in C simulation: the kernel's MLP and linears on whole weight streams."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from fastcar_compile.artifact.accelerator_section import KernelPart
from fastcar_compile.artifact.engine import EngineProduct
from fastcar_compile.codegen.hls.control_table.table import pack_rows
from fastcar_compile.codegen.hls.design.design import Design
from fastcar_compile.codegen.hls.design.step_usage import StepDesign
from fastcar_compile.codegen.hls.interface import kernel_interface
from fastcar_compile.codegen.hls.project import emit_hls, table_of_sizes
from fastcar_compile.codegen.hls.step_program.builder import short_program
from fastcar_compile.codegen.hls.step_program.cache_layout import ALL_ROWS
from fastcar_compile.runtime.backends.accelerator.calls import ComputeUnit
from fastcar_compile.runtime.backends.accelerator.kernel import Kernel
from fastcar_compile.runtime.backends.hls_csim import CsimUnit, open_library
from hls.library import Array
from hls.sources import folder_sources

NULL = SimpleNamespace(ctypes=SimpleNamespace(data=None))
"""A buffer at address 0."""

ROOM = 1 << 22


class OneCall(Kernel):
    """A kernel whose program is one call of the MLP or of any linear, and whose weights are its stream."""

    def _bytes(self, tensors: Mapping[str, Array], name: str) -> Array:
        return tensors[name]


class Simulation:
    """The kernel of `made` in a loaded library."""

    def __init__(self, library: ctypes.CDLL, made: Design) -> None:
        self.design, self.batch, self.hidden = made, made.mlp.batch, made.mlp.hidden
        table = table_of_sizes(made)
        kernel = kernel_interface(made, StepDesign.of(short_program(made, table)), table).part
        # Room for any linear, not only those of the design.
        arguments = (a if a.kind == "scalar" else a.model_copy(update={"bytes": ROOM}) for a in kernel.arguments)
        self.unit: ComputeUnit = CsimUnit(library, KernelPart(name=kernel.name, arguments=tuple(arguments)))

    @classmethod
    def build(cls, made: Design, folder: Path, libraries: Path) -> Simulation:
        """Emit the project into `folder` and build it."""
        emit_hls(made, folder)
        return cls(open_library(folder_sources(folder), libraries), made)

    def table(self, product: EngineProduct | None = None) -> bytes:
        """A table whose program is the MLP, or this linear."""
        mlp, linears = (
            replace(self.design.mlp, layers=int(product is None)),
            {} if product is None else {"any": product},
        )
        return short_program(replace(self.design, mlp=mlp, linears=linears)).to_bytes(table_of_sizes(self.design))

    def kernel(self, stream: Array, product: EngineProduct | None = None) -> Kernel:
        """The kernel with one call and its weights."""
        names = self.unit.kernel.weights()
        parts = stream.reshape(len(names), -1)
        return OneCall(self.unit, self.table(product), dict(zip(names, parts, strict=True)))

    def mlp(self, x: Array, active: int, cached: Array, stream: Array) -> Array:
        """As Kernel.mlp."""
        return self.kernel(stream).mlp(0, x, active, cached)

    def linear(
        self, x: Array, product: EngineProduct, stream: Array, rows: int = ALL_ROWS, y: Array | None = None
    ) -> Array:
        """As Kernel.linear; rows that are not computed keep what `y` (zeros) holds."""
        before = np.zeros((self.batch, product.channels), np.float32) if y is None else y
        kernel = self.kernel(stream, product)
        self.unit.write("outputs", pack_rows(before).view(np.uint8).reshape(-1))
        return kernel.linear(0, x, rows)


def rows(library: Simulation, width: int, rng: np.random.Generator, exponent: float = 0.0) -> Array:
    """float32 [B, width] around 10 ** exponent."""
    return (rng.normal(size=(library.batch, width)) * 10.0**exponent).astype(np.float32)
