"""Backend `board`: the accelerator on a board, through pyxrt."""

from __future__ import annotations

from fastcar_compile.artifact.reader import StoredArtifact
from fastcar_compile.runtime.backends.accelerator.stepper import AcceleratorStepper, accelerator_of
from fastcar_compile.runtime.backends.base import BackendOptions
from fastcar_compile.runtime.backends.board.device import Device, XrtUnit
from fastcar_compile.runtime.backends.board.memory import require_contiguous


class BoardStepper(AcceleratorStepper):
    """AcceleratorStepper on a device with XRT.

    The kernel keeps the control table, what was dispatched and the prefetch buffer, so a program has it for itself.

    Raises:
        BackendError: pyxrt, the device or the xclbin is missing, the xclbin is of another design, or Linux has reserved
            too little contiguous memory.
    """

    def __init__(self, artifact: StoredArtifact, options: BackendOptions) -> None:
        section = accelerator_of(artifact)
        (kernel,) = section.kernels
        device = Device([kernel])
        require_contiguous(artifact.manifest, section)
        super().__init__(artifact, options, XrtUnit(device, kernel))


def open_stepper(artifact: StoredArtifact, options: BackendOptions) -> BoardStepper:
    """Open an artifact on the board; see OpenStepper."""
    return BoardStepper(artifact, options)
