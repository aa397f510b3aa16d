"""Backends by name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastcar_compile.errors import BackendError
from fastcar_compile.runtime.backends.base import Backend
from fastcar_compile.runtime.store import load_tensors

if TYPE_CHECKING:
    from fastcar_compile.runtime.artifact import Artifact

BACKENDS = ("cpu", "onnxruntime", "hls-csim", "eager")


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
    raise BackendError(f"unknown backend {name!r}", mend=f"use one of: {', '.join(BACKENDS)}")


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
        "programs": sections["host"]["programs"],
        "params": {name: tensor.numpy() for name, tensor in artifact.params.items()},
        "state": artifact.program.state,
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
        raise BackendError("this artifact has no ONNX model", mend="compile the model again")
    return OrtBackend(artifact.path / model, artifact.program.state, artifact.config, threads)


def _hls_csim(artifact: Artifact, threads: int | None) -> Backend:
    accelerator = artifact.manifest.sections["accelerator"]
    if accelerator is None:
        mend = "compile for a target with an accelerator and quant='w8a8' or 'w4a8'"
        raise BackendError("this artifact has no accelerator kernels", mend=mend)
    from fastcar_compile.runtime.backends.hls_csim import HlsCsimBackend

    weights = load_tensors(artifact.path / accelerator["weights"], "numpy")
    table = (artifact.path / accelerator["table"]).read_bytes()
    return HlsCsimBackend(weights=weights, table=table, **_cpu_options(artifact, threads))
