"""Benches of the RTL, built once for all test processes. Missing tools skip by name, or fail where CI=true."""

from collections.abc import Callable
from functools import cache

import pytest
from conftest import shared_folder
from filelock import FileLock
from hls.library import DESIGNS, design

from rtl.simulation import Builder, EngineBench

Bench = Callable[[str], EngineBench]

RELU_DESIGNS = {
    "relu": design(37, 53, 3, 2, ports=4, gated=False, activation="relu"),
    "squared_relu": design(37, 153, 3, 2, ports=4, gated=False, activation="relu2", quant="w4a8"),
}
"""Activations without a table, which no other design has."""


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
def engine_bench(builder: Builder) -> Bench:
    """`engine_bench(name)`: the engine of a design by its name; needs `rtl_tools`."""

    @cache
    def build(name: str) -> EngineBench:
        with FileLock(builder.folder / "lock"):
            return EngineBench((DESIGNS | RELU_DESIGNS)[name], builder, name)

    return build
