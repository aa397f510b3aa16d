"""Write the HLS project of a design: headers, tops, test benches, Makefile and Vitis configurations."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from fastcar_compile.codegen.hls.controller_project import control_sizes, emit_drs, limits_of, table_of_sizes
from fastcar_compile.codegen.hls.design.design import Design
from fastcar_compile.codegen.hls.design.usage import FIFO_WORDS
from fastcar_compile.codegen.hls.interface import KernelInterface, engine_interface
from fastcar_compile.codegen.hls.probe_project import probe_files
from fastcar_compile.codegen.hls.render import TEMPLATES, render
from fastcar_compile.codegen.hls.vitis import Bench, Benches, vitis_files
from fastcar_compile.drs.table import DrsTable
from fastcar_compile.targets import Target

SOURCES = ("fastcar_config.hpp", "fastcar_engine.hpp", "fastcar_engine.cpp", "engine_testbench.cpp")
"""What depends on the design of the engine."""


def emit_hls(
    design: Design,
    out_dir: Path,
    table: DrsTable | None = None,
    board: Target | None = None,
) -> list[Path]:
    """Write the project into `out_dir` (made if needed); return the files, sorted. Same arguments, same bytes.

    Args:
        table: the DRS control table that the controller has to hold; None: one of the design's sizes.
        board: whose memory the kernels are connected to; None: v++ chooses.
    """
    out_dir.mkdir(parents=True, exist_ok=True)
    table = table or table_of_sizes(design)
    (engine,) = kernel_interfaces(design, table)
    fifo_words = FIFO_WORDS // design.axi_words
    texts = {name: render(name, design=design, kernel=engine, fifo_words=fifo_words) for name in SOURCES}
    controller = emit_drs(table, limits_of(table))
    texts |= controller.texts
    benches = Benches([Bench(engine, "engine_testbench.cpp")], [Bench(controller.kernel, "drs_testbench.cpp")])
    texts |= vitis_files(design.budget.part, design.budget.clock_mhz, benches, board)
    texts |= probe_files(design, board)
    texts |= {p.name: p.read_text() for p in files(TEMPLATES).iterdir() if p.name.endswith((".hpp", ".cpp"))}
    return [_write(out_dir / name, text) for name, text in sorted(texts.items())]


def kernel_interfaces(design: Design, table: DrsTable) -> list[KernelInterface]:
    """Return the kernels that a host calls: the engine with its TAS unit and controller for tables of this size."""
    return [engine_interface(design, control_sizes(table))]


def _write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path
