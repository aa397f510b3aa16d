"""Backend `board`: the accelerator on a board, through pyxrt."""

from __future__ import annotations

from fastcar_compile.artifact.reader import StoredArtifact
from fastcar_compile.runtime.backends.accelerator.stepper import AcceleratorStepper, accelerator_of
from fastcar_compile.runtime.backends.base import BackendOptions
from fastcar_compile.runtime.backends.board.device import Device, XrtUnit


class BoardStepper(AcceleratorStepper):
    """AcceleratorStepper on a device with XRT.

    The kernel keeps the control table, what was dispatched and the prefetch buffer, so a program has it for itself.

    Raises:
        BackendError: pyxrt, the device or the xclbin is missing, or the xclbin is of another design.
    """

    def __init__(self, artifact: StoredArtifact, options: BackendOptions) -> None:
        (kernel,) = accelerator_of(artifact).kernels
        super().__init__(artifact, options, XrtUnit(Device([kernel]), kernel))


def open_stepper(artifact: StoredArtifact, options: BackendOptions) -> BoardStepper:
    """Open an artifact on the board; see OpenStepper."""
    return BoardStepper(artifact, options)
