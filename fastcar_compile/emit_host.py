"""The host part of an artifact: TVM libraries."""

from __future__ import annotations

import copy
import platform
from typing import Any

from fastcar_compile.ir import DecoderProgram
from fastcar_compile.passes.base import run_pipeline
from fastcar_compile.passes.pipeline import offload_pipeline
from fastcar_compile.runtime.store import ArtifactWriter


def emit_host(writer: ArtifactWriter, program: DecoderProgram, *, accelerator: bool, offload: str) -> dict[str, Any]:
    """Lower to the build machine's CPU; with an accelerator also the host program that calls it for `offload`.

    Returns:
        Per program (`decode`, `prefill`, `offload`): its library and its argument names, as kept in the manifest.
    """
    from fastcar_compile.lowering.build import lower

    triple = f"{platform.machine()}-linux-gnu"
    programs = {"decode": (program.graph_module, program.outputs)}
    if program.prefill is not None:
        programs["prefill"] = (program.prefill, program.prefill_outputs)
    if accelerator:
        host = copy.deepcopy(program)
        run_pipeline(host, offload_pipeline(offload))
        programs["offload"] = (host.graph_module, host.outputs)
    section: dict[str, Any] = {}
    for name, (graph, outputs) in programs.items():
        lowered = lower(graph, outputs, program.sites, program.state_names())
        library = f"host/{triple}/{name}.so"
        lowered.export(writer.file(library))
        section[name] = {"library": library, **lowered.arguments()}
    return {"triple": triple, "programs": section}
