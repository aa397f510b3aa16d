"""TVM's runtime without its compiler: `libtvm_runtime.so` driven through `tvm_ffi`.

`import tvm` also loads the compiler library, 260 MB. The runtime library has the Relax virtual machine, the thread pool
and tensors. Both imports may happen in one process, in either order: the compiler library links the same runtime file.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from functools import cache
from hashlib import sha256
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fastcar_compile.config.formats import DTYPES
from fastcar_compile.errors import BackendError
from fastcar_compile.ir.tensor_files import ALIGNMENT

if TYPE_CHECKING:
    from tvm_ffi import Tensor

Array = NDArray[Any]

_SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
_LIBRARIES: dict[str, Any] = {}
"""SHA-256 of a library -> its module."""
_COUNT = count()

_CPU, _POOLED = 1, 2
"""DLPack's device type of CPUs, and the VM's allocator that keeps freed blocks."""


@contextmanager
def _without_torch() -> Generator[None]:
    """Make `import torch` fail for the block, unless torch is loaded: tvm_ffi imports it where it is installed."""
    if "torch" in sys.modules:
        yield
        return
    sys.modules["torch"] = None  # pyright: ignore[reportArgumentType]  (None is how importlib marks an absent module)
    try:
        yield
    finally:
        del sys.modules["torch"]


@cache
def _ffi() -> Any:
    """Return the module tvm_ffi with the runtime library loaded.

    Raises:
        BackendError: apache-tvm is not installed, or its library cannot be loaded.
    """
    hint = 'install it: pip install "apache-tvm>=0.27,<0.28"'
    spec = find_spec("tvm")
    if spec is None or not spec.submodule_search_locations:
        raise BackendError("the cpu backend needs the package apache-tvm", where="import tvm", hint=hint)
    with _without_torch():
        import tvm_ffi
    library = Path(spec.submodule_search_locations[0]) / "lib" / "libtvm_runtime.so"
    try:
        # RTLD_GLOBAL makes the symbols visible to libraries that are loaded later.
        ctypes.CDLL(str(library), ctypes.RTLD_GLOBAL)
    except OSError as error:
        raise BackendError(f"TVM's runtime cannot be loaded: {error}", where=str(library), hint=hint) from error
    return tvm_ffi


@cache
def global_function(name: str) -> Callable[..., Any]:
    """Return a function of TVM's registry."""
    return _ffi().get_global_func(name)


def register(name: str, function: Callable[..., Any]) -> None:
    """Register a Python function for compiled libraries. It gets tensors that speak DLPack, and scalars."""
    _ffi().register_global_func(name, function, override=True)


def aligned(array: Array, boundary: int = ALIGNMENT) -> Array:
    """Return the array itself where a library can use it in place, else a copy: at a boundary, contiguous, writable.

    Args:
        boundary: bytes that the address is a multiple of; default: a cache line, as TVM asks.
    """
    if array.flags.writeable and array.flags.c_contiguous and array.ctypes.data % boundary == 0:
        return array
    # Numpy aligns less strictly than TVM asks, so the copy starts within a block that is one line longer.
    memory = np.empty(array.nbytes + boundary, np.uint8)
    start = -memory.ctypes.data % boundary
    copy = memory[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


def adopt(array: Array) -> Tensor:
    """Return a TVM tensor over the memory of `aligned(array)`."""
    module, own = _ffi(), aligned(array)
    if own.dtype.isbuiltin == 1:
        return module.from_dlpack(own)
    # DLPack of numpy knows no bfloat16: the same bytes go over as integers.
    return _view(module.from_dlpack(own.view(f"uint{8 * own.dtype.itemsize}")), own.dtype.name)


def _view(tensor: Any, dtype: str) -> Any:
    """Return a tensor over the same memory, of another type of as many bytes."""
    module = _ffi()
    view = global_function("runtime.TVMTensorCreateView")
    return view(tensor, module.Shape(tensor.shape), module.dtype(dtype), 0)


def element(results: Any, index: int) -> Any:
    """Return `results[index]` of a function's results, in a fifth of the time."""
    return global_function("ffi.ArrayGetItem")(results, index)


def as_array(tensor: Any) -> Array:
    """Return an array over a TVM tensor's memory; read only."""
    try:
        return np.from_dlpack(tensor)
    except RuntimeError:
        # As in `adopt`. A test of the type would cost every call.
        format = DTYPES[str(tensor.dtype)]
        return np.from_dlpack(_view(tensor, f"uint{8 * format.itemsize}")).view(format.numpy)


def fill(tensor: Any, values: Array) -> None:
    """Copy values of the same type and shape into a TVM tensor."""
    global_function("runtime.TVMTensorCopyFromTo")(adopt(np.ascontiguousarray(values)), tensor)


def _loaded(name: str, content: bytes) -> Any:
    """Return the module of a library. Equal content is one module, and stays loaded: sessions hold its functions.

    The linker knows a library by the path that it was opened under, and answers a second opening of that path with the
    first library, even if the path has another file by now. So it gets a sealed file in memory, and no path twice.

    Args:
        name: name of the memory file, for /proc/PID/maps.
    """
    digest = sha256(content).hexdigest()
    if digest not in _LIBRARIES:
        descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        with open(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
            # tvm_ffi chooses the loader by the end of a path, which is a number here. So the loader is named.
            _LIBRARIES[digest] = global_function("ffi.Module.load_from_file.so")(_fresh_path(descriptor), "so")
    return _LIBRARIES[digest]


def _fresh_path(descriptor: int) -> str:
    """Return a path of an open file that no earlier call returned; numbers of closed files come again.

    Bit by bit, a count spells it: "/." and "//" mean the same to the kernel, and not to the linker.
    """
    spelt = "".join("/." if bit == "1" else "//" for bit in f"{next(_COUNT):b}")
    return f"/proc/self/fd{spelt}/{descriptor}"


class Machine:
    """A library's Relax virtual machine.

    Every packed function that the library calls has to be registered before.

    Args:
        content: bytes of the library.

    Attributes:
        name: name of the library's file, for error texts.

    Raises:
        BackendError: the library cannot be loaded.
    """

    def __init__(self, name: str, content: bytes) -> None:
        self.name = name
        try:
            self._module = _loaded(name.rpartition("/")[2], content)["vm_load_executable"]()
            self._module["vm_initialization"](_CPU, 0, _POOLED)
        except (RuntimeError, OSError, ValueError) as error:
            raise BackendError(f"the library cannot be loaded: {error}", where=name) from error

    def function(self, name: str) -> Callable[..., Sequence[Any]]:
        """Return a function of the library.

        Raises:
            BackendError: the library has no function of this name.
        """
        try:
            return self._module[name]
        except AttributeError:
            hint = "compile the model again"
            raise BackendError(f"the library has no function `{name}`", where=self.name, hint=hint) from None
