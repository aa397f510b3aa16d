"""The packed functions that the offload program of a library calls, bound to the session that is stepping."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fastcar_compile.artifact.accelerator_section import ArgumentPart, KernelPart
from fastcar_compile.artifact.layout import GATE_FUNCTION, LINEAR_FUNCTION, MLP_FUNCTION
from fastcar_compile.config.formats import kv_type
from fastcar_compile.errors import BackendError, InternalError
from fastcar_compile.gates.base import Array, GateInputs
from fastcar_compile.runtime.tvm_runtime import as_array, fill, register

if TYPE_CHECKING:
    from fastcar_compile.runtime.backends.accelerator.step import AcceleratorStepper

Bytes = NDArray[np.uint8]
Buffer = Any
"""Memory of a device; only the unit that made it knows its form."""


class ComputeUnit(ABC):
    """A kernel, and with one at the other end of its streams both, which run together and have different arguments.

    Every argument has to be filled before the first run; it keeps its value after a run.

    Attributes:
        kernel: the first one, with the arguments of all.
    """

    def __init__(self, *kernels: KernelPart) -> None:
        self.kernels = kernels
        arguments = tuple(argument for own in kernels for argument in own.arguments)
        self.kernel = KernelPart(name=kernels[0].name, arguments=arguments)
        self._buffers: dict[str, Buffer] = {}
        self._filled: set[str] = set()

    @abstractmethod
    def _allocate(self, name: str, size: int) -> Buffer:
        """Return a buffer of `size` bytes in the memory that the argument is connected to."""

    @abstractmethod
    def _upload(self, buffer: Buffer, data: Bytes, first: int = 0) -> None:
        """Copy bytes into a buffer, from byte `first` on."""

    @abstractmethod
    def _download(self, buffer: Buffer, size: int, first: int) -> Bytes:
        """Return a copy of bytes of a buffer, from byte `first` on."""

    @abstractmethod
    def _set_argument(self, index: int, value: Buffer | int) -> None:
        """Give the argument at this place in the signature a buffer, or a scalar of 32 bits."""

    @abstractmethod
    def _execute(self) -> None:
        """Run the kernels once and wait for them; the last one is started first.

        Raises:
            BackendError: a kernel did not complete.
        """

    def again(self) -> ComputeUnit:
        """Return another unit of the same kernel, with buffers of its own.

        Raises:
            BackendError: the device takes one session.
        """
        what, hint = "the device takes one session", "save() this one, and load() it on another backend"
        raise BackendError(what, where=self.kernel.name, hint=hint)

    def argument(self, name: str) -> ArgumentPart:
        """Return the argument of that name."""
        return self.kernel.arguments[self.kernel.index(name)]

    def make_buffer(self, name: str, data: Bytes) -> Buffer:
        """Return a buffer with these bytes, in the memory that the argument is connected to."""
        buffer = self._allocate(name, data.size)
        self._upload(buffer, data)
        return buffer

    def bind(self, name: str, buffer: Buffer) -> None:
        """Make the argument read from or write to this buffer from now on."""
        self._set_argument(self.kernel.index(name), buffer)
        self._filled.add(name)

    def write(self, name: str, data: Bytes, first: int = 0) -> None:
        """Copy bytes into the argument's own buffer, from byte `first` on, and to the device."""
        self._upload(self._own(name, first + data.size), data, first)

    def read(self, name: str, size: int, first: int = 0) -> Bytes:
        """Return bytes of the argument's own buffer, from byte `first` on, after a run."""
        return self._download(self._own(name, first + size), size, first)

    def fill(self, *names: str) -> None:
        """Give arguments their own buffers with any content: the kernel will not read them."""
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
                raise InternalError(f"{self.kernel.name}: {name} is not a scalar of 4 bytes")
            self._set_argument(self.kernel.index(name), value)
            self._filled.add(name)

    def run(self) -> None:
        """Run the kernel once.

        Raises:
            InternalError: an argument was never filled. BackendError: the kernel did not complete.
        """
        # No caller fills outputs before a run, so they get their buffers here.
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


_current: ContextVar[AcceleratorStepper | None] = ContextVar("fastcar_accelerator_backend", default=None)
"""The backend of the running library: TVM's functions are global, sessions are not."""


@contextmanager
def stepping(backend: AcceleratorStepper) -> Generator[None]:
    """Bind offload programs to `backend` within this context."""
    token = _current.set(backend)
    try:
        yield
    finally:
        _current.reset(token)


def _backend() -> AcceleratorStepper:
    backend = _current.get()
    if backend is None:
        raise BackendError("an offload program runs outside of its session", hint="open it with session(backend=…)")
    return backend


def _offloaded_mlp(x: Any, replay: Any, cached: Any, layer: int, out: Any) -> None:
    fill(out, _backend().mlp(layer, as_array(x), as_array(replay), as_array(cached)))


def _offloaded_gate(query: Any, keys: Any, x: Any, cached: Any, chain: Any, *rest: Any) -> None:
    """Decide one layer; the unit gets the key row `position - stride` (clamped to 0), the cache is not copied."""
    position, _step, stride, layer, *results = rest
    own, key = (None, None) if _absent(query) else _earlier(query, keys, int(as_array(position)[0]) - stride)
    inputs = GateInputs(own, key, *(None if _absent(value) else as_array(value) for value in (x, cached)))
    decision = _backend().gate(layer, inputs, as_array(chain))
    for result, value in zip(results, decision, strict=True):
        fill(result, value)


def _absent(operand: Any) -> bool:
    """Return whether the gate does not read an operand: the operand is the integer 0 then."""
    return isinstance(operand, int)


def _earlier(query: Any, keys: Any, row: int) -> tuple[Array, Array]:
    """Return q [B, Hq, D] and one row of the key cache [B, Hkv, D], both float32."""
    # The first frame has no earlier key. Row 0 stands in, and its score is ignored: every row computes there.
    own, key = as_array(query), as_array(keys)[:, :, max(row, 0)]
    return own[:, :, 0], kv_type(key.dtype).widened(key, own.shape[3])


def _offloaded_linear(x: Any, name: Any, out: Any) -> None:
    fill(out, _backend().linear(str(name), as_array(x)))


def register_functions() -> None:
    """Register the packed functions that offload programs call. TVM looks for them when it loads the library."""
    register(MLP_FUNCTION, _offloaded_mlp)
    register(GATE_FUNCTION, _offloaded_gate)
    register(LINEAR_FUNCTION, _offloaded_linear)
