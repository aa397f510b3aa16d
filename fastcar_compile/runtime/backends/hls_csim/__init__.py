"""Backend `hls-csim`: the artifact's HLS sources, built with g++ and called through ctypes."""

from __future__ import annotations

import os
from pathlib import Path

from fastcar_compile.artifact.layout import HLS
from fastcar_compile.artifact.reader import StoredArtifact
from fastcar_compile.outputs import os_errors
from fastcar_compile.runtime.backends.accelerator.stepper import AcceleratorStepper, accelerator_of
from fastcar_compile.runtime.backends.base import BackendOptions
from fastcar_compile.runtime.backends.hls_csim.build import open_library
from fastcar_compile.runtime.backends.hls_csim.unit import CsimUnit


class HlsCsimStepper(AcceleratorStepper):
    """AcceleratorStepper on the g++ build of the artifact's HLS sources.

    Raises:
        BackendError: g++ or the ap_types headers are missing, or the sources do not compile.
        UserError: the library cannot be written.
    """

    def __init__(self, artifact: StoredArtifact, options: BackendOptions) -> None:
        (kernel,) = accelerator_of(artifact).kernels
        hint = "free some space there, or set FASTCAR_CACHE to another folder"
        with os_errors("the C simulation cannot be built", cache_folder(), hint):
            library = open_library(artifact.path / HLS, cache_folder())
        super().__init__(artifact, options, CsimUnit(library, kernel))


def open_stepper(artifact: StoredArtifact, options: BackendOptions) -> HlsCsimStepper:
    """Open an artifact on the C simulation of its kernels; see OpenStepper."""
    return HlsCsimStepper(artifact, options)


def cache_folder() -> Path:
    """Return where C simulation libraries are kept: $FASTCAR_CACHE, else ~/.cache/fastcar_compile."""
    return Path(os.environ.get("FASTCAR_CACHE", Path.home() / ".cache" / "fastcar_compile")) / "csim"
