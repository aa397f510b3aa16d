"""The emitted HLS sources as a library, built with g++."""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import os
import shutil
import subprocess
import weakref
from collections.abc import Sequence
from pathlib import Path

from fastcar_compile import processes
from fastcar_compile.errors import BackendError
from fastcar_compile.undo import scratch_folder

FLAGS = [
    "-std=c++14",
    "-O2",
    "-ffp-contract=off",
    "-fno-strict-aliasing",
    "-Wall",
    "-Wextra",
    "-Werror",
    "-Wno-unknown-pragmas",
    "-fPIC",
    "-fno-gnu-unique",  # a library with such symbols is never unloaded
    "-shared",
]
SOURCES = ("fastcar_csim.cpp", "fastcar_engine.cpp")
"""What a library is built from: the kernel, and the exact sums."""

INSTALL_EXTRA = "install the extra `csim`: pip install 'fastcar_compile[csim]'"


def ap_types_folder() -> Path:
    """Return the folder of ap_int.h: $AP_TYPES, else the one in the installed hls4ml, which is found but not imported.

    Raises:
        BackendError: there is none.
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
        BackendError: it is not installed.
    """
    name = os.environ.get("CXX", "g++")
    path = shutil.which(name)
    if path is None:
        raise BackendError(
            f"the C simulation needs {name}, which is not on PATH",
            hint="install it (Debian: apt install g++) and, for the ap_types headers, the extra `csim`",
        )
    return path


def open_library(hls_dir: Path, build_dir: Path, defines: Sequence[str] = ()) -> ctypes.CDLL:
    """Compile a project (as `emit_hls` writes it) into `build_dir`, or take the library already built; load a copy.

    Each call is an accelerator of its own: the engine keeps its prefetch buffer from call to call, and a process loads
    the same file only once. The copy's file is not needed any more. The library is unloaded with the last function of
    it.

    Args:
        defines: macros of the build, such as those of `counters.py`.

    Raises:
        BackendError: g++ or the ap_types headers are missing, or the sources do not compile.
    """
    path = build_library(hls_dir, build_dir, defines=defines)
    with scratch_folder(path.parent) as folder:
        library = ctypes.CDLL(str(shutil.copy(path, folder)))
    weakref.finalize(library, _unload, library._handle).atexit = False
    return library


def _unload(handle: int) -> None:
    ctypes.CDLL(None).dlclose(ctypes.c_void_p(handle))


def build_library(
    hls_dir: Path, build_dir: Path, sources: Sequence[str] = SOURCES, defines: Sequence[str] = ()
) -> Path:
    """Return the library built from these sources of `hls_dir`; it is compiled unless `build_dir` holds it already.

    Raises:
        BackendError: a source, g++ or the ap_types headers are missing, or the sources do not compile.
    """
    command = [
        compiler(),
        *FLAGS,
        *(f"-D{name}" for name in defines),
        f"-I{hls_dir}",
        "-isystem",
        str(ap_types_folder()),
    ]
    path = build_dir / f"fastcar_csim_{_digest(hls_dir, sources, command)}.so"
    if not path.is_file():
        build_dir.mkdir(parents=True, exist_ok=True)
        _compile(command, hls_dir, sources, path)
    return path


def _digest(hls_dir: Path, names: Sequence[str], command: Sequence[str]) -> str:
    missing = [name for name in names if not (hls_dir / name).is_file()]
    if missing:
        raise BackendError(
            f"HLS sources are missing: {', '.join(missing)}", where=str(hls_dir), hint="compile the model again"
        )
    version = subprocess.run([command[0], "--version"], capture_output=True, text=True, check=False).stdout
    options = [option for option in command[1:] if option != f"-I{hls_dir}"]
    digest = hashlib.sha256("\0".join([version, *options]).encode())
    for path in sorted([*hls_dir.glob("*.hpp"), *(hls_dir / name for name in names)]):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:24]


def _compile(command: Sequence[str], hls_dir: Path, names: Sequence[str], path: Path) -> None:
    """Build to a temporary name, then rename: a killed build leaves no half library under the final name."""
    with scratch_folder(path.parent) as folder:
        output = folder / path.name
        sources = [str(hls_dir / name) for name in names]
        done = processes.run([*command, *sources, "-o", str(output)], {"TMPDIR": str(folder)})
        if done.returncode:
            raise BackendError(
                f"g++ could not build the C simulation:\n{done.stderr.strip()[:2000]}",
                where=str(hls_dir),
                hint="compile the model again; if it persists, report it with this text",
            )
        os.replace(output, path)
