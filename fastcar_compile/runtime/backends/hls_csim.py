"""Backend `hls-csim`: the artifact's HLS sources, built with g++ and called through ctypes."""

import ctypes
import hashlib
import importlib.util
import os
import shutil
import subprocess
import tempfile
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path, PurePosixPath

import numpy as np

from fastcar_compile.artifact.accelerator_section import KernelPart
from fastcar_compile.artifact.digest import CACHE, cache_folder, private_folder, require_own
from fastcar_compile.artifact.layout import HLS
from fastcar_compile.artifact.reader import StoredArtifact
from fastcar_compile.errors import BackendError, os_errors
from fastcar_compile.runtime.backends.accelerator.calls import Bytes, ComputeUnit
from fastcar_compile.runtime.backends.accelerator.step import accelerator_of, stepper_on
from fastcar_compile.runtime.backends.base import BackendOptions, Stepper
from fastcar_compile.runtime.tvm_runtime import aligned
from fastcar_compile.support import machine as processes

FLAGS = [
    *("-std=c++14", "-O2", "-ffp-contract=off", "-fno-strict-aliasing"),
    *("-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas"),
    *("-fPIC", "-shared", "-fno-gnu-unique"),  # a library with unique symbols is never unloaded
]
SOURCES = ("fastcar_step.cpp", "fastcar_engine.cpp")
"""Sources of a library: the project's kernel, and the engine where it is a kernel of its own."""

INSTALL_EXTRA = "install the extra `csim`: pip install 'fastcar_compile[csim]'"


def ap_types_folder() -> Path:
    """Return the folder of ap_int.h: $AP_TYPES, else the folder in the installed hls4ml, which is not imported.

    Raises:
        BackendError: no folder has ap_int.h.
    """
    if "AP_TYPES" in os.environ:
        folder = Path(os.environ["AP_TYPES"])
    else:
        spec = importlib.util.find_spec("hls4ml")
        if spec is None or not spec.submodule_search_locations:
            raise BackendError("the C simulation needs the ap_types headers, and hls4ml is missing", hint=INSTALL_EXTRA)
        folder = Path(spec.submodule_search_locations[0]) / "templates" / "vivado" / "ap_types"
    if not (folder / "ap_int.h").is_file():
        raise BackendError("the C simulation needs ap_int.h", where=str(folder), hint=INSTALL_EXTRA)
    return folder


def compiler() -> str:
    """Return the path of g++ ($CXX if set).

    Raises:
        BackendError: g++ is not installed.
    """
    name = os.environ.get("CXX", "g++")
    path = shutil.which(name)
    if path is None:
        hint = "install it (Debian: apt install g++) and, for the ap_types headers, the extra `csim`"
        raise BackendError(f"the C simulation needs {name}, which is not on PATH", hint=hint)
    return path


def open_library(files: Mapping[str, bytes], build_dir: Path, defines: Sequence[str] = ()) -> ctypes.CDLL:
    """Compile a project (as `emit_hls` writes it) in `build_dir`, or take the library already built; load a copy.

    Each call is an accelerator of its own: the kernel keeps its control table from call to call, and a process loads
    the same file only once. The copy's file is not needed any more. The library is unloaded with the last function of
    it.

    Args:
        files: sources and headers by name. defines: macros of the build, such as FASTCAR_COUNTERS.

    Raises:
        BackendError: a source, g++ or the ap_types headers are missing, or the sources do not compile.
    """
    path = build_library(files, build_dir, [name for name in SOURCES if name in files or name == SOURCES[0]], defines)
    # NFS keeps the name of a file that is mapped.
    with tempfile.TemporaryDirectory(dir=path.parent, prefix="fastcar-", ignore_cleanup_errors=True) as folder:
        library = ctypes.CDLL(str(shutil.copy(path, folder)))
    handle = ctypes.c_void_p(library._handle)
    weakref.finalize(library, ctypes.CDLL(None).dlclose, handle).atexit = False
    return library


def build_library(
    files: Mapping[str, bytes], build_dir: Path, sources: Sequence[str], defines: Sequence[str] = ()
) -> Path:
    """Return the library built from these sources; it is compiled unless `build_dir` holds it already.

    Args:
        files: sources and headers by name. sources: names of the files that are compiled.

    Raises:
        BackendError: a source, g++ or the ap_types headers are missing, or the sources do not compile.
    """
    if missing := [name for name in sources if name not in files]:
        raise BackendError(f"HLS sources are missing: {', '.join(missing)}", hint="compile the model again")
    command = [compiler(), *FLAGS, *(f"-D{name}" for name in defines), "-isystem", str(ap_types_folder())]
    path = build_dir / f"fastcar_csim_{_digest(files, [*command, *sources])}.so"
    if not path.is_file():
        build_dir.mkdir(parents=True, exist_ok=True)
        _compile(command, files, sources, path)
    return path


