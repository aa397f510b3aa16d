"""docs/explanation/accelerator.md against the code: the figures of the engine are regenerated."""

from __future__ import annotations

import re
from pathlib import Path

from fastcar_compile.codegen.hls.engine_design import EngineDesign
from fastcar_compile.codegen.hls.spec import MlpSpec
from hls.linear_library import ENGINES, engine

TEXT = (Path(__file__).parents[2] / "docs" / "explanation" / "accelerator.md").read_text()
LLAMA_7B_LINEARS = (
    ("layer_0.qkv", 4096, 12288, False),
    ("layer_0.o", 4096, 4096, False),
    ("head", 4096, 32000, False),
)


def llama_7b(quant: str) -> EngineDesign:
    """LLaMA-2-7B with two rows on two cores; of its layers the first."""
    mlp = MlpSpec(hidden=4096, intermediate=11008, batch=2, layers=32, cores=2, quant=quant)
    return engine(mlp, *LLAMA_7B_LINEARS)


def figures(title: str, made: EngineDesign) -> list[str]:
    """A design as the document shows it; of the layers the first."""
    usage, mlp = made.usage, made.mlp
    lines = [f"{title}: LUT {usage.lut}, FF {usage.ff}, DSP {usage.dsp}, BRAM36 {usage.bram36} (estimates)"]
    lines.append(f"  {'MLP':12}{mlp.stream_bytes:>12} bytes {made.mlp_cycles:>9} clocks")
    for name in ("layer_0.qkv", "layer_0.o", "head"):
        stage = made.linears[name]
        lines.append(f"  {name:12}{stage.stream_bytes:>12} bytes {made.cycles(name):>9} clocks")
    return lines


def test_the_figures_are_those_of_the_designs() -> None:
    (block,) = re.findall(r", for ZCU102:\n\n```\n(.*?)\n```", TEXT, re.DOTALL)
    wanted = figures("example", ENGINES["example"])
    wanted += [line for quant in ("w8a8", "w4a8") for line in figures(f"7B {quant}", llama_7b(quant))]
    assert block.splitlines() == wanted
