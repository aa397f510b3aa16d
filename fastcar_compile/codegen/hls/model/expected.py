"""What the model and the sources of an artifact say of its kernel, to compare with what the tools report."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from fastcar_compile.artifact.reader import StoredArtifact
from fastcar_compile.codegen.hls.control_table.reader import read_table
from fastcar_compile.codegen.hls.design.design import Design
from fastcar_compile.codegen.hls.design.exploration import resources_of
from fastcar_compile.codegen.hls.design.loops import Loop, load_loop, quantize_loops, tile_loops
from fastcar_compile.codegen.hls.design.step_loops import AttendWork, VectorWork, attend_loops
from fastcar_compile.codegen.hls.model.workload import design_of, program_of, workload_of
from fastcar_compile.codegen.hls.step_program.instructions import Attend
from fastcar_compile.config.targets import ON_A_BOARD
from fastcar_compile.errors import InputError
from fastcar_compile.support.limits import MIB


@dataclass(frozen=True)
class Expected:
    """A kernel as it should come out.

    Args:
        loops: (function, label) -> the interval of its PIPELINE pragma, and the model's depth in clocks, None: not modelled.
        resources: by name: lut, ff, dsp, bram36, uram; estimates.
    """

    kernel: str
    clock_mhz: float
    loops: dict[tuple[str, str], tuple[int, int | None]]
    resources: dict[str, float]


def expected_of(artifact: StoredArtifact) -> Expected:
    """Return what an artifact's kernel should be.

    Raises:
        InputError: the artifact has no kernel.
    """
    manifest = artifact.manifest
    design, accelerator = design_of(manifest, manifest.target), manifest.accelerator
    if design is None or accelerator is None:
        raise InputError("the artifact has no kernel", where=str(artifact.path), hint=ON_A_BOARD)
    depths = {(loop.process, loop.label): loop.depth for loop in _loops(design, artifact)}
    names = [name for name in manifest.files if re.fullmatch(r"hls/fastcar_\w+\.(?:hpp|cpp)", name)]
    sources = [artifact.files.data(name, MIB).decode("utf-8") for name in names]
    # An interval that depends on the design is a macro.
    macros = {
        name: n for text in sources for name, n in re.findall(r"^#define (FASTCAR_\w+) (\d+)$", text, re.MULTILINE)
    }
    loops = {
        key: (int(macros.get(interval, interval)), depths.get(key))
        for text in sources
        for key, interval in _pragmas(text)
    }
    counted = resources_of(design, workload_of(manifest).kernel_spec(), manifest.target)
    return Expected(
        kernel=accelerator.kernels[0].name,
        clock_mhz=design.budget.clock_mhz,
        loops=loops,
        resources={name: float(entry["used"]) for name, entry in counted.items()},
    )


def _loops(design: Design, artifact: StoredArtifact) -> Iterator[Loop]:
    """Yield the loops of the model that the kernel has."""
    load = design.load()
    for product in design.products:
        yield from tile_loops(product, load).stages
        yield from quantize_loops(product, load)
        yield load_loop(product.inputs, load)
    program, accelerator = program_of(artifact), artifact.manifest.accelerator
    if program is None or accelerator is None:
        return
    rows, table = design.mlp.batch, read_table(artifact.files.data(accelerator.table))
    work = VectorWork(rows, rows, design.ports, design.axi_words, table)
    for instruction in program.instructions:
        for part in instruction.loops(work):
            yield from part.loops
        if isinstance(instruction, Attend):
            queries = instruction.heads // instruction.key_heads
            shape = (rows, instruction.key_heads, queries, design.group or queries, instruction.blocks)
            loops = attend_loops(AttendWork(*shape, design.ports, program.sizes.positions, design.share))
            yield from (*loops.split, *(value for value in vars(loops).values() if isinstance(value, Loop)))


def _pragmas(text: str) -> Iterator[tuple[tuple[str, str], str]]:
    """Yield function and label of every pipelined loop of a source, and its interval."""
    text = re.sub(r"//[^\n]*", "", text)
    opened = [(m.start(), m[1]) for m in re.finditer(r"^(?:\S.*)?\b(\w+)\([^;]{0,2000}?\) \{$", text, re.MULTILINE)]
    for loop in re.finditer(r"\b(\w+):\s*for \([^)]{0,500}\) \{\s*FASTCAR_PIPELINE\((\w+)\)", text):
        function = next((name for start, name in reversed(opened) if start < loop.start()), "")
        yield (function, loop[1]), loop[2]
