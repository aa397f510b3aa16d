"""`fastcar doctor`: whether this machine has what the package needs."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from fastcar_compile.cli.common import ExitCode, JsonOption, command
from fastcar_compile.cli.output import Column, print_json, print_table, print_text

if TYPE_CHECKING:
    from fastcar_compile.report.environment import Check

ORDER = ("error", "warning", "info", "ok")


@command
def doctor_command(as_json: JsonOption = False) -> ExitCode:
    """Look for compilers, packages, headers and devices.

    The exit code is 2 where something needed is missing.
    """
    from fastcar_compile.report.environment import doctor

    checks = doctor()
    if as_json:
        print_json({"checks": [check.model_dump(mode="json") for check in checks]})
    else:
        _show(checks)
    return ExitCode.USER_ERROR if any(check.severity == "error" for check in checks) else ExitCode.OK


def _show(checks: tuple[Check, ...]) -> None:
    """Print the checks, the worst first."""
    rows = [
        [check.severity, check.name, check.message + (f"; hint: {check.hint}" if check.hint else "")]
        for check in sorted(checks, key=lambda check: ORDER.index(check.severity))
    ]
    print_table([Column("severity"), Column("what"), Column("found")], rows)
    counts = Counter(check.severity for check in checks)
    print_text("\n" + ", ".join(f"{counts[name]} {name}" for name in ORDER if counts[name]))
