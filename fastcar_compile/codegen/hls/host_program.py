"""The C++ host program of an artifact: real headers and mains, one generated header with this decoder's sizes, a README."""

from importlib.resources import files

import numpy as np

from fastcar_compile.artifact.accelerator_section import AcceleratorSection
from fastcar_compile.artifact.layout import CONSTANTS, FUNCTIONS, HOST_SOURCES, README, weight_file
from fastcar_compile.artifact.manifest import SCHEMA_VERSION
from fastcar_compile.artifact.sections import BoardPart, HostSection
from fastcar_compile.codegen.emit import EmitContext
from fastcar_compile.codegen.hls.control_table.table import TableStatus
from fastcar_compile.codegen.hls.design.design import Design
from fastcar_compile.codegen.hls.interface import TYPE_BYTES, probe_interface
from fastcar_compile.codegen.hls.project import format_header
from fastcar_compile.codegen.hls.render import render
from fastcar_compile.codegen.hls.step_program.program import StepStatus
from fastcar_compile.config.formats import DTYPES
from fastcar_compile.config.targets import Target
from fastcar_compile.gates.registry import GateKind
from fastcar_compile.ir.program import DecoderProgram, StateSpec
from fastcar_compile.ir.types import REPLAY_ROLES
from fastcar_compile.ir.weights import dtype_name
from fastcar_compile.support.packages import TEMPLATES

BOARD_SOURCES = ("fastcar_accelerator.hpp", "fastcar_probe.cpp", "fastcar_xrt.hpp", "fastcar_board.ipynb")
SHORT_SOURCES = ("fastcar_offload.hpp",)
STEP_SOURCES = ("fastcar_step_decoder.hpp",)
"""Files for an accelerator: any; one that is called in every layer; one that runs whole steps."""

_COMPUTES = {"mlp": "the MLPs", "linears": "the MLPs, projections and head", "all": "every layer and the head"}
_STATUSES = {"TABLE_STATUSES": TableStatus, "RUN_STATUSES": StepStatus}


class HostProgramEmitter:
    """Writes the C++ host program of an FPGA target, and the artifact's README. The manifest has no section for them."""

    def emit(self, program: DecoderProgram, context: EmitContext) -> None:
        """Write the sources; see Emitter.emit."""
        host = context.section(HostSection)
        if host is None or host.board is None:
            return
        accelerator = context.section(AcceleratorSection)
        for name, text in host_sources(program, host.board, context.plan.board, accelerator).items():
            context.writer.write_text(f"{HOST_SOURCES}/{name}", text)
        text = render(
            "README.md",
            config=program.config,
            quant=context.plan.config.quant,
            computes=_COMPUTES[context.plan.config.offload],
            part=context.plan.board.part,
            target=context.plan.board,
            board=host.board,
            accelerator=accelerator,
        )
        context.writer.write_text(README, text)


def host_sources(
    program: DecoderProgram, board: BoardPart, target: Target, accelerator: AcceleratorSection | None
) -> dict[str, str]:
    """Return the texts of the host program by file name.

    Args:
        board: the manifest's `host.board`. target: that it is of.
        accelerator: the manifest's section; None: no program for it is written.

    Returns:
        Everything that does not depend on the model, and `fastcar_program.hpp`. Same program, same texts.
    """
    templates = files(TEMPLATES) / "host"
    unused = _unused(accelerator)
    every = (".hpp", ".cpp", ".ipynb")
    names = [p.name for p in templates.iterdir() if p.name.endswith(every) and p.name not in unused]
    texts = {name: (templates / name).read_text() for name in names}
    texts["Makefile"] = render("host/Makefile", accelerator=accelerator is not None)
    if accelerator is not None:
        texts["fastcar_board.cpp"] = render("host/fastcar_board.cpp", step=accelerator.step)
        texts["fastcar_kernels.hpp"] = _kernels(target, accelerator)
        texts["fastcar_format.hpp"] = format_header()
    texts["fastcar_program.hpp"] = render(
        "host/fastcar_program.hpp",
        manifest_schema=SCHEMA_VERSION,
        config=program.config,
        library=board.programs.library,
        programs=board.programs.named(),
        functions=tuple(FUNCTIONS.values()) if board.programs.offload is not None else (),
        weights=weight_file(),
        thresholds=[_float(s.threshold) for s in program.sites],
        state=[_state(s) for s in program.state],
    )
    return dict(sorted(texts.items()))


def _state(spec: StateSpec) -> dict[str, object]:
    """Return what the host has to know of a state tensor."""
    dtype = DTYPES[dtype_name(spec.dtype)].safetensors
    return {"name": spec.name, "dtype": dtype, "shape": spec.shape, "replay": spec.role in REPLAY_ROLES}


def _unused(accelerator: AcceleratorSection | None) -> tuple[str, ...]:
    """Return the files that a program for this accelerator, or for none, has no part of."""
    if accelerator is None:
        return BOARD_SOURCES + SHORT_SOURCES + STEP_SOURCES
    return STEP_SOURCES if accelerator.step is None else SHORT_SOURCES


def _kernels(target: Target, accelerator: AcceleratorSection) -> str:
    """Return the kernels, the probe, and what the host calls the kernels with."""
    step, kernels = accelerator.step, dict(zip(("kernel", "engine"), accelerator.kernels, strict=False))
    probe = probe_interface(Design.of(accelerator.design))
    return render(
        "host/fastcar_kernels.hpp",
        kernels=kernels,
        roles={**kernels, "probe": probe.part},
        probe=probe.part,
        probe_word_bytes=TYPE_BYTES[probe.ports[0].ctype],
        weights=accelerator.weights,
        table=accelerator.table,
        gated=accelerator.controller.gated_layers,
        at_most=GateKind[accelerator.controller.gate.upper()].at_most,
        shared_memory=target.shares_memory,
        linears=[call.name for call in accelerator.linears] if step is None else [],
        step=step,
        statuses=_STATUSES,
        constants=CONSTANTS,
        functions=FUNCTIONS if step is None else {},
    )


def _float(threshold: float | None) -> str:
    """Return a float32 in C++, exactly; None is +inf."""
    value = float("inf") if threshold is None else float(np.float32(threshold))
    if np.isinf(value):
        return "INFINITY" if value > 0 else "-INFINITY"
    # A hexadecimal float is exact: no decimal rounding lies between the artifact and the host program.
    return f"{value.hex()}f"
