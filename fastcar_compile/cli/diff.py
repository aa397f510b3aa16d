"""`fastcar diff`: what differs between two artifacts or two graph files."""

from __future__ import annotations

from os.path import commonprefix
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from fastcar_compile.cli.common import ExitCode, JsonOption, command, stages
from fastcar_compile.cli.output import print_json, print_table, print_text
from fastcar_compile.errors import UserError, count_text

PARTS = "options,versions,figures,graphs,weights,sections,files"


@command
def diff_command(
    a: Annotated[Path, Argument(help="Folder of an artifact, or a graph file (.json).")],
    b: Annotated[Path, Argument(help="The other one.")],
    only: Annotated[str, Option(help="Parts, separated by commas.")] = PARTS,
    rows: Annotated[int, Option(min=1, help="Lines to show of each part; --json has all.")] = 20,
    as_json: JsonOption = False,
) -> ExitCode:
    """Show what differs between artifacts or graph files.

    The exit code is 1 where anything does.
    """
    from fastcar_compile.report.comparison import diff

    wanted, known = {name.strip() for name in only.split(",")}, PARTS.split(",")
    if wanted - {*known}:
        raise UserError(f"--only {only!r} names an unknown part", hint=f"parts: {PARTS}")
    with stages(as_json, "diff"):
        found = diff(a, b)
    parts = {part: found.get(part, ()) for part in known if part in wanted}
    equal = not any(parts.values())
    if as_json:
        lists = {part: [change._asdict() for change in changes] for part, changes in parts.items()}
        print_json({"a": a, "b": b, "equal": equal} | lists)
        return ExitCode.OK if equal else ExitCode.MISMATCH
    print_text("equal" if equal else f"a: {a}\nb: {b}")
    for part, changes in parts.items():
        if changes:
            print_text(f"\n{part}")
            cells = ((c.path + f" ({c.places})" * (c.places > 1), *_texts(c.a, c.b)) for c in changes[:rows])
            print_table(("what differs", "a", "b"), cells)
        if len(changes) > rows:
            print_text(f"… and {count_text(len(changes) - rows, 'more line')}; --rows N shows N, --json all")
    return ExitCode.OK if equal else ExitCode.MISMATCH


def _texts(*values: object, width: int = 24) -> list[str]:
    """Return short texts: of long ones what follows their common beginning."""
    texts = ["-" if v is None else f"{v:.6g}" if isinstance(v, float) else str(v) for v in values]
    same = len(commonprefix(texts)) if max(map(len, texts)) > width else 0  # noqa: RUF071
    texts = [f"...{text[same:]}" if same > 3 else text for text in texts]
    return [text if len(text) <= width else f"{text[: width - 3]}..." for text in texts]
