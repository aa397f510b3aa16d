"""The HLS project of a kernel of whole decode steps."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from fastcar_compile.codegen.hls.controller_project import emit_drs, limits_of
from fastcar_compile.codegen.hls.design.design import Design
from fastcar_compile.codegen.hls.design.recurrences import total_latency
from fastcar_compile.codegen.hls.design.step import StepDesign
from fastcar_compile.codegen.hls.design.usage import FIFO_WORDS
from fastcar_compile.codegen.hls.interface import step_interface
from fastcar_compile.codegen.hls.probe_project import probe_files
from fastcar_compile.codegen.hls.render import TEMPLATES, render
from fastcar_compile.codegen.hls.step_bench import STEP_BENCH, step_bench
from fastcar_compile.codegen.hls.vitis import Bench, Benches, vitis_files
from fastcar_compile.drs.table import DrsTable
from fastcar_compile.targets import Target

SOURCES = ("fastcar_config.hpp", "fastcar_step_config.hpp", "fastcar_step.hpp", "fastcar_step.cpp")
"""What depends on the design."""


def emit_step(
    design: Design, step: StepDesign, table: DrsTable, out_dir: Path, board: Target | None = None
) -> list[Path]:
    """Write the project into `out_dir` (made if needed); return the files, sorted. Same arguments, same bytes.

    Args:
        design: of the array. table: the DRS control table that the controller has to hold.
        board: whose memory the kernels are connected to; None: v++ chooses.
    """
    out_dir.mkdir(parents=True, exist_ok=True)
    kernel = step_interface(design, step, table)
    weights, caches = (
        [port for port in kernel.ports if port.name.startswith(prefix)] for prefix in ("weights_", "cache_")
    )
    values = {"design": design, "step": step, "kernel": kernel, "weights": weights, "caches": caches}
    values |= {"fifo_words": FIFO_WORDS // design.axi_words, "total_turns": total_latency(design.budget.clock_mhz)}
    texts = {name: render(name, **values) for name in SOURCES}
    texts[STEP_BENCH] = step_bench(design, step, kernel)
    controller = emit_drs(table, limits_of(table))
    texts |= controller.texts
    benches = Benches([Bench(kernel, STEP_BENCH)], [Bench(controller.kernel, "drs_testbench.cpp")])
    texts |= vitis_files(design.budget.part, design.budget.clock_mhz, benches, board)
    texts |= probe_files(design, board)
    texts |= {p.name: p.read_text() for p in files(TEMPLATES).iterdir() if p.name.endswith((".hpp", ".cpp"))}
    return [_write(out_dir / name, text) for name, text in sorted(texts.items())]


def _write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path
