"""`fastcar hls-report`: what the tools made of a kernel, against what its artifact says."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

import fastcar_compile as fc
from fastcar_compile.cli.common import ExitCode, JsonOption, command
from fastcar_compile.cli.options import existing
from fastcar_compile.cli.output import print_result, print_table, print_text
from fastcar_compile.errors import count_text

if TYPE_CHECKING:
    from fastcar_compile.report.tool_reports import ReportCheck

TOLERANCE = 0.1


@command
def hls_report_command(
    artifact: Annotated[Path, Argument()],
    folder: Annotated[Path, Argument()],
    tolerance: Annotated[float, Option(min=0)] = TOLERANCE,
    as_json: JsonOption = False,
) -> ExitCode:
    """Compare reports of Vitis HLS and Vivado with the model.

    Reads csynth.xml, Vivado's utilisation and timing, and what `make reports` wrote, in the folder and below it.

    Args:
        artifact: Folder of the artifact that the kernel is of.
        folder: Where the tools have written, such as board/build.
        tolerance: Share by which a depth or a resource may exceed the model; an interval or a clock may not.
    """
    from fastcar_compile.codegen.hls.model.expected import expected_of
    from fastcar_compile.report.tool_reports import compared, read_reports

    expected = expected_of(fc.load(artifact))
    found = read_reports(existing(folder, "folder"), expected.kernel)
    checks = compared(expected, found, tolerance)
    worse = sum(check.worse for check in checks)
    result = {
        "kernel": expected.kernel,
        "files": [str(path) for path in found.files],
        "tolerance": tolerance,
        "checks": [check.to_json() for check in checks],
        "worse": worse,
    }
    print_result(as_json, result, lambda: _show(checks, worse))
    return ExitCode.MISMATCH if worse else ExitCode.OK


_TITLES = ("", "what", ">model", ">tool", "source")


def _show(checks: list[ReportCheck], worse: int) -> None:
    """Print what differs, worse first; equal figures of loops are counted alone."""
    shown = sorted((c for c in checks if c.kind != "loop" or c.model != c.tool), key=lambda c: not c.worse)
    rows = (("worse" if c.worse else "", c.what, f"{c.model:.10g}", f"{c.tool:.10g}", c.source) for c in shown)
    print_table(_TITLES, rows)
    equal = count_text(len(checks) - len(shown), "figure")
    print_text(f"\n{equal} of loops as in the model; {count_text(worse, 'figure')} worse")
