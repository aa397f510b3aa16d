"""The TAS unit and DRS controller in C simulation, built once per session without the MLP kernel."""

from __future__ import annotations

from importlib.resources import files

import pytest
from hls.conftest import csim_tools

from drs.tables import LIMITS, Controller, table_for
from fastcar_compile.codegen.hls.csim import build_library
from fastcar_compile.codegen.hls.csim_drs import SOURCES, DrsLibrary
from fastcar_compile.codegen.hls.emit_drs import emit_drs

__all__ = ["csim_tools"]


@pytest.fixture(scope="session")
def _built() -> dict[str, DrsLibrary]:
    return {}


@pytest.fixture
def controller(csim_tools: None, _built: dict[str, DrsLibrary], tmp_path_factory: pytest.TempPathFactory) -> Controller:
    """A controller with the limits of LIMITS; how many rows it has is up to the table."""
    if not _built:
        folder = tmp_path_factory.mktemp("drs")
        for name, text in emit_drs(table_for(), LIMITS).texts.items():
            (folder / name).write_text(text)
        for path in files("hls_templates").iterdir():
            if path.name.endswith(".hpp"):
                (folder / path.name).write_text(path.read_text())
        _built["drs"] = DrsLibrary(build_library(folder, folder / "build", SOURCES))
    return Controller(_built["drs"])
