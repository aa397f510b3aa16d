"""Backend `hls-csim`: the artifact's HLS sources, built with g++ and called through ctypes."""

from __future__ import annotations

from pathlib import PurePosixPath

from fastcar_compile.artifact.digest import CACHE, cache_folder
from fastcar_compile.artifact.layout import HLS
from fastcar_compile.artifact.reader import StoredArtifact
from fastcar_compile.errors import os_errors
from fastcar_compile.runtime.backends.accelerator.stepper import accelerator_of, stepper_on
from fastcar_compile.runtime.backends.base import BackendOptions, Stepper
from fastcar_compile.runtime.backends.hls_csim.build import SOURCES, open_library
from fastcar_compile.runtime.backends.hls_csim.unit import CsimUnit


def open_stepper(artifact: StoredArtifact, options: BackendOptions) -> Stepper:
    """Open an artifact on the C simulation of its kernel; see OpenStepper.

    Raises:
        BackendError: g++ or the ap_types headers are missing, or the sources do not compile.
        UserError: the library cannot be written.
    """
    (kernel,) = accelerator_of(artifact).kernels
    sources, folder = sources_of(artifact), cache_folder() / "csim"
    hint = f"free some space there, or set {CACHE} to another folder"
    with os_errors("the C simulation cannot be built", folder, hint):
        library = open_library(sources, folder)
    return stepper_on(artifact, options, CsimUnit(library, kernel))


def sources_of(artifact: StoredArtifact) -> dict[str, bytes]:
    """Return the C++ files of an artifact's HLS project, by their names in it."""
    names = (PurePosixPath(name) for name in artifact.manifest.files)
    found = (n for n in names if n.parent == PurePosixPath(HLS) and (n.suffix == ".hpp" or n.name in SOURCES))
    return {name.name: artifact.files.data(str(name)) for name in found}
