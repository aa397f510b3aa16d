"""Resources of every unit that exists as RTL, by yosys. `make resources` is this with --write.

Writes fastcar_compile/codegen/hls/design/rtl_resources.toml, whose figures the resource model takes, and
docs/measurements/rtl_resources.md. yosys maps to UltraScale+ (`synth_xilinx -family xcup`): cells, without placement,
routing or timing.
"""

import argparse
import re
import subprocess
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from pages import MEASUREMENTS, ROOT, write_table
from rtl_cycles import CASES

from fastcar_compile.codegen.hls.project import emit_hls

DATA = ROOT / "fastcar_compile" / "codegen" / "hls" / "design" / "rtl_resources.toml"

SYNTHESIS = "synth_xilinx -family xcup -flatten -nowidelut -noiopad -noclkbuf"

CELLS: dict[str, tuple[str, int]] = {
    **{f"LUT{n}": ("lut", 1) for n in range(1, 7)},
    **{name: ("lut", 1) for name in ("SRL16E", "SRLC32E", "RAM32X1S", "RAM64X1S")},
    **{name: ("lut", 2) for name in ("RAM32X1D", "RAM64X1D")},
    **{name: ("lut", 4) for name in ("RAM32M", "RAM64M")},
    **{name: ("lut", 8) for name in ("RAM32M16", "RAM64M8")},
    **{name: ("ff", 1) for name in ("FDRE", "FDSE", "FDCE", "FDPE")},
    "DSP48E2": ("dsp", 1),
    "RAMB18E2": ("bram18", 1),
    "RAMB36E2": ("bram18", 2),
}
"""Cells and what they take: LUTs, flip-flops, DSP slices, halves of a BRAM36."""


@dataclass(frozen=True)
class Unit:
    """A module with parameters; `does`: what it computes."""

    name: str
    module: str
    does: str
    parameters: dict[str, int] = field(default_factory=dict)


def _array(ports: int, cores: int, bits: int) -> Unit:
    does = f"MAC array, {ports} ports, {cores} core{'s' if cores > 1 else ''}, w{bits}a8"
    sizes = {"PORTS": ports, "CORES": cores, "WEIGHT_BITS": bits}
    return Unit(f"array_{ports}_{cores}_{bits}", "mac_array", does, sizes)


ARRAYS = tuple(_array(*sizes) for sizes in ((4, 1, 4), (4, 1, 8), (4, 2, 4), (4, 2, 8), (2, 3, 8)))
UNITS = (
    Unit("float_multiply", "float_multiply", "float32 product, subnormal numbers too"),
    Unit("float_add", "float_add", "float32 sum, subnormal numbers too"),
    Unit("float_of_int", "float_of_int", "int32 to float32"),
    Unit("inverse_scale", "inverse_scale", "127 / size in float32"),
    Unit("quantize", "quantize", "float32 to int8"),
    Unit("activation", "activation", "SiLU by table, float32"),
    Unit("fifo", "fifo", "FIFO of 16 words of 128 bits", {"BITS": 128, "WORDS": 16}),
    Unit("axi_read", "axi_read", "AXI4 read master of 128 bits with its 1,536 words", {"BITS": 128, "WORDS": 1536}),
    Unit("control", "control", "registers behind AXI4-Lite, 4 addresses", {"ARGUMENTS": 4}),
    Unit("scale", "scale", "scale_tile, 4 ports, a core, w4a8", {"TILE": 8, "TILE_SUMS": 256, "SCALE_WORDS": 32}),
    Unit("fetch", "fetch", "fetch_tile, 4 ports"),
    Unit("finish", "finish", "finish_tile with SiLU, 4 ports, a core", {"TILE": 8, "RESULT_WORDS": 8}),
    Unit("fixed_product", "fixed_product", "product of two float32 in units of 2^-24"),
    Unit("decide", "decide", "decision by tas, keys of 4,096 elements", {"KEY_WORDS": 1024}),
    *ARRAYS,
)


ENGINE = Unit("engine", "engine", "all of a linear and an MLP: VILA-U 7B on ZCU102, 4 ports, a core, w4a8")
"""The first design of rtl_cycles.py. Two minutes."""


def synthesize(unit: Unit, folder: Path) -> dict[str, int]:
    """Return LUTs, flip-flops, DSP slices and halves of a BRAM36 of a unit.

    Args:
        folder: of the sources of a project, which have the sizes of its design.

    Raises:
        SystemExit: yosys found an error, or made a cell of another kind.
    """
    module = f"fastcar_{unit.module}"
    tops = ("fastcar_product.sv", "fastcar_engine.v")
    paths = sorted(path for path in folder.glob("*.*v") if unit is ENGINE or path.name not in tops)
    sources = f"-I{folder} " + " ".join(map(str, paths))
    sizes = "".join(f"chparam -set {name} {value} {module}; " for name, value in unit.parameters.items())
    script = f"read_verilog -sv {sources}; {sizes}{SYNTHESIS} -top {module}; tee -o /dev/stdout stat"
    done = subprocess.run(["yosys", "-q", "-p", script], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{module}: {done.stderr}")
    found: dict[str, int] = dict.fromkeys(("lut", "ff", "dsp", "bram18"), 0)
    for cell, count in re.findall(r"^ +([A-Z]\w+) +(\d+)$", done.stdout, re.MULTILINE):
        # A carry chain lies beside its LUTs, and an inverter goes into the cell that it leads to.
        if cell not in ("CARRY4", "CARRY8", "INV"):
            kind, each = CELLS[cell]
            found[kind] += each * int(count)
    return found


def version() -> str:
    """Return the version of yosys."""
    return subprocess.run(["yosys", "-V"], capture_output=True, text=True, check=True).stdout.split(" (")[0]


def main() -> None:
    """Measure every unit; write the data file and the document on request."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the data file and the document")
    arguments = parser.parse_args()
    note = f"# {version()}, `{SYNTHESIS}`: make resources. Do not edit.\n"
    data, lines = [note], ["| unit | LUT | FF | DSP | BRAM36 |\n|---|---|---|---|---|\n"]
    with tempfile.TemporaryDirectory() as folder:
        emit_hls(CASES[0].design, Path(folder))
        counts = [(unit, synthesize(unit, Path(folder) / "rtl")) for unit in (*UNITS, ENGINE)]
    for unit, found in counts:
        print(unit.name, found, flush=True)
        data.append(f"\n[{unit.name}]\n" + "".join(f"{kind} = {count}\n" for kind, count in found.items()))
        lut, ff, dsp, halves = found.values()
        lines.append(f"| {unit.does} | {lut:,} | {ff:,} | {dsp} | {halves / 2:g} |\n")
    model = CASES[0].design.usage
    what = "estimate of that engine, which decodes instructions, too"
    lines.append(f"| {what} | {model.lut:,} | {model.ff:,} | {model.dsp} | {model.bram36} |\n")
    if not arguments.write:
        return
    DATA.write_text("".join(data))
    write_table(MEASUREMENTS / "rtl_resources.md", "rows", "".join(lines))


if __name__ == "__main__":
    main()
