"""`fastcar doctor`: whether this machine has what the package needs."""

from __future__ import annotations

from collections import Counter

import fastcar_compile as fc
from fastcar_compile.cli.common import ExitCode, JsonOption, command
from fastcar_compile.cli.output import print_result, print_table, print_text

ORDER = ("error", "warning", "info", "ok")


@command
def doctor_command(as_json: JsonOption = False) -> ExitCode:
    """Look for compilers, packages, headers and devices.

    The exit code is 2 where something needed is missing.
    """
    checks = fc.doctor()
    print_result(as_json, {"checks": [check.model_dump(mode="json") for check in checks]}, lambda: _show(checks))
    return ExitCode.USER_ERROR if any(check.severity == "error" for check in checks) else ExitCode.OK


def _show(checks: tuple[fc.Check, ...]) -> None:
    """Print the checks, the worst first."""
    rows = (
        (check.severity, check.name, check.message + (f"; hint: {check.hint}" if check.hint else ""))
        for check in sorted(checks, key=lambda check: ORDER.index(check.severity))
    )
    print_table(("severity", "what", "found"), rows)
    counts = Counter(check.severity for check in checks)
    print_text("\n" + ", ".join(f"{counts[name]} {name}" for name in ORDER if counts[name]))
