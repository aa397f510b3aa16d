"""C simulation: the emitted HLS sources built with g++ and called through ctypes."""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from fastcar_compile.codegen.hls.csim_drs import DrsLibrary, aligned
from fastcar_compile.errors import BackendError, InputError, UserError

Array = NDArray[Any]

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
    "-shared",
]
INSTALL_EXTRA = "install the extra `csim`: pip install 'fastcar_compile[csim]'"


def ap_types_folder() -> Path:
    """The folder of ap_int.h: $AP_TYPES, else the one in the installed hls4ml, which is found but not imported.

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
    """The path of g++ ($CXX if set).

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


class CsimLibrary:
    """One emitted HLS project as a loaded library. Calls release the GIL.

    Args:
        path: the shared library. prefix: what its entries' names begin with.

    Attributes:
        drs: its TAS unit and DRS controller; only of a library with the prefix `fastcar_csim`.
        prefetch_bytes: of the prefetch buffer, all ports; 0: there is none.
    """

    SOURCES: ClassVar[tuple[str, ...]] = (
        "csim_drs_entry.cpp",
        "csim_entry.cpp",
        "fastcar_drs.cpp",
        "fastcar_mlp.cpp",
    )

    def __init__(self, path: Path, prefix: str = "fastcar_csim") -> None:
        self._library, self._prefix = ctypes.CDLL(str(path)), prefix
        self.drs = DrsLibrary(self._library)
        sizes = (ctypes.c_uint64 * 10)()
        self._entry("sizes")(sizes)
        self.hidden, self.intermediate, self.batch, self.cores, self.stream_bytes = (int(s) for s in sizes[:5])
        self._weight_bits, self._matrices, self._first_sums, self._down_sums = (int(s) for s in sizes[5:9])
        self.prefetch_bytes = int(sizes[9])

    def _entry(self, name: str) -> Any:
        return getattr(self._library, f"{self._prefix}_{name}")

    @classmethod
    def build(cls, hls_dir: Path, build_dir: Path) -> Self:
        """Compile `hls_dir` (as written by emit_hls) into `build_dir`, or take the library already built from it.

        Each call is an accelerator of its own: a kernel keeps its prefetch buffer from call to call, and a process
        loads the same file only once. So a copy is loaded, whose file is not needed any more.

        Raises:
            BackendError: g++ or the ap_types headers are missing, or the sources do not compile.
        """
        path = build_library(hls_dir, build_dir, cls.SOURCES)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            return cls(Path(shutil.copy(path, folder)))

    def mlp(self, x: Array, index_register: int, cached: Array, weights: Array, *, held: bool = False) -> Array:
        """One kernel call.

        Args:
            x: float32 [B, H].
            index_register: bit b = 1: row b computes, 0: row b is copied from `cached`.
            cached: float32 [B, H].
            weights: uint8 [stream bytes] of one layer; not read when no row computes.
            held: the prefetch buffer holds the beginning of these weights, and is read instead of it.

        Returns:
            float32 [B, H].
        """
        x, cached = self._rows("x", x), self._rows("cached", cached)
        stream = self._stream(weights)
        y = np.empty_like(x)
        register = ctypes.c_uint32(index_register & 0xFFFFFFFF)
        self._entry("mlp")(_at(x), register, _at(cached), _at(stream), _at(y), ctypes.c_uint32(held))
        return y

    def prefetch(self, weights: Array) -> None:
        """Fill the prefetch buffer with the beginning of these weights (uint8 [stream bytes])."""
        stream = self._stream(weights)
        self._entry("prefetch")(_at(stream))

    def mlp_accumulators(self, x: Array, weights: Array) -> tuple[Array, ...]:
        """The exact sums of every row of x (float32 [B, H]), from the kernel's own compute cores.

        Returns:
            Per linear, in the order of `pack_mlp`: int32 [B, N]; for w4a8 int32 [B, N, groups].
        """
        x, stream = self._rows("x", x), self._stream(weights)
        parts = self._matrices - 1
        first = np.empty((self.batch, self.intermediate, parts, self._first_sums), np.int32)
        down = np.empty((self.batch, self.hidden, self._down_sums), np.int32)
        for row in range(self.batch):
            self._entry("accumulators")(_at(x[row]), _at(stream), _at(first[row]), _at(down[row]))
        sums = (*(first[:, :, part] for part in range(parts)), down)
        return sums if self._weight_bits == 4 else tuple(s[..., 0] for s in sums)

    def _rows(self, name: str, rows: Array) -> Array:
        if rows.shape != (self.batch, self.hidden) or rows.dtype != np.float32:
            raise InputError(
                f"{name} is {rows.dtype} {list(rows.shape)}; the kernel takes float32 {[self.batch, self.hidden]}"
            )
        return np.ascontiguousarray(rows)

    def _stream(self, weights: Array) -> Array:
        if weights.shape != (self.stream_bytes,) or weights.dtype != np.uint8:
            raise UserError(
                f"the weight stream is {weights.dtype} {list(weights.shape)}; the kernel takes uint8 "
                f"[{self.stream_bytes}]",
                hint="pack the weights with pack_mlp and the design of these sources",
            )
        stream = np.ascontiguousarray(weights)
        return aligned(stream)


def build_library(hls_dir: Path, build_dir: Path, sources: Sequence[str]) -> Path:
    """Compile these sources of `hls_dir` into `build_dir`, or find the library already built from them; its path.

    Raises:
        BackendError: a source, g++ or the ap_types headers are missing, or the sources do not compile.
    """
    cxx, headers = compiler(), ap_types_folder()
    path = build_dir / f"fastcar_csim_{_digest(hls_dir, sources, cxx, headers)}.so"
    if not path.is_file():
        build_dir.mkdir(parents=True, exist_ok=True)
        _compile(cxx, headers, hls_dir, sources, path)
    return path


def _at(array: Array) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)


def _digest(hls_dir: Path, names: Sequence[str], cxx: str, headers: Path) -> str:
    missing = [name for name in names if not (hls_dir / name).is_file()]
    if missing:
        raise BackendError(
            f"HLS sources are missing: {', '.join(missing)}", where=str(hls_dir), hint="compile the model again"
        )
    version = subprocess.run([cxx, "--version"], capture_output=True, text=True, check=False).stdout
    digest = hashlib.sha256("\0".join([version, str(headers), *FLAGS]).encode())
    for path in sorted([*hls_dir.glob("*.hpp"), *(hls_dir / name for name in names)]):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:24]


def _compile(cxx: str, headers: Path, hls_dir: Path, names: Sequence[str], path: Path) -> None:
    """Build to a temporary name, then rename: a killed build leaves no half library under the final name."""
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        output = Path(folder) / path.name
        sources = [str(hls_dir / name) for name in names]
        command = [cxx, *FLAGS, f"-I{hls_dir}", "-isystem", str(headers), *sources, "-o", str(output)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise BackendError(
                f"g++ could not build the C simulation:\n{done.stderr.strip()[:2000]}",
                where=str(hls_dir),
                hint="compile the model again; if it persists, report it with this text",
            )
        os.replace(output, path)
