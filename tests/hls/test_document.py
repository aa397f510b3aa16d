"""docs/explanation/accelerator.md against the code: its figures are regenerated."""

import re
from pathlib import Path

from hls.library import DESIGNS

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


def test_the_figures_of_the_example_are_those_of_the_design() -> None:
    (block,) = re.findall(r"zcu102:\n\n```\n(.*?)\n```", TEXT, re.DOTALL)
    assert block.splitlines() == example()
