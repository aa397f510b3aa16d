"""TVM's runtime without its compiler: `libtvm_runtime.so` driven through `tvm_ffi`.

`import tvm` also loads the compiler library, 260 MB. The runtime library has the Relax virtual machine, the thread pool
and tensors. Both imports may happen in one process, in either order: the compiler library links the same runtime file.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fastcar_compile.artifact.tensor_files import ALIGNMENT
from fastcar_compile.errors import BackendError

if TYPE_CHECKING:
    from tvm_ffi import Tensor

Array = NDArray[Any]

_CPU, _POOLED = 1, 2
"""DLPack's device type of CPUs; the VM's allocator that keeps freed blocks."""


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
        ctypes.CDLL(str(library), ctypes.RTLD_GLOBAL)
    except OSError as error:
        raise BackendError(f"TVM's runtime cannot be loaded: {error}", where=str(library), hint=hint) from error
    return tvm_ffi


def global_function(name: str) -> Callable[..., Any]:
    """Return a function of TVM's registry."""
    return _ffi().get_global_func(name)


def register(name: str, function: Callable[..., Any]) -> None:
    """Let compiled libraries call a Python function by this name. It gets tensors that speak DLPack, and scalars."""
    _ffi().register_global_func(name, function, override=True)


def aligned(array: Array) -> Array:
    """Return the array itself where TVM can use it in place, else a copy: whole cache lines, contiguous, writable."""
    if array.flags.writeable and array.flags.c_contiguous and array.ctypes.data % ALIGNMENT == 0:
        return array
    memory = np.empty(array.nbytes + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    copy = memory[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


def adopt(array: Array) -> Tensor:
    """Return a TVM tensor over the memory of `aligned(array)`."""
    module, own = _ffi(), aligned(array)
    if own.dtype.isbuiltin == 1:
        return module.from_dlpack(own)
    # DLPack of numpy knows no bfloat16: the same bytes go over as integers.
    carrier = module.from_dlpack(own.view(f"uint{8 * own.dtype.itemsize}"))
    view = global_function("runtime.TVMTensorCreateView")
    return view(carrier, module.Shape(own.shape), module.dtype(own.dtype.name), 0)


def as_array(tensor: Any) -> Array:
    """Return an array over a TVM tensor's memory; read only."""
    return np.from_dlpack(tensor)


def fill(tensor: Any, values: Array) -> None:
    """Copy values of the same type and shape into a TVM tensor."""
    global_function("runtime.TVMTensorCopyFromTo")(adopt(np.ascontiguousarray(values)), tensor)


class Machine:
    """A library's Relax virtual machine.

    Raises:
        BackendError: the library cannot be loaded.
    """

    def __init__(self, library: Path) -> None:
        if not library.is_file():
            raise BackendError("the library cannot be loaded: there is no such file", where=library.name)
        try:
            # Kept alive, a library would stay for ever with every session. What its functions return is the runtime's.
            self._module = _ffi().load_module(str(library.resolve()), keep_module_alive=False)["vm_load_executable"]()
            self._module["vm_initialization"](_CPU, 0, _POOLED)
        except (RuntimeError, OSError, ValueError) as error:
            raise BackendError(f"the library cannot be loaded: {error}", where=library.name) from error

    def function(self, name: str) -> Callable[..., Sequence[Any]] | None:
        """Return a function of the library; None: it has no such function."""
        try:
            return self._module[name]
        except AttributeError:
            return None
