"""Backend `board`: the accelerator on a board, through pyxrt."""

from __future__ import annotations

from fastcar_compile.artifact.reader import StoredArtifact
from fastcar_compile.runtime.backends.accelerator.stepper import accelerator_of, stepper_on
from fastcar_compile.runtime.backends.base import BackendOptions, Stepper
from fastcar_compile.runtime.backends.board.device import Device, XrtUnit
from fastcar_compile.runtime.backends.board.memory import require_contiguous


def open_stepper(artifact: StoredArtifact, options: BackendOptions) -> Stepper:
    """Open an artifact on the board; see OpenStepper.

    The kernel keeps what was loaded, so a program has it for itself.

    Raises:
        BackendError: pyxrt, the device or the xclbin is missing, the xclbin is of another design, or Linux has reserved
            too little contiguous memory.
    """
    section = accelerator_of(artifact)
    (kernel,) = section.kernels
    device = Device([kernel])
    require_contiguous(artifact.manifest, section)
    return stepper_on(artifact, options, XrtUnit(device, kernel))
