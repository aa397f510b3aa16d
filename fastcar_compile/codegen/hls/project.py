"""Write the HLS project of a design: headers, tops, test benches, Makefile and Vitis configurations."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import astuple, replace
from importlib.resources import files
from pathlib import Path
from typing import TypeVar

from fastcar_compile.codegen.hls.control_table.table import DrsTable, Status
from fastcar_compile.codegen.hls.controller_project import emit_drs, limits_of, table_of_sizes
from fastcar_compile.codegen.hls.design.design import Design
from fastcar_compile.codegen.hls.design.loops import total_latency
from fastcar_compile.codegen.hls.design.product import Product
from fastcar_compile.codegen.hls.design.step_usage import StepDesign
from fastcar_compile.codegen.hls.design.usage import FIFO_WORDS
from fastcar_compile.codegen.hls.interface import KernelInterface, kernel_interface, weight_ports
from fastcar_compile.codegen.hls.render import TEMPLATES, Bench, Benches, probe_files, render, vitis_files
from fastcar_compile.codegen.hls.step_program.builder import (
    AttentionForm,
    LinearForm,
    ReplayForm,
    ShortForm,
    StepForm,
    build_short,
    build_step,
)
from fastcar_compile.codegen.hls.step_program.program import StepOp, StepProgram, StepStatus
from fastcar_compile.codegen.hls.step_sample import Golden, sample_program
from fastcar_compile.config.targets import Target
from fastcar_compile.errors import CompileError, UserError

T = TypeVar("T")

HEAD = "head"
"""Name of the linear call behind the layers."""

SOURCES = ("fastcar_config.hpp", "fastcar_step_config.hpp", "fastcar_step.hpp", "fastcar_step.cpp")
"""What depends on the design."""


def short_program(design: Design, table: DrsTable, units: Sequence[int] = ()) -> StepProgram:
    """Return the short programs of a design: its MLPs, its linears, and the decisions of the layers that the table gates.

    Args:
        units: of the gated layers' networks; (): as many as the table's for each, if it has any.
    """
    gated = tuple(layer for layer, factor in enumerate(table.factors) if factor != 0)
    return build_short(
        ShortForm(
            layers=design.mlp.layers,
            rows=design.mlp.batch,
            ports=design.ports,
            hidden=design.mlp.hidden,
            mlp_words=design.section_words,
            linears=tuple(linear_form(product) for product in design.linears.values()),
            gated=gated,
            query_words=table.query_words,
            key_words=table.key_words,
            units=tuple(units) or ((table.units,) * len(gated) if table.units else ()),
        )
    )


def step_program(
    design: Design, attention: AttentionForm, epsilon: float, replay: ReplayForm | None, head: str = HEAD
) -> StepProgram:
    """Return the step program of a decoder whose layers are alike, on a design that has its linears.

    Args:
        epsilon: of the norms. replay: of MLPs; None: there is none. head: name of the last linear.

    Raises:
        CompileError: what a step program cannot express.
    """
    linears = design.linears

    def of_layers(place: str) -> LinearForm:
        return only(
            {linear_form(linears[f"layer_{n}.{place}"]) for n in range(design.mlp.layers)}, f"the linears {place}"
        )

    form = StepForm(
        layers=design.mlp.layers,
        rows=design.mlp.batch,
        ports=design.ports,
        hidden=design.mlp.hidden,
        epsilon=epsilon,
        attention=attention,
        qkv=of_layers("qkv"),
        o=of_layers("o"),
        mlp_words=design.section_words,
        head=linear_form(linears[head]),
        replay=replay,
    )
    try:
        return build_step(form)
    except UserError as error:
        raise refusal(error.what) from error


def refusal(reason: str) -> CompileError:
    """Return that a decoder has no step program."""
    return CompileError(reason, hint='use offload="linears"')


def only(found: set[T], what: str) -> T:
    """Return the one element.

    Raises:
        CompileError: there are several, which a step program cannot express.
    """
    if len(found) != 1:
        raise refusal(f"no step program: {what} differ: {', '.join(sorted(map(str, found)))}")
    return next(iter(found))


def linear_form(product: Product) -> LinearForm:
    """Return a product as a step program has it."""
    words = product.section_words
    return LinearForm(product.inputs, product.channels, product.tile, product.tiles, words, bias=product.bias)


def emit_hls(
    design: Design,
    out_dir: Path,
    table: DrsTable | None = None,
    board: Target | None = None,
    step: StepDesign | None = None,
) -> list[Path]:
    """Write the project into `out_dir` (made if needed); return the files, sorted. Same arguments, same bytes.

    Args:
        design: of the array. table: the DRS control table that the controller has to hold; None: one of the design's sizes.
        board: whose memory the kernels are connected to; None: v++ chooses.
        step: what the kernel executes; None: the design's short programs.
    """
    out_dir.mkdir(parents=True, exist_ok=True)
    table = table or table_of_sizes(design)
    step = step or StepDesign.of(short_program(design, table))
    kernel = kernel_interface(design, step, table)
    weights, caches = (
        [port for port in kernel.ports if port.name.startswith(prefix)] for prefix in ("weights_", "cache_")
    )
    values = {"design": design, "step": step, "kernel": kernel, "weights": weights, "caches": caches}
    values |= {"fifo_words": FIFO_WORDS // design.axi_words, "total_turns": total_latency(design.budget.clock_mhz)}
    texts = {name: render(name, **values) for name in SOURCES}
    texts[STEP_BENCH] = step_bench(design, step, table, kernel)
    controller = emit_drs(table, replace(limits_of(table), instructions=step.instructions))
    texts |= controller.texts
    benches = Benches([Bench(kernel, STEP_BENCH)], [Bench(controller.kernel, "drs_testbench.cpp")])
    texts |= vitis_files(design.budget.part, design.budget.clock_mhz, benches, board)
    texts |= probe_files(design, board)
    texts |= {p.name: p.read_text() for p in files(TEMPLATES).iterdir() if p.name.endswith((".hpp", ".cpp"))}
    return [_write(out_dir / name, text) for name, text in sorted(texts.items())]


def _write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


# The test bench of the kernel.


STEP_BENCH = "step_testbench.cpp"


def step_bench(design: Design, step: StepDesign, table: DrsTable, kernel: KernelInterface) -> str:
    """Return the text of the test bench: a layer of the decoder and its head with drawn weights, and their outputs."""
    program = sample_program(step.program, design)
    data, golden = program.to_bytes(table), Golden(program, design)
    return render(
        STEP_BENCH,
        step=step,
        kernel=kernel,
        ports=len(weight_ports(design)),
        sizes=program.sizes,
        words=[f"0x{word:08x}u" for word in struct.unpack(f"<{len(data) // 4}I", data)],
        products=[own.row for own in golden.products],
        launches=[astuple(own) for own in golden.launches],
        golden=[f"0x{word:08x}u" for word in golden.outputs],
        operations=StepOp,
        run=StepStatus,
        load=Status,
    )
