"""docs/explanation/accelerator.md against the code: its figures are regenerated."""

import re
from pathlib import Path

from fastcar_compile.codegen.hls.design.design import Design
from hls.library import DESIGNS, EXAMPLE, design
from hls.test_designs_and_packing import LLAMA_7B_LINEARS

TEXT = (Path(__file__).parents[2] / "docs" / "explanation" / "accelerator.md").read_text()


def example() -> list[str]:
    """The design of the example's MLPs as the document shows it."""
    made = DESIGNS["example"]
    usage, budget = made.usage, made.budget
    lines = [f"weight ports {made.ports}, lanes {made.lanes}, stream of one layer {made.stream_bytes} bytes"]
    for name, product in (("gate/up", made.gate_up), ("down", made.down)):
        lines.append(
            f"{name}: {product.channels} channels of {product.inputs}, {product.tiles} tiles of {product.tile} rows"
        )
    pairs = [("LUT", usage.lut, budget.lut), ("FF", usage.ff, budget.ff), ("DSP", usage.dsp, budget.dsp)]
    pairs.append(("BRAM36", usage.bram36, budget.bram36))
    lines.append("estimate: " + ", ".join(f"{name} {used} of {limit}" for name, used, limit in pairs))
    lines.append(f"estimate: {made.mlp_cycles()} clocks at {budget.clock_mhz:g} MHz when a row computes")
    return lines


def with_linears(title: str, made: Design) -> list[str]:
    """A design as the document shows it; of the layers the first."""
    usage = made.usage
    lines = [f"{title}: LUT {usage.lut}, FF {usage.ff}, DSP {usage.dsp}, BRAM36 {usage.bram36} (estimates)"]
    lines.append(f"  {'MLP':12}{made.stream_bytes:>12} bytes {made.mlp_cycles():>9} clocks")
    for name in ("layer_0.qkv", "layer_0.o", "head"):
        lines.append(f"  {name:12}{made.linears[name].stream_bytes:>12} bytes {made.cycles(name):>9} clocks")
    return lines


def test_the_figures_of_the_example_are_those_of_the_design() -> None:
    (block,) = re.findall(r"zcu102:\n\n```\n(.*?)\n```", TEXT, re.DOTALL)
    assert block.splitlines() == example()


def test_the_figures_with_linears_are_those_of_the_designs() -> None:
    (block,) = re.findall(r", for ZCU102:\n\n```\n(.*?)\n```", TEXT, re.DOTALL)
    wanted = with_linears("example", design(128, 352, 2, 2, linears=EXAMPLE))
    for quant in ("w8a8", "w4a8"):
        made = design(4096, 11008, 2, 2, layers=32, linears=LLAMA_7B_LINEARS, quant=quant)
        wanted += with_linears(f"7B {quant}", made)
    assert block.splitlines() == wanted
