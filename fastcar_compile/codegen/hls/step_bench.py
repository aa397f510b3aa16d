"""The test bench of the kernel of whole decode steps."""

from __future__ import annotations

import struct

from fastcar_compile.codegen.hls.design.design import Design
from fastcar_compile.codegen.hls.design.step import StepDesign
from fastcar_compile.codegen.hls.interface import KernelInterface, weight_ports
from fastcar_compile.codegen.hls.render import render
from fastcar_compile.codegen.hls.step_sample import sample_program
from fastcar_compile.step.program import Status, StepOp, StepStatus

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
