"""The emitted HLS sources as a library, built with g++."""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import os
import shutil
import subprocess
import tempfile
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path

from fastcar_compile import processes
from fastcar_compile.errors import BackendError

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
KERNELS = ("fastcar_engine.cpp", "fastcar_step.cpp")
"""The kernels; a project has one of them."""

SOURCES = ("fastcar_csim.cpp", *KERNELS)
"""What a library is built from: the exact sums, and the project's kernel."""

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


def folder_sources(folder: Path, names: Sequence[str] = SOURCES) -> dict[str, bytes]:
    """Return the headers of a project's folder, and those of these sources that it has, by name."""
    paths = [*folder.glob("*.hpp"), *(folder / name for name in names)]
    return {path.name: path.read_bytes() for path in paths if path.is_file()}


def open_library(files: Mapping[str, bytes], build_dir: Path, defines: Sequence[str] = ()) -> ctypes.CDLL:
    """Compile a project (as `emit_hls` writes it) in `build_dir`, or take the library already built; load a copy.

    Each call is an accelerator of its own: the engine keeps its control table from call to call, and a process loads
    the same file only once. The copy's file is not needed any more. The library is unloaded with the last function of
    it.

    Args:
        files: sources and headers by name. defines: macros of the build, such as those of `counters.py`.

    Raises:
        BackendError: a source, g++ or the ap_types headers are missing, or the sources do not compile.
    """
    kernel = next((name for name in KERNELS if name in files), KERNELS[0])
    path = build_library(files, build_dir, (SOURCES[0], kernel), defines)
    # NFS keeps the name of a file that is mapped.
    with tempfile.TemporaryDirectory(dir=path.parent, prefix="fastcar-", ignore_cleanup_errors=True) as folder:
        library = ctypes.CDLL(str(shutil.copy(path, folder)))
    weakref.finalize(library, _unload, library._handle).atexit = False
    return library


def _unload(handle: int) -> None:
    ctypes.CDLL(None).dlclose(ctypes.c_void_p(handle))


def build_library(
    files: Mapping[str, bytes], build_dir: Path, sources: Sequence[str], defines: Sequence[str] = ()
) -> Path:
    """Return the library built from these sources; it is compiled unless `build_dir` holds it already.

    Args:
        files: sources and headers by name. sources: those of them that are compiled.

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
            text = done.stderr.replace(f"{written}/", "").strip()[:2000]
            raise BackendError(
                f"g++ could not build the C simulation:\n{text}",
                where=", ".join(sources),
                hint="compile the model again; if it persists, report it with this text",
            )
        os.replace(output, path)
