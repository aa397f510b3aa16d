"""Write the HLS project of a design: headers, tops, test benches, Makefile and Vitis configurations."""

from __future__ import annotations

import struct
from importlib.resources import files
from pathlib import Path

from fastcar_compile.codegen.hls.control_table.table import DrsTable
from fastcar_compile.codegen.hls.controller_project import control_sizes, emit_drs, limits_of, table_of_sizes
from fastcar_compile.codegen.hls.design.design import Design
from fastcar_compile.codegen.hls.design.loops import total_latency
from fastcar_compile.codegen.hls.design.step_usage import StepDesign
from fastcar_compile.codegen.hls.design.usage import FIFO_WORDS
from fastcar_compile.codegen.hls.interface import KernelInterface, engine_interface, step_interface, weight_ports
from fastcar_compile.codegen.hls.render import TEMPLATES, Bench, Benches, probe_files, render, vitis_files
from fastcar_compile.codegen.hls.step_program.program import Status, StepOp, StepStatus
from fastcar_compile.codegen.hls.step_sample import sample_program
from fastcar_compile.config.targets import Target

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


# The HLS project of a kernel of whole decode steps.


STEP_SOURCES = ("fastcar_config.hpp", "fastcar_step_config.hpp", "fastcar_step.hpp", "fastcar_step.cpp")
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
    texts = {name: render(name, **values) for name in STEP_SOURCES}
    texts[STEP_BENCH] = step_bench(design, step, kernel)
    controller = emit_drs(table, limits_of(table))
    texts |= controller.texts
    benches = Benches([Bench(kernel, STEP_BENCH)], [Bench(controller.kernel, "drs_testbench.cpp")])
    texts |= vitis_files(design.budget.part, design.budget.clock_mhz, benches, board)
    texts |= probe_files(design, board)
    texts |= {p.name: p.read_text() for p in files(TEMPLATES).iterdir() if p.name.endswith((".hpp", ".cpp"))}
    return [_step_project_write(out_dir / name, text) for name, text in sorted(texts.items())]


def _step_project_write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


# The test bench of the kernel of whole decode steps.


STEP_BENCH = "step_testbench.cpp"


def step_bench(design: Design, step: StepDesign, kernel: KernelInterface) -> str:
    """Return the text of the test bench: a layer of the decoder and its head with random weights."""
    program = sample_program(step.program, design)
    data = program.to_bytes()
    return render(
        STEP_BENCH,
        design=design,
        kernel=kernel,
        ports=len(weight_ports(design)),
        sizes=program.sizes,
        instructions=len(program.instructions),
        words=[f"0x{word:08x}u" for word in struct.unpack(f"<{len(data) // 4}I", data)],
        operations=StepOp,
        run=StepStatus,
        load=Status,
    )
