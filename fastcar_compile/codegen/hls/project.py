"""Write the HLS project of a design: headers, tops, RTL, test benches, Makefile and Vitis configurations."""

import hashlib
import math
import struct
from collections.abc import Callable
from dataclasses import astuple, replace
from importlib.resources import files
from itertools import pairwise
from pathlib import Path
from typing import Any

from fastcar_compile.codegen.hls.control_table.builder import build_table
from fastcar_compile.codegen.hls.control_table.table import AttentionShape, DrsTable, TableStatus
from fastcar_compile.codegen.hls.design.design import Design
from fastcar_compile.codegen.hls.design.loops import total_latency
from fastcar_compile.codegen.hls.design.spec import ACTIVATIONS
from fastcar_compile.codegen.hls.design.step_loops import TOTAL_INTERVAL, key_interval, soften_interval, value_interval
from fastcar_compile.codegen.hls.design.step_usage import StepDesign
from fastcar_compile.codegen.hls.design.usage import FIFO_WORDS, STEP_FIFO_WORDS
from fastcar_compile.codegen.hls.interface import KernelInterface, engine_interface, kernel_interfaces
from fastcar_compile.codegen.hls.render import probe_files, render, vitis_files
from fastcar_compile.codegen.hls.step_golden import Golden
from fastcar_compile.codegen.hls.step_program.builder import short_program
from fastcar_compile.codegen.hls.step_program.program import StepOp, StepStatus, cpp_checks, cpp_format
from fastcar_compile.codegen.hls.step_sample import sample_program
from fastcar_compile.config.targets import Target
from fastcar_compile.ir.exact import EXP_TABLE
from fastcar_compile.ir.ops.linear import FACTORS, factor_table
from fastcar_compile.support.packages import TEMPLATES

SOURCES = ("fastcar_config.hpp", "fastcar_step_config.hpp", "fastcar_step.hpp", "fastcar_step.cpp")
"""What depends on the design."""

ENGINE_SOURCE = "fastcar_engine.cpp"
"""The engine in C simulation, where it is a kernel of its own."""

RTL, RTL_CONFIGURED = "rtl", ("fastcar_rtl_config.svh", "fastcar_engine.v")
"""Folder of the RTL, and those of its files that depend on the design."""


