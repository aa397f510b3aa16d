"""Backend `hls-csim`: the artifact's HLS sources, built with g++ and called through ctypes."""

from __future__ import annotations

import os
from pathlib import Path

from fastcar_compile.artifact.layout import HLS
from fastcar_compile.artifact.reader import StoredArtifact
from fastcar_compile.runtime.backends.accelerator.controller import Controller
from fastcar_compile.runtime.backends.accelerator.engine import Engine
from fastcar_compile.runtime.backends.accelerator.stepper import Accelerator, AcceleratorStepper, accelerator_of
from fastcar_compile.runtime.backends.base import BackendOptions
from fastcar_compile.runtime.backends.hls_csim.build import open_library
from fastcar_compile.runtime.backends.hls_csim.unit import CsimUnit


class HlsCsimStepper(AcceleratorStepper):
    """AcceleratorStepper on the g++ build of the artifact's HLS sources.

    Raises:
        BackendError: g++ or the ap_types headers are missing, or the sources do not compile.
    """

    def __init__(self, artifact: StoredArtifact, options: BackendOptions) -> None:
        section, config = accelerator_of(artifact), artifact.manifest.decoder.config
        library, (compute, controller) = open_library(artifact.path / HLS, cache_folder()), section.kernels
        engine = Engine(CsimUnit(library, compute), config.hidden_size, config.batch_size)
        units = Accelerator(engine, Controller(CsimUnit(library, controller)), section.controller.prefetch_bytes)
        super().__init__(artifact, options, units)


def open_stepper(artifact: StoredArtifact, options: BackendOptions) -> HlsCsimStepper:
    """Open an artifact on the C simulation of its kernels; see OpenStepper."""
    return HlsCsimStepper(artifact, options)


def cache_folder() -> Path:
    """Return where C simulation libraries are kept: $FASTCAR_CACHE, else ~/.cache/fastcar_compile."""
    return Path(os.environ.get("FASTCAR_CACHE", Path.home() / ".cache" / "fastcar_compile")) / "csim"
