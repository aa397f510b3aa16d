"""`fastcar diff`: what differs between two artifacts or two graph files."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fastcar_compile.cli.common import ExitCode, JsonOption, command, stages
from fastcar_compile.cli.output import Column, count_text, print_json, print_table, print_text
from fastcar_compile.errors import UserError

if TYPE_CHECKING:
    from fastcar_compile.comparison import Comparison, FieldChange, GraphComparison, NodeChange, TensorChange

PARTS = ("options", "sections", "versions", "graphs", "weights", "figures", "files")
_SIGNS = {"inserted": "+", "removed": "-", "changed": "~", "rewired": "~"}


@command
def diff_command(
    a: Annotated[Path, typer.Argument(help="Folder of an artifact, or a graph file (.json).")],
    b: Annotated[Path, typer.Argument(help="The other one.")],
    only: Annotated[
        str | None, typer.Option(help=f"Parts, separated by commas: {', '.join(PARTS)}; default: all.")
    ] = None,
    rows: Annotated[int, typer.Option(min=1, help="Lines to show of each part; --json has all.")] = 20,
    as_json: JsonOption = False,
) -> ExitCode:
    """Show what differs between artifacts or graph files.

    The exit code is 1 if anything differs in the parts that are shown.
    """
    from fastcar_compile.comparison import diff

    parts = _parts(only)
    with stages(as_json, "diff") as show:
        show("comparing")
        found = diff(a, b)
    empty = {name: () for name in PARTS if name not in parts}
    found = found.model_copy(update=empty)
    if as_json:
        print_json(found.model_dump(mode="json"))
    else:
        _show(found, rows)
    return ExitCode.OK if found.equal else ExitCode.MISMATCH


def _parts(only: str | None) -> list[str]:
    if only is None:
        return list(PARTS)
    names = [name.strip() for name in only.split(",") if name.strip()]
    unknown = [name for name in names if name not in PARTS]
    if unknown or not names:
        raise UserError(f"--only {only!r} names no part", hint=f"parts: {', '.join(PARTS)}")
    return names


def _show(found: Comparison, rows: int) -> None:
    if found.equal:
        print_text("equal")
        return
    print_text(f"a: {found.a}\nb: {found.b}")
    for title, fields in (("options", found.options), ("versions", found.versions), ("figures", found.figures)):
        _show_fields(title, fields, rows)
    for graph in found.graphs:
        _show_graph(graph, rows)
    _show_weights(found.weights, rows)
    _show_fields("manifest sections", found.sections, rows)
    if found.files:
        _show_table("files of other bytes", [Column("file")], [[name] for name in found.files], rows)


def _show_table(title: str, columns: Sequence[Column], lines: Sequence[Sequence[str]], rows: int) -> None:
    print_text(f"\n{title}")
    print_table(columns, lines[:rows])
    if len(lines) > rows:
        print_text(f"… and {count_text(len(lines) - rows, 'more line')}; --rows N shows N, --json all")


def _show_fields(title: str, fields: Sequence[FieldChange], rows: int) -> None:
    if fields:
        columns = [Column("field"), Column("a", right=True), Column("b", right=True)]
        lines = [[_times(change.path, change.count), _value(change.a), _value(change.b)] for change in fields]
        if title == "figures":
            columns.append(Column("", right=True))
            lines = [[*line, _ratio(change.a, change.b)] for line, change in zip(lines, fields, strict=True)]
        _show_table(title, columns, lines, rows)


def _times(name: str, count: int) -> str:
    return name if count == 1 else f"{name} ({count})"


def _value(value: Any) -> str:
    text = f"{value:.6g}" if isinstance(value, float) else "-" if value is None else str(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def _ratio(a: Any, b: Any) -> str:
    """The change of a number in percent."""
    if not isinstance(a, int | float) or not isinstance(b, int | float) or not a:
        return ""
    return f"{(b - a) / abs(a):+.1%}"


def _show_graph(graph: GraphComparison, rows: int) -> None:
    a, b = graph.nodes
    columns = (Column(""), Column("node"), Column("what"), Column("layers"), Column("module"), Column("made by"))
    title = f"graph {graph.name}: {a} and {b} nodes, {graph.matched} equal"
    _show_table(title, columns, list(map(_node_cells, graph.changes)), rows)


def _node_cells(change: NodeChange) -> list[str]:
    target = _times(change.target, len(change.names))
    detail = change.detail if change.kind in ("inserted", "removed") else f"{change.kind}: {change.detail}"
    layers = ", ".join(_ranges(change.layers)) or "-"
    return [_SIGNS[change.kind], target, detail, layers, change.module or "-", change.made_by or "-"]


def _ranges(numbers: Iterable[int]) -> Iterator[str]:
    """Whole numbers as "0-3", "7"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    for first, last in runs:
        yield str(first) if first == last else f"{first}-{last}"


def _show_weights(changes: Sequence[TensorChange], rows: int) -> None:
    if changes:
        titles = ("elements", "max |difference|", "relative RMS")
        columns = (Column("tensor"), Column("what"), *(Column(title, right=True) for title in titles))
        _show_table("weights", columns, list(map(_tensor_cells, changes)), rows)


def _tensor_cells(change: TensorChange) -> list[str]:
    if change.kind != "values":
        return [_times(change.name, change.count), f"{change.kind}: {change.detail}", "", "", ""]
    return [change.name, "values", str(change.elements), f"{change.max_abs:.3g}", f"{change.relative:.3g}"]