def emit_hls(
    design: Design,
    out_dir: Path,
    table: DrsTable | None = None,
    board: Target | None = None,
    step: StepDesign | None = None,
    made: Callable[[str, object, Callable[[Path], Any]], Any] | None = None,
) -> list[Path]:
    """Write the project into `out_dir` (made if needed); return the files, sorted. Same arguments, same bytes.

    Args:
        design: of the array. table: the DRS control table that the controller has to hold; None: one of the design's sizes.
        board: whose memory the kernels are connected to; None: v++ chooses.
        step: what the kernel executes; None: the design's short programs.
        made: takes the name of the kernel's test bench, what decides its bytes, and what writes it to a path; it may write it as
            an earlier build made it. None: it is made anew.
    """
    out_dir.mkdir(parents=True, exist_ok=True)
    table = table or table_of_sizes(design)
    step = step or StepDesign.of(short_program(design, table))
    kernels = kernel_interfaces(design, step, table)
    kernel, engine = kernels[0], next(iter(kernels[1:]), None)
    of_ports = {name: [p for p in kernel.ports if p.name.startswith(name)] for name in ("weights_", "cache_")}
    values = {
        "design": design,
        "step": step,
        "kernel": kernel,
        "engine": engine,
        "weights": of_ports["weights_"] or kernel.streams(),
        "caches": of_ports["cache_"],
    }
    fifos = {"fifo_words": FIFO_WORDS, "step_fifo_words": design.step_fifo_words, "rtl_fifo_words": STEP_FIFO_WORDS}
    values |= {name: words // design.axi_words for name, words in fifos.items()}
    values |= {"key_interval": key_interval(step.blocks, design.ports), "value_interval": value_interval(design.ports)}
    values["soften_interval"] = soften_interval(step.blocks, design.ports, step.group * step.share)
    turns = math.ceil(total_latency(design.budget.clock_mhz) / TOTAL_INTERVAL)
    values |= {"total_interval": TOTAL_INTERVAL, "total_turns": turns}
    texts = {name: render(name, **values) for name in (*SOURCES, *([] if engine is None else [ENGINE_SOURCE]))}
    texts |= generated_headers()
    limits = replace(table.limits, instructions=step.instructions)
    texts["fastcar_drs_config.hpp"] = render("fastcar_drs_config.hpp", limits=limits)
    texts |= vitis_files(design.budget.part, design.budget.clock_mhz, kernels, board)
    texts |= probe_files(design, board)
    texts |= {p.name: p.read_text() for p in files(TEMPLATES).iterdir() if p.name.endswith((".hpp", ".cpp", ".tcl"))}
    texts |= rtl_sources(values | {"engine": engine_interface(design, step)})
    for name, text in texts.items():
        (out_dir / name).parent.mkdir(exist_ok=True)
        (out_dir / name).write_text(text)

    def bench(path: Path) -> None:
        path.write_text(step_bench(design, step, table, kernel, engine))

    if made is None:
        bench(out_dir / kernel.bench)
    else:
        made(kernel.bench, bench_inputs(design, step, table, kernel), bench)
    return sorted(out_dir / name for name in (*texts, kernel.bench))


def rtl_sources(values: dict[str, Any]) -> dict[str, str]:
    """Return the RTL of linears and MLPs by file name, with the sizes of a design and its ports."""
    found = {p.name: p.read_text() for p in (files(TEMPLATES) / RTL).iterdir() if p.name.endswith(".sv")}
    values = values | activation_knots(values["design"].mlp.activation)
    found |= {name: render(f"{RTL}/{name}", **values) for name in RTL_CONFIGURED}
    return {f"{RTL}/{name}": text for name, text in found.items()}


def activation_knots(activation: str) -> dict[str, Any]:
    """Return the 512 words of an activation's memory, the last one first, and the logarithm of its range; no words for ReLU."""
    if activation not in FACTORS:
        return {"knots": [], "limit_bits": 0}
    knots = factor_table(activation).tolist()
    words = [low + ((high - low) % (1 << 19) << 25) for low, high in pairwise(knots)]
    return {"knots": words[::-1], "limit_bits": int(math.log2(FACTORS[activation].limit))}


def format_header() -> str:
    """Return the header with the numbers of the control table and its program."""
    return render("fastcar_format.hpp", spaces=cpp_format())


def generated_headers() -> dict[str, str]:
    """Return the headers that say what Python defines: the numbers of the control table and its program, and tables."""
    factors = {name: (int(table.limit), factor_table(name).tolist()) for name, table in FACTORS.items()}
    tables = render("fastcar_tables.hpp", activations=ACTIVATIONS, factors=factors, powers=EXP_TABLE.tolist())
    program = render("fastcar_step_program.hpp", **cpp_checks())
    return {"fastcar_format.hpp": format_header(), "fastcar_tables.hpp": tables, "fastcar_step_program.hpp": program}


# The test bench of the kernel.


def bench_inputs(design: Design, step: StepDesign, table: DrsTable, kernel: KernelInterface) -> list[str]:
    """Return what decides the bytes of the test bench. Its golden values take seconds; thresholds are its own."""
    program = sample_program(step.program, design)
    data = program.to_bytes(table.with_thresholds([0.0] * table.layers))
    return [repr(design), repr(kernel), repr(program.sizes), hashlib.sha256(data).hexdigest()]


def step_bench(
    design: Design,
    step: StepDesign,
    table: DrsTable,
    kernel: KernelInterface,
    engine: KernelInterface | None = None,
) -> str:
    """Return the text of the test bench: a layer of the decoder and its head with drawn weights, and their outputs."""
    program = sample_program(step.program, design)
    golden = Golden(program, design, table)
    data = program.to_bytes(golden.table)
    return render(
        kernel.bench,
        step=step,
        kernel=kernel,
        engine=engine,
        ports=design.axi_weight_ports,
        sizes=program.sizes,
        words=[f"0x{word:08x}u" for word in struct.unpack(f"<{len(data) // 4}I", data)],
        products=[own.row for own in golden.products],
        launches=[astuple(own) for own in golden.launches],
        golden=[f"0x{word:08x}u" for word in golden.outputs],
        decide=golden.decide,
        network=golden.decide if golden.decide and golden.decide.units else None,
        network_exponent=golden.network_exponent,
        operations=StepOp,
        run=StepStatus,
        load=TableStatus,
    )


def table_of_sizes(design: Design) -> DrsTable:
    """Return a table of the design's sizes for a decoder of which nothing else is known: one head of the MLP's width."""
    spec = design.mlp
    shape = AttentionShape(1, 1, spec.hidden)
    zeros = [0.0] * spec.layers
    return build_table(spec.layers, spec.batch, spec.cores, 1, zeros, attention=shape, scales=[1.0] * spec.layers)
