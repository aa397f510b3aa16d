"""The TAS unit and DRS controller in C simulation, built once without the MLP kernel."""

import ctypes
from importlib.resources import files

import pytest
from conftest import shared_folder
from filelock import FileLock
from hls.conftest import csim_tools
from hls.sources import folder_sources

from drs.tables import LIMITS, Controller, table_for
from drs.unit import DrsUnit
from fastcar_compile.codegen.hls.interface import drs_interface
from fastcar_compile.codegen.hls.project import emit_drs
from fastcar_compile.runtime.backends.hls_csim import CsimUnit, build_library

__all__ = ["csim_tools"]

WORDS = 1 << 17
CONTROLLER = ("fastcar_drs.cpp",)
"""Of a table, q and the keys: more than any test has."""


@pytest.fixture(scope="session")
def _built() -> dict[str, Controller]:
    return {}


@pytest.fixture
def controller(csim_tools: None, _built: dict[str, Controller], tmp_path_factory: pytest.TempPathFactory) -> Controller:
    """A controller with the limits of LIMITS; how many rows it has is up to the table."""
    if not _built:
        folder = tmp_path_factory.mktemp("drs")
        for name, text in emit_drs(table_for(), LIMITS).items():
            (folder / name).write_text(text)
        for path in files("hls_templates").iterdir():
            if path.name.endswith(".hpp"):
                (folder / path.name).write_text(path.read_text())
        libraries = shared_folder(tmp_path_factory) / "csim_libraries"
        libraries.mkdir(exist_ok=True)
        with FileLock(libraries / "drs.lock"):
            library = ctypes.CDLL(str(build_library(folder_sources(folder, CONTROLLER), libraries, CONTROLLER)))
        kernel = drs_interface(WORDS, query_words=WORDS, key_words=WORDS).part
        _built["drs"] = Controller(DrsUnit(CsimUnit(library, kernel)))
    return _built["drs"]
