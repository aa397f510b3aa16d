"""The cores of a decode step as a library, built once for all test processes."""

import ctypes
from functools import cache
from pathlib import Path
from typing import Protocol

import numpy as np
import pytest
from conftest import shared_folder
from filelock import FileLock
from hls.conftest import csim_tools
from hls.sources import folder_sources, headers

from fastcar_compile.codegen.hls.design.step_usage import StepDesign
from fastcar_compile.codegen.hls.project import emit_hls
from fastcar_compile.runtime.backends.hls_csim import aligned, build_library, open_library
from step.decoder import Decoder
from step.kernel import Kernel
from step.values import Array

__all__ = ["csim_tools"]


class Cores:
    """The functions of a source beside this file; arrays are copied to whole memory words and back."""

    def __init__(self, path: Path) -> None:
        self._library = ctypes.CDLL(str(path))

    def __call__(self, name: str, *arguments: Array | int | float) -> list[Array]:
        """Call `step_<name>`; return its arrays as they are afterwards, and what the function returned last."""
        copies = [_words(a) if isinstance(a, np.ndarray) else a for a in arguments]
        done = getattr(self._library, f"step_{name}")(*(_passed(a) for a in copies))
        given = [a for a in arguments if isinstance(a, np.ndarray)]
        made = [a for a in copies if isinstance(a, np.ndarray)]
        views = [m.view(g.dtype)[: g.size].reshape(g.shape) for m, g in zip(made, given, strict=True)]
        return [*views, np.array(done)]


def _words(array: Array) -> Array:
    """Return a copy of the bytes at an address of whole memory words."""
    return aligned(np.frombuffer(array.tobytes(), np.uint8).copy())


def _passed(value: Array | int | float) -> ctypes.c_void_p | ctypes.c_uint32 | ctypes.c_float:
    if isinstance(value, np.ndarray):
        return ctypes.c_void_p(value.ctypes.data)
    return ctypes.c_float(value) if isinstance(value, float) else ctypes.c_uint32(value)


class Build(Protocol):
    """`build(name, texts)`: a library of a source beside this file."""

    def __call__(self, name: str, texts: tuple[tuple[str, str], ...] = ()) -> Cores: ...


@pytest.fixture(scope="session")
def build_cores(tmp_path_factory: pytest.TempPathFactory) -> Build:
    """`build_cores(name, texts)`: the library of name.cpp, with these headers besides those of the package."""
    folder = shared_folder(tmp_path_factory) / "step_cores"
    folder.mkdir(exist_ok=True)

    @cache
    def build(name: str, texts: tuple[tuple[str, str], ...] = ()) -> Cores:
        source = Path(__file__).with_name(f"{name}.cpp")
        own = {source.name: source.read_bytes(), **{header: text.encode() for header, text in texts}}
        with FileLock(folder / "lock"):  # one test process builds it, all of them load it
            return Cores(build_library(headers() | own, folder, [source.name]))

    return build


class BuildKernel(Protocol):
    """`build(made, group)`: a kernel for the test's decoder with runs of so many query heads, and fresh memory."""

    def __call__(self, made: Decoder, group: int, defines: tuple[str, ...] = ()) -> Kernel: ...


@pytest.fixture(scope="session")
def build_kernel(tmp_path_factory: pytest.TempPathFactory) -> BuildKernel:
    """`build_kernel(made, group)`; a project is compiled once for all test processes."""
    folder = shared_folder(tmp_path_factory) / "step_kernels"
    folder.mkdir(exist_ok=True)

    def build(made: Decoder, group: int, defines: tuple[str, ...] = ()) -> Kernel:
        step, project = StepDesign.of(made.program, group), tmp_path_factory.mktemp("step_project")
        emit_hls(made.made, project, made.table, step=step)
        with FileLock(folder / "lock"):
            return Kernel(open_library(folder_sources(project), folder, defines), made, step)

    return build


@pytest.fixture
def cores(csim_tools: None, build_cores: Build) -> Cores:
    """Rows, norms and the cache."""
    return build_cores("cores")


@pytest.fixture
def attention_cores(csim_tools: None, build_cores: Build) -> Cores:
    """Attention."""
    return build_cores("attention")
