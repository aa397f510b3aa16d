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


def test_a_memory_in_luts_takes_no_more_than_the_fifo_that_yosys_counts() -> None:
    """Of 16 words of 128 bits, with its counters."""
    assert 0.6 * measured()["fifo"]["lut"] < usage.memory(128, 16).lut < measured()["fifo"]["lut"]


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


FLUSHED = """module fastcar_product_flushed(input clk, input [31:0] left, right, output reg [31:0] y);
    reg [40:0] low;
    reg [30:0] high;
    reg [47:0] whole;
    reg [24:0] m;
    reg [9:0] sum1, sum2, e;
    reg rest;
    reg [3:0] kind1, kind2, kind3;  // sign, NaN, infinite, zero
    wire left_zero = left[30:23] == 0, right_zero = right[30:23] == 0;
    wire left_top = &left[30:23], right_top = &right[30:23];
    wire nan = left_top && (left[22:0] != 0 || right_zero) || right_top && (right[22:0] != 0 || left_zero);
    wire [32:0] rounded = {e - 10'd127, m[23:1]} + 33'(m[0] && (rest || m[1]));
    wire small = kind3[0] || $signed(rounded[32:23]) <= 0, large = kind3[1] || $signed(rounded[32:23]) >= 255;
    always @(posedge clk) begin
        low <= {1'b1, left[22:0]} * right[16:0];
        high <= {1'b1, left[22:0]} * {1'b1, right[22:17]};
        whole <= 48'(low) + {high, 17'd0};
        m <= whole[47] ? whole[47:23] : whole[46:22];
        rest <= whole[47] ? |whole[22:0] : |whole[21:0];
        sum1 <= 10'(left[30:23]) + 10'(right[30:23]);
        sum2 <= sum1;
        e <= sum2 + 10'(whole[47]);
        kind1 <= {left[31] ^ right[31], nan, left_top || right_top, left_zero || right_zero};
        {kind3, kind2} <= {kind2, kind1};
        y <= kind3[2] ? 32'h7FC00000 : {kind3[3], large ? {8'd255, 23'd0} : small ? 31'd0 : rounded[30:0]};
    end
endmodule
"""
"""A float32 product that takes subnormal numbers as zero, as the operators of Vitis HLS do."""


@pytest.mark.thorough  # of a constant and a module that are both written by hand
def test_the_estimate_of_a_product_is_more_than_yosys_counts(
    require_tool: Callable[[str], str], tmp_path: Path
) -> None:
    """With two DSP slices; the vendor's third takes some of these LUTs."""
    require_tool("yosys")
    (tmp_path / "fastcar_product_flushed.sv").write_text(FLUSHED)
    with imported([BENCHMARKS], ["rtl_resources"]) as scripts:
        unit = scripts.rtl_resources.Unit("product", "product_flushed", "")
        found = scripts.rtl_resources.synthesize(unit, tmp_path)
    assert found["lut"] < usage.FLOAT_MULTIPLY.lut
    assert found["ff"] < usage.FLOAT_MULTIPLY.ff
