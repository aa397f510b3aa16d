"""docs/reference/drs_table.md against the code: the example is regenerated, the tables of numbers are compared."""

import re
from pathlib import Path

from fastcar_compile.codegen.hls.control_table.builder import build_table
from fastcar_compile.codegen.hls.control_table.reader import Header
from fastcar_compile.codegen.hls.control_table.table import AttentionShape, TableStatus
from fastcar_compile.codegen.hls.design.controller import (
    ControlOp,
    ControlWork,
    control_loops,
    controller_cycles,
    controller_usage,
)

DOCS = Path(__file__).parents[2] / "docs"
TEXT = (DOCS / "reference" / "drs_table.md").read_text()
EXAMPLE = build_table(
    *(2, 2, 2, 64, [0.75, float("inf")]), attention=AttentionShape(4, 2, 32), scales=[0.25, None], max_chain=3
)


def dump(data: bytes) -> str:
    """Sixteen bytes a line, in groups of four."""
    return "\n".join(f"{at:04x}  {data[at : at + 16].hex(' ', -4)}" for at in range(0, len(data), 16))


def rows_of(section: str) -> dict[int, str]:
    """First two columns of the section's table."""
    body = TEXT.split(f"{section}\n", 1)[1].split("\n#", 1)[0]
    return {int(value): name for value, name in re.findall(r"^\| (\d+) \| (\w+) \|", body, re.MULTILINE)}


def test_the_example_is_what_the_code_writes() -> None:
    blocks = re.findall(r"```\n(.*?)\n```", TEXT, re.DOTALL)
    assert blocks == [dump(EXAMPLE.to_bytes())]


def test_statuses_are_those_of_the_code() -> None:
    assert rows_of("## Checks and statuses") == {s.value: s.name for s in TableStatus}


def test_the_header_is_that_of_the_code() -> None:
    body = TEXT.split("## Binary\n", 1)[1].split("\n#", 1)[0]
    fields = re.findall(r"^\| (\d+) \| (\w+) \|", body, re.MULTILINE)
    assert fields == [(str(i), name) for i, name in enumerate(Header._fields)]


def test_clocks_and_memories_are_those_of_the_explanation() -> None:
    """docs/explanation/accelerator.md: the example, and LLaMA-2-7B with one row, whose layer 1 has no gate."""
    text = (DOCS / "explanation" / "accelerator.md").read_text()
    example = build_table(4, 2, 2, 256, [0.0] * 4, attention=AttentionShape(4, 4, 32), scales=[1.0] * 4)
    assert f"The example (B = 2, four heads of 32) takes {controller_cycles(example)}" in text
    scales = [None if layer == 1 else 1.0 for layer in range(32)]
    table = build_table(32, 1, 8, 64, [0.0] * 32, attention=AttentionShape(32, 32, 128), scales=scales)
    assert f"LLaMA-2-7B with one row takes {controller_cycles(table):,}" in text
    loaded = sum(loop.cycles for loop in control_loops(ControlWork(ControlOp.TABLE, table)))
    assert f"Loading its table takes {loaded} clocks" in text
    usage = controller_usage(table.limits)
    assert f"{usage.dsp} DSP and {usage.bram36} BRAM36" in text
