"""A device through pyxrt, and a kernel on it whose arguments are filled by name: fastcar_xrt.hpp in Python."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from fastcar_compile.codegen.hls.board.kernels import Argument, Kernel
from fastcar_compile.errors import BackendError, InternalError

XCLBIN, DEVICE = "FASTCAR_XCLBIN", "FASTCAR_DEVICE"
"""Environment variables: path of the device binary; index of the device, 0 if not set."""

TIMEOUT_MS = 10_000
T = TypeVar("T")


class Device:
    """An open device that holds the xclbin of this design.

    Attributes:
        xrt: the module pyxrt.

    Raises:
        BackendError: pyxrt, the xclbin or the device is missing, or the xclbin is of another design.
    """

    def __init__(self, kernels: Sequence[Kernel]) -> None:
        self.xrt = _import_pyxrt()
        path, index = _xclbin(), _index()
        image = attempt("the xclbin cannot be read", str(path), lambda: self.xrt.xclbin(str(path)))
        for kernel in kernels:
            _check_kernel(image, kernel, path)
        hint = "load the XRT driver; `xbutil examine` lists the devices"
        where = f"device {index}"
        self.device = attempt("the device cannot be opened", where, lambda: self.xrt.device(index), hint)
        hint = "build it for this board's platform"
        self.uuid = attempt("the xclbin cannot be loaded", str(path), lambda: self.device.load_xclbin(image), hint)
        if self.uuid.to_string() != image.get_uuid().to_string():
            what = f"the device holds the xclbin {self.uuid.to_string()}, not {image.get_uuid().to_string()}"
            raise BackendError(what, where=where, hint="another program has loaded its own: end it")


def attempt(what: str, where: str, work: Callable[[], T], hint: str = "see docs/tutorial/board.md") -> T:
    """What `work` returns; XRT's own exceptions become a BackendError."""
    try:
        return work()
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
        raise BackendError(
            "the board backend does not know its xclbin",
            where=f"${XCLBIN} is not set",
            hint="set it to the file's path",
        )
    if not Path(text).is_file():
        raise BackendError(
            "the xclbin does not exist", where=text, hint=f"correct ${XCLBIN}; `make link` writes the file"
        )
    return Path(text)


def _index() -> int:
    text = os.environ.get(DEVICE, "0")
    if not text.isdecimal():
        raise BackendError(f"{text!r} is no device index", where=f"${DEVICE}", hint="give 0, 1, …")
    return int(text)


def _check_kernel(image: Any, kernel: Kernel, path: Path) -> None:
    """pyxrt tells a kernel's name and how many arguments it has, but not their names."""
    hint = "link the kernels of this artifact again"
    found = [k for k in image.get_kernels() if k.get_name() == kernel.name]
    if not found:
        raise BackendError(f"the xclbin has no kernel {kernel.name}", where=str(path), hint=hint)
    if found[0].get_num_args() != len(kernel.arguments):
        what = (
            f"the xclbin is of another design: {kernel.name} has {found[0].get_num_args()} arguments, "
            f"expected are {len(kernel.arguments)}"
        )
        raise BackendError(what, where=str(path), hint=hint)


class ComputeUnit:
    """One kernel. Every argument has to be filled before the first run; it keeps its value after a run."""

    def __init__(self, device: Device, kernel: Kernel) -> None:
        self._device, self.spec, xrt = device, kernel, device.xrt
        self._kernel = attempt(
            "the kernel cannot be opened",
            kernel.name,
            lambda: xrt.kernel(device.device, device.uuid, kernel.name, xrt.kernel.shared),
            "end other programs that use the board",
        )
        self._run = xrt.run(self._kernel)
        self._buffers: dict[str, Any] = {}
        self._filled: set[str] = set()

    def argument(self, name: str) -> Argument:
        """The argument of that name."""
        return self.spec.arguments[self.spec.index(name)]

    def has(self, name: str) -> bool:
        """Whether the kernel has this argument."""
        return any(a.name == name for a in self.spec.arguments)

    def make_buffer(self, name: str, data: NDArray[np.uint8]) -> Any:
        """A buffer with these bytes on the device, in the memory that the argument is connected to."""
        buffer = self._allocate(name, data.size)
        self._upload(buffer, data)
        return buffer

    def bind(self, name: str, buffer: Any) -> None:
        """The argument reads from or writes to this buffer from now on."""
        self._run.set_arg(self.spec.index(name), buffer)
        self._filled.add(name)

    def write(self, name: str, data: NDArray[np.uint8]) -> None:
        """Copy bytes into the argument's own buffer and to the device."""
        self._upload(self._own(name, data.size), data)

    def read(self, name: str, size: int) -> NDArray[np.uint8]:
        """The first bytes of the argument's own buffer, after a run."""
        buffer = self._own(name, size)
        buffer.sync(self._device.xrt.xclBOSyncDirection.XCL_BO_SYNC_BO_FROM_DEVICE, size, 0)
        return np.frombuffer(bytes(buffer.read(size, 0)), np.uint8).copy()

    def fill(self, name: str) -> None:
        """Give the argument its own buffer, whatever is in it: the kernel will not read it."""
        self._own(name, 0)

    def set(self, name: str, value: int) -> None:
        """A scalar of 32 bits. pyxrt takes it as a C int."""
        if self.argument(name).kind != "scalar" or self.argument(name).bytes != 4:
            raise InternalError(f"{self.spec.name}: {name} is no scalar of 4 bytes")
        self._run.set_arg(self.spec.index(name), (value & 0xFFFFFFFF ^ 0x80000000) - 0x80000000)
        self._filled.add(name)

    def run(self) -> None:
        """One execution, waited for.

        Raises:
            InternalError: an argument was never filled. BackendError: the kernel did not complete.
        """
        for argument in self.spec.arguments:
            if argument.kind == "out":
                self.fill(argument.name)
        lacking = [a.name for a in self.spec.arguments if a.name not in self._filled]
        if lacking:
            raise InternalError(f"{self.spec.name}: arguments that were never filled: {', '.join(lacking)}")
        self._run.start()
        state = self._run.wait(TIMEOUT_MS)
        if state != self._device.xrt.ert_cmd_state.ERT_CMD_STATE_COMPLETED:
            hint = "see `dmesg` and `xbutil examine`; load the xclbin again"
            raise BackendError(f"the kernel did not complete: {state}", where=self.spec.name, hint=hint)

    def _own(self, name: str, size: int) -> Any:
        limit = self.argument(name).bytes
        if size > limit:
            raise InternalError(f"{self.spec.name}: {size} bytes for {name}, which has {limit}")
        if name not in self._buffers:
            self._buffers[name] = self._allocate(name, limit)
            self.bind(name, self._buffers[name])
        return self._buffers[name]

    def _allocate(self, name: str, size: int) -> Any:
        xrt, device, group = self._device.xrt, self._device.device, self._kernel.group_id(self.spec.index(name))
        return attempt(
            f"no memory for {size} bytes",
            f"{self.spec.name}, argument {name}",
            lambda: xrt.bo(device, size, xrt.bo.normal, group),
            "free device memory, or compile for fewer layers, rows or bits",
        )

    def _upload(self, buffer: Any, data: NDArray[np.uint8]) -> None:
        if data.size:
            buffer.write(np.ascontiguousarray(data), 0)
            buffer.sync(self._device.xrt.xclBOSyncDirection.XCL_BO_SYNC_BO_TO_DEVICE, data.size, 0)
