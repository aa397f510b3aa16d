"""Backend `board`: the accelerator on a board, through pyxrt."""

import importlib
import os
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from fastcar_compile.artifact.accelerator_section import AcceleratorSection, KernelPart
from fastcar_compile.artifact.manifest import Manifest
from fastcar_compile.artifact.reader import StoredArtifact
from fastcar_compile.errors import BackendError
from fastcar_compile.runtime.backends.accelerator.calls import Buffer, Bytes, ComputeUnit
from fastcar_compile.runtime.backends.accelerator.step import accelerator_of, stepper_on
from fastcar_compile.runtime.backends.base import BackendOptions, Stepper

# Contiguous memory (CMA), which XRT allocates buffers from on a board whose memory is also Linux's.
#
# hls_templates/host/fastcar_xrt.hpp is the same in C++.


MEMINFO = "FASTCAR_MEMINFO"
"""Environment variable: the file that is read instead of /proc/meminfo; "none": nothing is checked."""

PAGE = 4096
MB = 1e6


def buffer_bytes(section: AcceleratorSection) -> int:
    """Return the bytes of every buffer on the device: those of the kernel's memory arguments."""
    arguments = [a.bytes for kernel in section.kernels for a in kernel.arguments if a.kind != "scalar"]
    # CMA hands out whole pages, so every buffer is rounded up to one.
    return sum(-(-size // PAGE) * PAGE for size in arguments)


def require_contiguous(manifest: Manifest, section: AcceleratorSection) -> None:
    """Raise BackendError where the board shares its memory with Linux and too little contiguous memory is free."""
    path = os.environ.get(MEMINFO, "/proc/meminfo")
    if path == "none" or not manifest.target.shares_memory:
        return
    fields = _meminfo(Path(path))
    needed, free, total = buffer_bytes(section), fields.get("CmaFree", 0), fields.get("CmaTotal", 0)
    if needed > free:
        what = f"the buffers need {needed / MB:.1f} MB of contiguous memory (CMA), of which {free / MB:.1f} MB are free"
        hint = "end other programs that use the board, or reserve more when Linux starts: docs/tutorial/board.md, "
        hint += f'"Memory under Linux"; {MEMINFO}=none skips this check'
        raise BackendError(f"{what} and {total / MB:.1f} MB reserved", where=path, hint=hint)


def _meminfo(path: Path) -> dict[str, int]:
    """Return the fields of a file such as /proc/meminfo, bytes.

    Raises:
        BackendError: it cannot be read.
    """
    try:
        lines = path.read_text().splitlines()
    except OSError as error:
        what = f"the memory of the board cannot be read: {error.strerror}"
        raise BackendError(what, where=str(path), hint=f"set {MEMINFO}=none where the file is missing") from error
    words = [line.replace(":", " ").split() for line in lines]
    return {w[0]: 1024 * int(w[1]) for w in words if len(w) > 1 and w[1].isdecimal()}


XCLBIN, DEVICE = "FASTCAR_XCLBIN", "FASTCAR_DEVICE"
"""Environment variables: path of the device binary; index of the device, 0 if not set."""

TIMEOUT_MS = 10_000


class Device:
    """An open device that holds the xclbin of this design.

    Attributes:
        xrt: the module pyxrt.

    Raises:
        BackendError: pyxrt, the xclbin or the device is missing, or the xclbin is of another design.
    """

    def __init__(self, kernels: Sequence[KernelPart]) -> None:
        self.xrt = _import_pyxrt()
        path, index = _xclbin(), _index()
        with _xrt_errors("the xclbin cannot be read", str(path)):
            image = self.xrt.xclbin(str(path))
        for kernel in kernels:
            # The names are compared before the load: a wrong file then changes nothing on the device.
            _check_kernel(image, kernel, path)
        where, hint = f"device {index}", "load the XRT driver; `xbutil examine` lists the devices"
        with _xrt_errors("the device cannot be opened", where, hint):
            self.device = self.xrt.device(index)
        with _xrt_errors("the xclbin cannot be loaded", str(path), "build it for this board's platform"):
            self.uuid = self.device.load_xclbin(image)
        # XRT may keep the xclbin of another process that has it open.
        if self.uuid.to_string() != image.get_uuid().to_string():
            what = f"the device holds the xclbin {self.uuid.to_string()}, not {image.get_uuid().to_string()}"
            raise BackendError(what, where=where, hint="another program has loaded its own: end it")


@contextmanager
def _xrt_errors(what: str, where: str, hint: str = "see docs/tutorial/board.md") -> Generator[None]:
    """Raise a BackendError in place of XRT's own exceptions."""
    try:
        yield
    except (RuntimeError, OSError, ValueError, MemoryError) as error:
        raise BackendError(f"{what}: {error}", where=where, hint=hint) from error


def _import_pyxrt() -> Any:
    try:
        return importlib.import_module("pyxrt")
    except ImportError as error:
        hint = "run on the board, with XRT's bindings (/opt/xilinx/xrt/python) on PYTHONPATH; docs/tutorial/board.md"
        raise BackendError(f"the board backend needs pyxrt: {error}", where="import pyxrt", hint=hint) from error


def _xclbin() -> Path:
    text = os.environ.get(XCLBIN)
    if not text:
        what, where = "the board backend does not know its xclbin", f"${XCLBIN} is not set"
        raise BackendError(what, where=where, hint="set it to the file's path")
    if not Path(text).is_file():
        hint = f"correct ${XCLBIN}; `make link` writes the file"
        raise BackendError("the xclbin does not exist", where=text, hint=hint)
    return Path(text)


def _index() -> int:
    text = os.environ.get(DEVICE, "0")
    if not text.isdecimal():
        raise BackendError(f"{text!r} is not a device index", where=f"${DEVICE}", hint="give 0, 1, …")
    return int(text)


def _check_kernel(image: Any, kernel: KernelPart, path: Path) -> None:
    """Raise BackendError for another design; pyxrt tells a kernel's name and number of arguments, not their names."""
    hint = "link the kernels of this artifact again"
    found = [k for k in image.get_kernels() if k.get_name() == kernel.name]
    if not found:
        raise BackendError(f"the xclbin has no kernel {kernel.name}", where=str(path), hint=hint)
    # XRT counts streams as arguments, which nobody fills.
    given, wanted = found[0].get_num_args(), len(kernel.arguments) + len(kernel.streams)
    if given != wanted:
        what = f"the xclbin is of another design: {kernel.name} has {given} arguments, expected are {wanted}"
        raise BackendError(what, where=str(path), hint=hint)


class XrtUnit(ComputeUnit):
    """Kernels of the xclbin."""

    def __init__(self, device: Device, *kernels: KernelPart) -> None:
        super().__init__(*kernels)
        self._device, xrt = device, device.xrt
        self._opened, self._places = list[Any](), list[tuple[int, int]]()
        for number, kernel in enumerate(kernels):
            # Exclusive access: the kernel keeps a table on chip, which a second program could replace.
            with _xrt_errors("the kernel cannot be opened", kernel.name, "end other programs that use the board"):
                self._opened.append(xrt.kernel(device.device, device.uuid, kernel.name, xrt.kernel.exclusive))
            self._places += [(number, index) for index in range(len(kernel.arguments))]
        self._runs = [xrt.run(kernel) for kernel in self._opened]
        # All before the first byte: the sum may be free where no region of contiguous memory has room for the last one.
        self._weights = {name: self._made(name, self.argument(name).bytes) for name in self.kernel.weights()}

    def _allocate(self, name: str, size: int) -> Buffer:
        return self._weights.pop(name, None) or self._made(name, size)

    def _made(self, name: str, size: int) -> Buffer:
        number, index = self._places[self.kernel.index(name)]
        xrt, device, group = self._device.xrt, self._device.device, self._opened[number].group_id(index)
        hint = "a region of contiguous memory has to hold it (docs/tutorial/board.md); or compile for fewer bits"
        with _xrt_errors(f"no memory for {size} bytes", f"{self.kernel.name}, argument {name}", hint):
            return xrt.bo(device, size, xrt.bo.normal, group)

    def _upload(self, buffer: Buffer, data: Bytes, first: int = 0) -> None:
        if data.size:
            buffer.write(np.ascontiguousarray(data), first)
            # Only the written bytes go to the device.
            buffer.sync(self._device.xrt.xclBOSyncDirection.XCL_BO_SYNC_BO_TO_DEVICE, data.size, first)

    def _download(self, buffer: Buffer, size: int, first: int) -> Bytes:
        buffer.sync(self._device.xrt.xclBOSyncDirection.XCL_BO_SYNC_BO_FROM_DEVICE, size, first)
        return np.frombuffer(bytes(buffer.read(size, first)), np.uint8).copy()

    def _set_argument(self, index: int, value: Buffer | int) -> None:
        """Set an argument; pyxrt takes a scalar as a C int."""
        number, own = self._places[index]
        self._runs[number].set_arg(own, (value & 0xFFFFFFFF ^ 1 << 31) - (1 << 31) if isinstance(value, int) else value)

    def _execute(self) -> None:
        for run in reversed(self._runs):
            run.start()
        for run, kernel in zip(self._runs, self.kernels, strict=True):
            state = run.wait(TIMEOUT_MS)
            if state != self._device.xrt.ert_cmd_state.ERT_CMD_STATE_COMPLETED:
                hint = "see `dmesg` and `xbutil examine`; load the xclbin again"
                raise BackendError(f"the kernel did not complete: {state}", where=kernel.name, hint=hint)


def open_stepper(artifact: StoredArtifact, options: BackendOptions) -> Stepper:
    """Open an artifact on the board; see OpenStepper.

    The kernel keeps what was loaded, so a program has it for itself.

    Raises:
        BackendError: pyxrt, the device or the xclbin is missing, the xclbin is of another design, or Linux has reserved
            too little contiguous memory.
    """
    section = accelerator_of(artifact)
    device = Device(section.kernels)
    require_contiguous(artifact.manifest, section)
    return stepper_on(artifact, options, XrtUnit(device, *section.kernels))
