"""What every command writes with: consoles, tables and JSON. Piped output has no colour and no box.

It has no line break of ours either, unless COLUMNS says how wide it may be.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, TextIO, cast

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

_UNSEEN = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e"
    r"\u2060-\u206f\ufeff\ufff9-\ufffb\ud800-\udfff]"
)
"""Control characters but tab and line feed, signs of text direction, signs without width, halves of pairs."""


def interactive() -> bool:
    """Return whether a person sees both what is printed and what is reported."""
    return sys.stdout.isatty() and sys.stderr.isatty()


def stderr() -> Console:
    """Return the console for errors and progress."""
    return _console(sys.stderr)


def _console(file: TextIO) -> Console:
    """Return a console, made per call so that a redirected stdout is honoured."""
    from rich.console import Console

    return Console(file=file, highlight=False)


def visible(text: str, *, lines: bool = True) -> str:
    """Return a text as a terminal may be given it: control characters are written out, as in `\\x1b`.

    Names and messages come from files. An escape sequence in one could move the cursor, set the window's title or hide
    what follows; a sign of text direction could turn a name around.

    Args:
        lines: keep line breaks; else they are written out too.
    """
    shown = _UNSEEN.sub(lambda match: match[0].encode("unicode_escape").decode("ascii"), text)
    return shown if lines else shown.replace("\n", "\\n")


def print_text(text: str) -> None:
    """Print a result as it is: no markup, no line break of ours, no control characters of a file."""
    sys.stdout.write(visible(text) + "\n")


def print_table(titles: Iterable[str], rows: Iterable[Iterable[object]]) -> None:
    """Print a table with a header: folded to a terminal's width or COLUMNS, at its natural width otherwise.

    Args:
        titles: one per column. The cells under a title that begins with `>` are right-aligned.
    """
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in titles:
        right = title.startswith(">")
        # Numbers keep their line; long names fold, so that nothing is cut off.
        table.add_column(title.lstrip(">"), justify="right" if right else "left", no_wrap=right, overflow="fold")
    for row in rows:
        table.add_row(*(Text(visible(str(cell))) for cell in row))
    table.padding = (0, 2, 0, 0)
    if _bounded() and _natural_width(table) > _console(sys.stdout).width:
        table.padding = (0, 1, 0, 0)
    _print_whole(table)


def _bounded() -> bool:
    """Return whether lines have a width that they must fit."""
    return sys.stdout.isatty() or os.environ.get("COLUMNS", "").isdecimal()


def print_fields(fields: Mapping[str, str]) -> None:
    """Print names and values; a long value continues under its beginning."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in fields.items():
        table.add_row(Text(visible(name, lines=False)), Text(visible(value)))
    _print_whole(table)


def _natural_width(table: Table) -> int:
    from rich.console import Console
    from rich.measure import Measurement

    wide = Console(width=10_000)
    return Measurement.get(wide, wide.options, table).maximum


def _print_whole(table: Table) -> None:
    from rich.console import Console

    # A pipe has no width: a table that is folded to 80 columns is hard to read for a program.
    console = _console(sys.stdout) if _bounded() else Console(file=sys.stdout, width=_natural_width(table))
    with console.capture() as captured:
        console.print(table)
    # Trailing blanks of a table's last column are no part of a result.
    sys.stdout.writelines(line.rstrip() + "\n" for line in captured.get().splitlines())


def jsonable(value: Any) -> Any:
    """Return `value` as plain JSON: dataclasses, paths, tensors and arrays included; infinities and NaN as strings."""
    return json.loads(json.dumps(value, default=_plain), parse_constant=lambda name: str(float(name)))


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, (set, frozenset)):
        return list(cast("Iterable[Any]", value))
    # Arrays, their scalars and tensors share `tolist`; neither library is imported for this.
    tolist: Callable[[], Any] | None = getattr(value, "tolist", None)
    return str(value) if tolist is None else tolist()


def print_json(value: object) -> None:
    """Print one JSON value, never wrapped or coloured."""
    print_text(json.dumps(jsonable(value), indent=2, sort_keys=True, allow_nan=False))


def print_result(as_json: bool, value: object, show: Callable[[], None]) -> None:
    """Print the result of a command: one JSON value, or what `show` prints for a person."""
    if as_json:
        print_json(value)
    else:
        show()