def _digest(files: Mapping[str, bytes], command: Sequence[str]) -> str:
    version = subprocess.run([command[0], "--version"], capture_output=True, text=True, check=False).stdout
    digest = hashlib.sha256("\0".join([version, *command[1:]]).encode())
    # Names go into the digest too: the same text under another name is another project.
    for name, data in sorted(files.items()):
        digest.update(name.encode() + b"\0" + data + b"\0")
    return digest.hexdigest()[:24]


def _compile(command: Sequence[str], files: Mapping[str, bytes], sources: Sequence[str], path: Path) -> None:
    """Build in a folder of its own, then rename: a killed build leaves no half library under the final name."""
    with tempfile.TemporaryDirectory(dir=path.parent, prefix="fastcar-") as folder:
        written, output = Path(folder, "sources"), Path(folder, path.name)
        written.mkdir()
        for name, data in files.items():
            (written / name).write_bytes(data)
        *before, last = (str(written / name) for name in sources)
        # One translation unit: reading ap_int.h takes a third of the time.
        inputs = [*(f"-include{name}" for name in before), last]
        done = processes.run([*command, f"-I{written}", *inputs, "-o", str(output)], {"TMPDIR": folder})
        if done.returncode:
            what = f"g++ could not build the C simulation:\n{done.stderr.replace(f'{written}/', '').strip()[:2000]}"
            hint = "compile the model again; if it persists, report it with this text"
            raise BackendError(what, where=", ".join(sources), hint=hint)
        os.replace(output, path)


WORD_BYTES = 16
"""Alignment of a 128-bit word, in bytes."""


class CsimUnit(ComputeUnit):
    """Kernels as C functions of one library. Device memory is the process's own. Runs release the GIL.

    Args:
        another: loads the library once more, for a session of its own.
    """

    def __init__(
        self, library: ctypes.CDLL, *kernels: KernelPart, another: Callable[[], ctypes.CDLL] | None = None
    ) -> None:
        super().__init__(*kernels)
        self._another = another
        # As attributes of the library they would keep it from being unloaded.
        self._functions = [library[kernel.name] for kernel in kernels]
        for function in self._functions:
            function.restype = None
        self._values: dict[int, Bytes | int] = {}

    def again(self) -> ComputeUnit:
        """Return a unit whose library is a copy of its own; see ComputeUnit.again."""
        return (
            super().again()
            if self._another is None
            else CsimUnit(self._another(), *self.kernels, another=self._another)
        )

    def make_buffer(self, name: str, data: Bytes) -> Bytes:
        """Return the bytes themselves where they are aligned."""
        return aligned(data, WORD_BYTES)

    def clear(self, *names: str) -> None:
        """Give arguments new buffers: memory that the system has set to zero is taken page by page."""
        for name in names:
            self._buffers.pop(name, None)
        self.fill(*names)

    def _allocate(self, name: str, size: int) -> Bytes:
        return aligned(np.zeros(size, np.uint8), WORD_BYTES)

    def _upload(self, buffer: Bytes, data: Bytes, first: int = 0) -> None:
        buffer[first : first + data.size] = data

    def _download(self, buffer: Bytes, size: int, first: int) -> Bytes:
        return buffer[first : first + size].copy()

    def _set_argument(self, index: int, value: Bytes | int) -> None:
        self._values[index] = value

    def _execute(self) -> None:
        end = len(self.kernel.arguments)
        for function, kernel in reversed([*zip(self._functions, self.kernels, strict=True)]):
            end -= len(kernel.arguments)
            function(*(_c_value(self._values[end + index]) for index in range(len(kernel.arguments))))


def _c_value(value: Bytes | int) -> ctypes.c_uint32 | ctypes.c_void_p:
    if isinstance(value, int):
        return ctypes.c_uint32(value & 0xFFFFFFFF)
    return ctypes.c_void_p(value.ctypes.data)


def open_stepper(artifact: StoredArtifact, options: BackendOptions) -> Stepper:
    """Open an artifact on the C simulation of its kernel; see OpenStepper.

    Raises:
        BackendError: g++ or the ap_types headers are missing, or the sources do not compile.
        UserError: the library cannot be written.
    """
    kernels = accelerator_of(artifact).kernels
    sources, folder = sources_of(artifact), cache_folder() / "csim"

    def library() -> ctypes.CDLL:
        hint = f"free some space there, or set {CACHE} to another folder"
        with os_errors("the C simulation cannot be built", folder, hint):
            private_folder(folder)
            require_own("the libraries of C simulations", folder)
            return open_library(sources, folder)

    return stepper_on(artifact, options, CsimUnit(library(), *kernels, another=library))


def sources_of(artifact: StoredArtifact) -> dict[str, bytes]:
    """Return the C++ files of an artifact's HLS project, by their names in it."""
    names = (PurePosixPath(name) for name in artifact.manifest.files)
    found = (n for n in names if n.parent == PurePosixPath(HLS) and (n.suffix == ".hpp" or n.name in SOURCES))
    return {name.name: artifact.files.data(str(name)) for name in found}
