"""Backend `hls-csim`: the artifact's HLS sources, built with g++ and called through ctypes."""

from __future__ import annotations

from pathlib import PurePosixPath

from fastcar_compile.artifact.digest import CACHE, cache_folder
from fastcar_compile.artifact.layout import HLS
from fastcar_compile.artifact.reader import StoredArtifact
from fastcar_compile.outputs import os_errors
from fastcar_compile.runtime.backends.accelerator.stepper import AcceleratorStepper, accelerator_of
from fastcar_compile.runtime.backends.base import BackendOptions
from fastcar_compile.runtime.backends.hls_csim.build import SOURCES, open_library
from fastcar_compile.runtime.backends.hls_csim.unit import CsimUnit


class HlsCsimStepper(AcceleratorStepper):
    """AcceleratorStepper on the g++ build of the artifact's HLS sources.

    Raises:
        BackendError: g++ or the ap_types headers are missing, or the sources do not compile.
        UserError: the library cannot be written.
    """

    def __init__(self, artifact: StoredArtifact, options: BackendOptions) -> None:
        (kernel,) = accelerator_of(artifact).kernels
        sources, folder = sources_of(artifact), cache_folder() / "csim"
        hint = f"free some space there, or set {CACHE} to another folder"
        with os_errors("the C simulation cannot be built", folder, hint):
            library = open_library(sources, folder)
        super().__init__(artifact, options, CsimUnit(library, kernel))


def open_stepper(artifact: StoredArtifact, options: BackendOptions) -> HlsCsimStepper:
    """Open an artifact on the C simulation of its kernels; see OpenStepper."""
    return HlsCsimStepper(artifact, options)


def sources_of(artifact: StoredArtifact) -> dict[str, bytes]:
    """Return the C++ files of an artifact's HLS project, by their names in it."""
    names = (PurePosixPath(name) for name in artifact.manifest.files)
    found = (n for n in names if n.parent == PurePosixPath(HLS) and (n.suffix == ".hpp" or n.name in SOURCES))
    return {name.name: artifact.files.data(str(name)) for name in found}
