"""C simulation libraries, built once for all test processes. Missing tools skip by name, or fail where CI=true."""

from collections.abc import Callable
from functools import cache

import pytest
from conftest import shared_folder
from filelock import FileLock

from hls.library import DESIGNS, OFTEN
from hls.simulation import Simulation

Build = Callable[[str], Simulation]


@pytest.fixture
def csim_tools(require_tool: Callable[[str], str], require_module: Callable[[str], None]) -> None:
    """Skips (or in CI fails) unless g++ and the ap_types headers of hls4ml are there."""
    require_tool("g++")
    require_module("hls4ml")


@pytest.fixture(scope="session")
def build_once(tmp_path_factory: pytest.TempPathFactory) -> Build:
    """`build_once(name)`: the library of DESIGNS[name]; needs `csim_tools`."""
    sources, libraries = tmp_path_factory.mktemp("csim"), shared_folder(tmp_path_factory) / "csim_libraries"
    libraries.mkdir(exist_ok=True)

    @cache
    def build(name: str) -> Simulation:
        with FileLock(libraries / f"{name}.lock"):  # one test process builds it, all of them load it
            return Simulation.build(DESIGNS[name], sources / name, libraries)

    return build


@pytest.fixture(params=[*OFTEN, *(pytest.param(n, marks=pytest.mark.thorough) for n in sorted({*DESIGNS} - {*OFTEN}))])
def design_name(request: pytest.FixtureRequest) -> str:
    """The name of each design in turn."""
    return request.param


@pytest.fixture
def library(csim_tools: None, build_once: Build, design_name: str) -> Simulation:
    """The C simulation of `design_name`."""
    return build_once(design_name)
