"""A stand-in for the module pyxrt: records every call, and runs the artifact's kernels in C simulation."""

import ctypes
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

Call = tuple[Any, ...]


class FakeXrt:
    """`module` is what `import pyxrt` gives; `calls` is what was done with it, in order.

    Args:
        kernels: name -> the types of its arguments in order (`"memory"`, `"scalar"`, or `"stream"`, which the function
            does not take) and the function.
        fault: one of the faults of fake_xrt.cpp, or "".
    """

    def __init__(self, kernels: dict[str, tuple[Sequence[str], Callable[..., None]]], fault: str = "") -> None:
        self.kernels, self.fault = kernels, fault
        self.calls: list[Call] = []
        self.module = SimpleNamespace(
            xclbin=lambda path: _Image(self, path),
            device=lambda index: _Device(self, index),
            kernel=_Kernels(self),
            bo=_Buffers(self),
            run=lambda kernel: _Run(self, kernel),
            xclBOSyncDirection=SimpleNamespace(XCL_BO_SYNC_BO_TO_DEVICE="to", XCL_BO_SYNC_BO_FROM_DEVICE="from"),
            ert_cmd_state=SimpleNamespace(ERT_CMD_STATE_COMPLETED="completed", ERT_CMD_STATE_TIMEOUT="timeout"),
        )


class _Uuid(SimpleNamespace):
    text: str

    def to_string(self) -> str:
        return self.text


class _Image:
    def __init__(self, xrt: FakeXrt, path: str) -> None:
        xrt.calls.append(("xclbin", path))
        self._xrt = xrt

    def get_uuid(self) -> _Uuid:
        return _Uuid(text="1")

    def get_kernels(self) -> list[Any]:
        missing = 1 if self._xrt.fault == "other design" else 0
        kernels = {} if self._xrt.fault == "no kernel" else self._xrt.kernels
        return [
            SimpleNamespace(get_name=lambda n=n: n, get_num_args=lambda a=a: len(a) - missing)
            for n, (a, _) in kernels.items()
        ]


class _Device:
    def __init__(self, xrt: FakeXrt, index: int) -> None:
        if index:
            raise RuntimeError(f"No such device with index '{index}'")
        self._xrt = xrt
        xrt.calls.append(("device", index))

    def load_xclbin(self, image: _Image) -> _Uuid:
        assert isinstance(image, _Image)
        return _Uuid(text="2" if self._xrt.fault == "other program" else "1")


class _Kernel:
    def __init__(self, name: str) -> None:
        self.name = name

    def group_id(self, index: int) -> int:
        return index + 100 * len(self.name)


class _Kernels:
    exclusive = "exclusive"

    def __init__(self, xrt: FakeXrt) -> None:
        self._xrt = xrt

    def __call__(self, device: _Device, uuid: _Uuid, name: str, mode: str) -> _Kernel:
        assert (uuid.text, mode) == ("1", "exclusive")
        self._xrt.calls.append(("kernel", name))
        return _Kernel(name)


class _Buffer:
    """Host side and device side, 16-byte aligned as 128-bit words want it."""

    def __init__(self, size: int, group: int) -> None:
        self.size, self.group = size, group
        self.host, self._store = np.zeros(size, np.uint8), np.full(size + 16, 0x55, np.uint8)
        start = -self._store.ctypes.data % 16
        self.device = self._store[start : start + size]

    def write(self, data: np.ndarray, seek: int) -> None:
        self.host[seek : seek + data.nbytes] = data.view(np.uint8).reshape(-1)

    def read(self, size: int, skip: int) -> np.ndarray:
        return self.host[skip : skip + size].view("S1")

    def sync(self, direction: str, size: int, offset: int) -> None:
        source, target = (self.host, self.device) if direction == "to" else (self.device, self.host)
        target[offset : offset + size] = source[offset : offset + size]


class _Buffers:
    normal = "normal"

    def __init__(self, xrt: FakeXrt) -> None:
        self._xrt = xrt

    def __call__(self, device: _Device, size: int, flags: str, group: int) -> _Buffer:
        assert flags == "normal"
        if self._xrt.fault == "no memory":
            raise MemoryError("std::bad_alloc")
        self._xrt.calls.append(("bo", size, group))
        return _Buffer(size, group)


class _Run:
    def __init__(self, xrt: FakeXrt, kernel: _Kernel) -> None:
        self._xrt, self._kernel = xrt, kernel
        self._values: dict[int, Any] = {}

    def set_arg(self, index: int, value: Any) -> None:
        kinds, _ = self._xrt.kernels[self._kernel.name]
        if kinds[index] == "memory":
            assert value.group == self._kernel.group_id(index), "the buffer is in another memory than the argument"
        else:
            assert -(2**31) <= value < 2**31, "pyxrt takes a C int"
        self._values[index] = value

    def start(self) -> None:
        kinds, function = self._xrt.kernels[self._kernel.name]
        filled = [i for i, kind in enumerate(kinds) if kind != "stream"]
        assert sorted(self._values) == filled, "an argument was not set"
        values = [self._values[i] for i in filled]
        # Of a buffer its beginning, which may be a list of rows.
        given = tuple(v & 0xFFFFFFFF if isinstance(v, int) else bytes(v.device[:512]) for v in values)
        self._xrt.calls.append(("start", self._kernel.name, given))
        function(*(_c_value(v) for v in values))

    def wait(self, timeout_ms: int) -> str:
        assert timeout_ms > 0
        return "timeout" if self._xrt.fault == "hang" else "completed"


def _c_value(value: Any) -> Any:
    return ctypes.c_uint32(value & 0xFFFFFFFF) if isinstance(value, int) else ctypes.c_void_p(value.device.ctypes.data)
