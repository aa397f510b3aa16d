"""Backends by name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastcar_compile.errors import BackendError
from fastcar_compile.runtime.backends.base import Backend

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
