"""A kernel of a C simulation library."""

from __future__ import annotations

import ctypes

import numpy as np

from fastcar_compile.artifact.sections import KernelPart
from fastcar_compile.runtime.backends.accelerator.unit import Bytes, ComputeUnit

WORD_BYTES = 16
"""A 128-bit word lies at a multiple of this."""


class CsimUnit(ComputeUnit):
    """A kernel as a C function. Device memory is the process's own. Runs release the GIL."""

    def __init__(self, library: ctypes.CDLL, kernel: KernelPart) -> None:
        super().__init__(kernel)
        self._function = library[kernel.name]  # as an attribute it would keep the library from being unloaded
        self._function.restype = None
        self._values: dict[int, Bytes | int] = {}

    def make_buffer(self, name: str, data: Bytes) -> Bytes:
        """Return the bytes themselves where they are aligned."""
        return aligned(np.ascontiguousarray(data))

    def clear(self, *names: str) -> None:
        """Give arguments new buffers: memory that the system has set to zero is taken page by page."""
        for name in names:
            self._buffers.pop(name, None)
        self.fill(*names)

    def _allocate(self, name: str, size: int) -> Bytes:
        return aligned(np.zeros(size, np.uint8))

    def _upload(self, buffer: Bytes, data: Bytes) -> None:
        buffer[: data.size] = data

    def _download(self, buffer: Bytes, size: int) -> Bytes:
        return buffer[:size].copy()

    def _set_argument(self, index: int, value: Bytes | int) -> None:
        self._values[index] = value

    def _execute(self) -> None:
        values = (self._values[index] for index in range(len(self.kernel.arguments)))
        self._function(*(_c_value(value) for value in values))


def aligned(data: Bytes) -> Bytes:
    """Return the bytes at an address of whole words; a copy unless they are there already."""
    if data.ctypes.data % WORD_BYTES == 0:
        return data
    buffer = np.empty(data.size + WORD_BYTES, np.uint8)
    start = -buffer.ctypes.data % WORD_BYTES
    buffer[start : start + data.size] = data
    return buffer[start : start + data.size]


def _c_value(value: Bytes | int) -> ctypes.c_uint32 | ctypes.c_void_p:
    if isinstance(value, int):
        return ctypes.c_uint32(value & 0xFFFFFFFF)
    return ctypes.c_void_p(value.ctypes.data)
