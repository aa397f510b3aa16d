"""Backend `board`: the accelerator on a board, through pyxrt."""

from __future__ import annotations

from fastcar_compile.artifact.reader import StoredArtifact
from fastcar_compile.runtime.backends.accelerator.controller import Controller
from fastcar_compile.runtime.backends.accelerator.engine import Engine
from fastcar_compile.runtime.backends.accelerator.stepper import Accelerator, AcceleratorStepper, accelerator_of
from fastcar_compile.runtime.backends.base import BackendOptions
from fastcar_compile.runtime.backends.board.device import Device, XrtUnit
from fastcar_compile.runtime.backends.board.memory import require_contiguous


class BoardStepper(AcceleratorStepper):
    """AcceleratorStepper on a device with XRT.

    The engine's prefetch buffer is not used: other programs may use the kernel in between (docs/tutorial/board.md).

    Raises:
        BackendError: pyxrt, the device or the xclbin is missing, the xclbin is of another design, or Linux has reserved
            too little contiguous memory.
    """

    def __init__(self, artifact: StoredArtifact, options: BackendOptions) -> None:
        section = accelerator_of(artifact)
        compute, controller = section.kernels
        config, device = artifact.manifest.decoder.config, Device([compute, controller])
        require_contiguous(artifact.manifest, section)
        engine = Engine(XrtUnit(device, compute), config.hidden_size, config.batch_size)
        super().__init__(artifact, options, Accelerator(engine, Controller(XrtUnit(device, controller))))


def open_stepper(artifact: StoredArtifact, options: BackendOptions) -> BoardStepper:
    """Open an artifact on the board; see OpenStepper."""
    return BoardStepper(artifact, options)
