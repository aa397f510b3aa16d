"""Write the HLS project of a design: headers, tops, test bench, Makefile and Vitis configurations."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from fastcar_compile.codegen.board.vitis import Bench, vitis_files
from fastcar_compile.codegen.drs.table import DrsTable, Limits
from fastcar_compile.codegen.hls.design import MlpDesign
from fastcar_compile.codegen.hls.emit_drs import drs_kernel, emit_drs, limits_of, table_of_sizes
from fastcar_compile.codegen.hls.interface import KernelInterface, mlp_interface
from fastcar_compile.codegen.hls.render import TEMPLATES
from fastcar_compile.codegen.hls.render import render as _render


def emit_hls(
    design: MlpDesign, out_dir: Path, table: DrsTable | None = None, limits: Limits | None = None
) -> list[Path]:
    """Write the project into `out_dir` (made if needed); returns the files, sorted. Same arguments, same bytes.

    Args:
        table: the DRS control table that the controller has to hold; None: one of the design's sizes.
        limits: what the controller can hold; None: what the table needs.
    """
    out_dir.mkdir(parents=True, exist_ok=True)
    table = table or table_of_sizes(design)
    mlp, drs = kernel_interfaces(design, table)
    texts = {
        "fastcar_config.hpp": _render("fastcar_config.hpp", design=design),
        "fastcar_mlp.hpp": _render("fastcar_mlp.hpp", kernel=mlp),
        "fastcar_mlp.cpp": _render("fastcar_mlp.cpp", design=design, kernel=mlp),
        "csim_entry.cpp": _render("csim_entry.cpp", design=design),
        "testbench.cpp": _render("testbench.cpp", design=design),
        **emit_drs(table, limits or limits_of(table)).texts,
    }
    benches = [Bench(mlp, "testbench.cpp"), Bench(drs, "drs_testbench.cpp")]
    texts |= vitis_files(design.budget.part, design.budget.clock_mhz, benches)
    texts |= {path.name: path.read_text() for path in files(TEMPLATES).iterdir() if path.name.endswith(".hpp")}
    return [_write(out_dir / name, text) for name, text in sorted(texts.items())]


def kernel_interfaces(design: MlpDesign, table: DrsTable) -> list[KernelInterface]:
    """Every kernel of the design: MLP, then TAS unit and DRS controller for tables of this size."""
    return [mlp_interface(design), drs_kernel(table)]


def _write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path
