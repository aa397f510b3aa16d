"""docs/reference/drs_table.md against the code: the example is regenerated, the tables of numbers are compared."""

import re
from pathlib import Path

from fastcar_compile.codegen.hls.control_table.builder import build_table
from fastcar_compile.codegen.hls.control_table.reader import Header
from fastcar_compile.codegen.hls.control_table.table import AttentionShape, Status

TEXT = (Path(__file__).parents[2] / "docs" / "reference" / "drs_table.md").read_text()
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
    assert rows_of("## Checks and statuses") == {s.value: s.name for s in Status}


def test_the_header_is_that_of_the_code() -> None:
    body = TEXT.split("## Binary\n", 1)[1].split("\n#", 1)[0]
    fields = re.findall(r"^\| (\d+) \| (\w+) \|", body, re.MULTILINE)
    assert fields == [(str(i), name) for i, name in enumerate(Header._fields)]
