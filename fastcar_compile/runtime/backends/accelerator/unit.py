"""A kernel whose arguments are filled by name, wherever it runs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastcar_compile.artifact.sections import ArgumentPart, KernelPart
from fastcar_compile.errors import InternalError

Bytes = NDArray[np.uint8]
Buffer = Any
"""Memory of a device; what it is belongs to the unit that made it."""


class ComputeUnit(ABC):
    """One kernel. Every argument has to be filled before the first run; it keeps its value after a run."""

    def __init__(self, kernel: KernelPart) -> None:
        self.kernel = kernel
        self._buffers: dict[str, Buffer] = {}
        self._filled: set[str] = set()

    @abstractmethod
    def _allocate(self, name: str, size: int) -> Buffer:
        """Return a buffer of `size` bytes in the memory that the argument is connected to."""

    @abstractmethod
    def _upload(self, buffer: Buffer, data: Bytes) -> None:
        """Copy bytes to the beginning of a buffer."""

    @abstractmethod
    def _download(self, buffer: Buffer, size: int) -> Bytes:
        """Return a copy of the first bytes of a buffer."""

    @abstractmethod
    def _set_argument(self, index: int, value: Buffer | int) -> None:
        """Give the argument at this place in the signature a buffer, or a scalar of 32 bits."""

    @abstractmethod
    def _execute(self) -> None:
        """Run the kernel once and wait for it.

        Raises:
            BackendError: the kernel did not complete.
        """

    def argument(self, name: str) -> ArgumentPart:
        """Return the argument of that name."""
        return self.kernel.arguments[self.kernel.index(name)]

    def make_buffer(self, name: str, data: Bytes) -> Buffer:
        """Return a buffer with these bytes, in the memory that the argument is connected to."""
        buffer = self._allocate(name, data.size)
        self._upload(buffer, data)
        return buffer

    def update(self, buffer: Buffer, data: Bytes) -> None:
        """Copy bytes to the beginning of a buffer that `make_buffer` returned."""
        self._upload(buffer, data)

    def bind(self, name: str, buffer: Buffer) -> None:
        """Make the argument read from or write to this buffer from now on."""
        self._set_argument(self.kernel.index(name), buffer)
        self._filled.add(name)

    def write(self, name: str, data: Bytes) -> None:
        """Copy bytes into the argument's own buffer and to the device."""
        self._upload(self._own(name, data.size), data)

    def read(self, name: str, size: int) -> Bytes:
        """Return the first bytes of the argument's own buffer, after a run."""
        return self._download(self._own(name, size), size)

    def fill(self, *names: str) -> None:
        """Give arguments their own buffers, whatever is in them: the kernel will not read them."""
        for name in names:
            self._own(name, 0)

    def clear(self, *names: str) -> None:
        """Give arguments their own buffers, all zero."""
        for name in names:
            size = self.argument(name).bytes
            self._upload(self._own(name, size), np.zeros(size, np.uint8))

    def set(self, scalars: Mapping[str, int]) -> None:
        """Set scalars of 32 bits."""
        for name, value in scalars.items():
            if self.argument(name).kind != "scalar" or self.argument(name).bytes != 4:
                raise InternalError(f"{self.kernel.name}: {name} is no scalar of 4 bytes")
            self._set_argument(self.kernel.index(name), value)
            self._filled.add(name)

    def run(self) -> None:
        """Execute the kernel once.

        Raises:
            InternalError: an argument was never filled. BackendError: the kernel did not complete.
        """
        # Nobody fills outputs before a run, so they get their buffers here.
        self.fill(*(a.name for a in self.kernel.arguments if a.kind == "out"))
        lacking = [a.name for a in self.kernel.arguments if a.name not in self._filled]
        if lacking:
            raise InternalError(f"{self.kernel.name}: arguments that were never filled: {', '.join(lacking)}")
        self._execute()

    def _own(self, name: str, size: int) -> Buffer:
        limit = self.argument(name).bytes
        if size > limit:
            raise InternalError(f"{self.kernel.name}: {size} bytes for {name}, which has {limit}")
        if name not in self._buffers:
            self._buffers[name] = self._allocate(name, limit)
            self.bind(name, self._buffers[name])
        return self._buffers[name]
