"""Benches of the RTL, built once for all test processes. Missing tools skip by name, or fail where CI=true."""

from collections.abc import Callable
from functools import cache

import pytest
from conftest import shared_folder
from filelock import FileLock
from hls.library import DESIGNS

from rtl.simulation import Builder, LinearBench

Bench = Callable[[str], LinearBench]


@pytest.fixture
def rtl_tools(require_tool: Callable[[str], str], require_module: Callable[[str], None]) -> None:
    """Skips (or in CI fails) unless Verilator, g++ and the ap_types headers of hls4ml are there."""
    require_tool("verilator")
    require_tool("g++")
    require_module("hls4ml")


@pytest.fixture(scope="session")
def builder(tmp_path_factory: pytest.TempPathFactory) -> Builder:
    """What builds benches, all of them with one copy of Verilator's library."""
    folder = shared_folder(tmp_path_factory) / "rtl"
    folder.mkdir(exist_ok=True)
    return Builder(folder)


@pytest.fixture(scope="session")
def linear_bench(builder: Builder) -> Bench:
    """`linear_bench(name)`: the linear of DESIGNS[name]; needs `rtl_tools`."""

    @cache
    def build(name: str) -> LinearBench:
        with FileLock(builder.folder / "lock"):
            return LinearBench(DESIGNS[name], builder, name)

    return build
