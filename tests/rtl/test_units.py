"""The units of the engine in RTL, beside what the emitted C++ computes for the same operands."""

import subprocess

import pytest
from hls.library import DESIGNS

from rtl.simulation import HERE, Builder

UNITS = ("multiply", "add", "convert", "divide", "quantize", "activate", "mac_step")
TRIALS = 20_000
PORTS_AND_CORES = (
    "one_port_many_tiles linears three_ports_in_pairs eight_ports_one_row int4 tails eight_rows_eight_cores"
)


@pytest.mark.thorough
@pytest.mark.parametrize("name", PORTS_AND_CORES.split())
def test_every_unit_equals_the_emitted_cpp(rtl_tools: None, builder: Builder, name: str) -> None:
    """Bit for bit, one operand a clock: floats of every kind, subnormal ones too; words at their limits; rows in pairs,
    an odd row with ports in pairs, and one whose last port is alone."""
    made = DESIGNS[name]
    options = (f"-GPORTS={made.ports}", f"-GCORES={made.mlp.cores}", f"-GWEIGHT_BITS={made.mlp.weight_bits}")
    program = builder.build(made, HERE / "units.sv", "units.cpp", f"units_{name}", *options)
    done = subprocess.run([program, str(TRIALS), "3"], capture_output=True, text=True, check=True)
    lines = [line.split() for line in done.stdout.splitlines()]
    assert tuple(unit for unit, _, _ in lines) == UNITS
    assert [unit for unit, _, different in lines if int(different)] == [], done.stderr
    assert min(int(compared) for _, compared, _ in lines) > TRIALS - 100
