"""Backends by name."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from fastcar_compile.artifact.store import load_tensors
from fastcar_compile.codegen.tvm.isa import INSTRUCTION_SETS, cpu_flags, runnable
from fastcar_compile.errors import BackendError
from fastcar_compile.runtime.backends.base import Backend

if TYPE_CHECKING:
    from fastcar_compile.compiled import Artifact
    from fastcar_compile.runtime.backends.board import BoardLibrary

BACKENDS = ("cpu", "onnxruntime", "hls-csim", "eager", "board")


def open_backend(artifact: Artifact, name: str, threads: int | None) -> Backend:
    """The backend of that name on an artifact.

    Raises:
        BackendError: unknown name, or it cannot run here.
    """
    if name == "eager":
        return _eager(artifact)
    if name == "cpu":
        return _cpu(artifact, threads)
    if name == "onnxruntime":
        return _onnxruntime(artifact, threads)
    if name == "hls-csim":
        return _hls_csim(artifact, threads)
    if name == "board":
        return _board(artifact, threads)
    raise BackendError(f"unknown backend {name!r}", hint=f"use one of: {', '.join(BACKENDS)}")


def _eager(artifact: Artifact) -> Backend:
    from fastcar_compile.runtime.backends.eager import EagerBackend

    program = artifact.program
    return EagerBackend(
        program.graph_module,
        program.outputs,
        program.prefill,
        program.prefill_outputs,
        program.state,
        program.config.prefill_chunk,
    )


def _cpu_options(artifact: Artifact, threads: int | None) -> dict[str, Any]:
    sections = artifact.manifest.sections
    return {
        "root": artifact.path,
        "programs": programs_for(sections["host"], f"{platform.machine()}-linux-gnu", cpu_flags()),
        "params": artifact.params,
        "state": artifact.state,
        "config": artifact.config,
        "threads": threads,
    }


def _cpu(artifact: Artifact, threads: int | None) -> Backend:
    from fastcar_compile.runtime.backends.cpu import CpuBackend

    return CpuBackend(**_cpu_options(artifact, threads))


def _onnxruntime(artifact: Artifact, threads: int | None) -> Backend:
    from fastcar_compile.codegen.onnx.export import ONNX_EXTERNAL, ONNX_INLINE
    from fastcar_compile.runtime.backends.ort import OrtBackend

    model = next((f for f in (ONNX_INLINE, ONNX_EXTERNAL) if f in artifact.manifest.files), None)
    if model is None:
        raise BackendError("this artifact has no ONNX model", hint="compile the model again")
    return OrtBackend(artifact.path / model, artifact.state, artifact.config, threads)


def programs_for(host: Mapping[str, Any], machine: str, flags: frozenset[str]) -> dict[str, Any]:
    """The best libraries that a CPU runs: one of the variants, or those of the board.

    Args:
        host: the manifest's section. machine: the CPU's triple. flags: what it offers, as /proc/cpuinfo names it.

    Raises:
        BackendError: there are none for it.
    """
    for variant in host["variants"]:
        if variant["triple"] == machine and flags >= set(variant["flags"]):
            return variant["programs"]
    board = host.get("board")
    if board is not None and board["triple"] == machine:
        if not board["linked"]:
            raise BackendError(
                f"the libraries for {machine} are object files, not linked",
                where=board["programs"]["decode"]["library"],
                hint=f"compile again where {board['compiler']} is on PATH; docs/tutorial/board.md",
            )
        return board["programs"]
    here = [isa.name for isa in runnable(INSTRUCTION_SETS, machine.split("-", maxsplit=1)[0], flags)]
    known = [f"{v['instruction_set']} ({v['triple']})" for v in host["variants"]]
    known += [f"{board['cpu']} ({board['triple']})"] if board else []
    hint = f"compile it with host_cpus naming one of: {', '.join(here)}" if here else "use another machine"
    raise BackendError(f"this artifact has no library for this CPU ({machine}), only for {', '.join(known)}", hint=hint)


def _accelerator(artifact: Artifact) -> dict[str, Any]:
    accelerator = artifact.manifest.sections["accelerator"]
    if accelerator is None:
        hint = "compile for a target with an accelerator and quant='w8a8' or 'w4a8'"
        raise BackendError("this artifact has no accelerator kernels", hint=hint)
    return accelerator


def _board(artifact: Artifact, threads: int | None) -> Backend:
    from fastcar_compile.runtime.backends.board import BoardLibrary

    accelerator = _accelerator(artifact)
    library = BoardLibrary(accelerator["kernels"], artifact.config.hidden_size, artifact.config.batch_size)
    return _hls_csim(artifact, threads, library)


def _hls_csim(artifact: Artifact, threads: int | None, library: BoardLibrary | None = None) -> Backend:
    accelerator = _accelerator(artifact)
    from fastcar_compile.codegen.hls.engine_design import LinearStage
    from fastcar_compile.runtime.backends.hls_csim import HlsCsimBackend
    from fastcar_compile.runtime.backends.hls_csim_engine import HlsCsimEngineBackend

    weights = load_tensors(artifact.path / accelerator["weights"], "numpy")
    if library is not None:
        weights = {name: library.load(name, stream) for name, stream in weights.items()}
    table = (artifact.path / accelerator["table"]).read_bytes()
    options = {"weights": weights, "table": table, "library": library, **_cpu_options(artifact, threads)}
    if accelerator["offload"] != "linears":
        return HlsCsimBackend(**options)
    stages = accelerator["design"]["linears"]
    return HlsCsimEngineBackend(stages={name: LinearStage(**stage) for name, stage in stages.items()}, **options)
