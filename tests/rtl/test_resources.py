"""The constants of the resource model against what yosys counts of the RTL."""

import tomllib
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path

import pytest
from conftest import imported

from fastcar_compile.codegen.hls.design import usage

DATA = files("fastcar_compile.codegen.hls.design") / "rtl_resources.toml"
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
CLOSE = 0.1


def measured() -> dict[str, dict[str, int]]:
    """The data file: unit, resource, count."""
    return tomllib.loads(DATA.read_text())


@pytest.mark.parametrize("name", [name for name in measured() if name.startswith("array_")])
def test_the_formula_of_the_array_is_what_yosys_counts(name: str) -> None:
    ports, cores, bits = map(int, name.split("_")[1:])
    lanes, found = 128 // bits, measured()[name]
    assert sum(usage.adders(cores, ports, lanes)) == pytest.approx(found["lut"], rel=CLOSE)
    assert lanes * usage.multipliers(cores, ports) == found["dsp"]


def test_the_buffers_of_a_read_port_are_what_yosys_counts() -> None:
    """Those of the bursts under way, and the FIFO of a weight port."""
    counted = usage.READS.blocks(16) + usage.bram_blocks(128, usage.FIFO_WORDS)
    assert 2 * counted == measured()["axi_read"]["bram18"]


def test_the_table_of_an_activation_is_what_yosys_counts() -> None:
    assert 2 * usage.bram_blocks(*usage.FACTOR_ROM) == measured()["activation"]["bram18"]


@pytest.mark.thorough
def test_the_data_file_is_of_these_sources(require_tool: Callable[[str], str], tmp_path: Path) -> None:
    """`make resources` writes it."""
    require_tool("yosys")
    with imported([BENCHMARKS], ["rtl_resources"]) as scripts:
        script = scripts.rtl_resources
        script.emit_hls(script.CASES[0].design, tmp_path)
        for unit in script.UNITS:
            for kind, count in script.synthesize(unit, tmp_path / "rtl").items():
                assert count == pytest.approx(measured()[unit.name][kind], rel=CLOSE), (unit.name, kind)
