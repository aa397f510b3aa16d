"""The host part of an artifact: TVM libraries."""

from __future__ import annotations

import copy
import platform
from typing import Any

from fastcar_compile.ir import DecoderProgram, tensor_attributes
from fastcar_compile.passes.base import run_pipeline
from fastcar_compile.passes.pipeline import offload_pipeline
from fastcar_compile.runtime.store import ArtifactWriter


def emit_host(writer: ArtifactWriter, program: DecoderProgram, *, accelerator: bool) -> dict[str, Any]:
    """Lower to the build machine's CPU; with an accelerator also the host program that calls it.

    Returns:
        Per program (`decode`, `prefill`, `offload`): its library and its argument names, as kept in the manifest.
    """
    from fastcar_compile.lowering.build import lower

    triple = f"{platform.machine()}-linux-gnu"
    programs = {"decode": (program.graph_module, program.outputs)}
    if program.prefill is not None:
        programs["prefill"] = (program.prefill, program.prefill_outputs)
    if accelerator:
        # Graphs are copied, weights are not.
        host = copy.deepcopy(program, {id(t): t for g in program.graphs() for t in tensor_attributes(g).values()})
        run_pipeline(host, offload_pipeline())
        programs["offload"] = (host.graph_module, host.outputs)
    section: dict[str, Any] = {}
    for name, (graph, outputs) in programs.items():
        lowered = lower(graph, outputs, program.sites, program.state_names())
        library = f"host/{triple}/{name}.so"
        lowered.export(writer.file(library))
        section[name] = {"library": library, **lowered.arguments()}
    return {"triple": triple, "programs": section}
