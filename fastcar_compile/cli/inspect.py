"""`fastcar inspect`: what an artifact holds, what was found in the model, and why."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from fastcar_compile.cli.common import (
    ExitCode,
    JsonOption,
    command,
    jsonable,
    print_json,
    print_table,
    require_one,
    stages,
    stdout,
)
from fastcar_compile.errors import UserError


@command
def inspect_command(
    artifact: Annotated[Path, typer.Argument(help="Folder of the artifact.")],
    sites: Annotated[bool, typer.Option("--sites", help="The layers found, and where.")] = False,
    before: Annotated[bool, typer.Option("--before", help="The decode graph before the passes.")] = False,
    after: Annotated[bool, typer.Option("--after", help="The decode graph after the passes.")] = False,
    explain: Annotated[bool, typer.Option("--explain", help="What was inserted, and why.")] = False,
    layer: Annotated[int | None, typer.Option(help="With --explain: only this layer.")] = None,
    node: Annotated[str | None, typer.Option(help="With --explain: only this node.")] = None,
    as_json: JsonOption = False,
) -> ExitCode:
    """Show an artifact: a summary, its sites, its graphs, or the explanation of one node."""
    import fastcar_compile as fc

    require_one([("--sites", sites), ("--before", before), ("--after", after), ("--explain", explain)])
    require_one([("--layer", layer is not None), ("--node", node is not None)])
    if (layer is not None or node is not None) and not explain:
        raise UserError("--layer and --node select a part of --explain", hint="add --explain")
    with stages(as_json, "inspect") as show:
        show("checking the files")
        loaded = fc.load(str(artifact))
    if sites:
        _show_sites(loaded.sites, as_json)
    elif before or after:
        graph = loaded.original_graph if before else loaded.graph
        _show_text("graph", graph_text(graph), as_json)
    elif explain:
        _show_text("explain", loaded.explain(layer=layer, node=node), as_json)
    else:
        _show_summary(loaded, as_json)
    return ExitCode.OK


def graph_text(graph: Any) -> str:
    """A graph as readable text: of a GraphModule its generated code, of anything else its `str`."""
    return graph.print_readable(print_output=False) if hasattr(graph, "print_readable") else str(graph)


def _show_text(name: str, text: str, as_json: bool) -> None:
    if as_json:
        print_json({name: text})
    else:
        stdout().print(text, soft_wrap=True, markup=False)


def _show_sites(sites: Any, as_json: bool) -> None:
    rows = [jsonable(site) for site in sites]
    if as_json:
        print_json({"sites": rows})
        return
    table = Table(box=None, pad_edge=False)
    columns = ("layer", "module_path", "hidden", "intermediate", "activation", "source")
    for name in columns:
        table.add_column(name.replace("_", " "), no_wrap=True)
    for row in rows:
        table.add_row(*(str(row.get(name, "-")) for name in columns))
    print_table(table)


def host_lines(host: Mapping[str, Any]) -> list[str]:
    """One line for each CPU that the artifact has libraries for; the manifest's section `host`."""
    lines = [f"library: {v['instruction_set']} ({v['triple']})" for v in host.get("variants", [])]
    board = host.get("board")
    if board is not None:
        kind = "library" if board["linked"] else "object files"
        lines.append(f"{kind}: {board['cpu']} ({board['triple']}), the board's")
    return lines


def _show_summary(loaded: Any, as_json: bool) -> None:
    manifest = loaded.manifest
    size = sum(entry.size for entry in manifest.files.values())
    if as_json:
        fields = {"path": loaded.path, "bytes": size, "layers": len(loaded.sites)}
        print_json(fields | manifest.model_dump(mode="json"))
        return
    console = stdout()
    counts = f"{len(loaded.sites)} layers, {len(manifest.files)} files, {size / 1e6:.1f} MB"
    console.print(f"{loaded.path}: {counts}", soft_wrap=True, markup=False)
    for name, value in sorted(manifest.sections.get("config", {}).items()):
        console.print(f"  {name}: {value}", soft_wrap=True, markup=False)
    for line in host_lines(manifest.sections.get("host", {})):
        console.print(f"  {line}", soft_wrap=True, markup=False)
    versions = ", ".join(f"{name} {version}" for name, version in sorted(manifest.producer.items()))
    console.print(f"  written by: {versions}", soft_wrap=True, markup=False)
    table = Table(box=None, pad_edge=False)
    table.add_column("file", no_wrap=True)
    table.add_column("bytes", justify="right")
    table.add_column("sha256", no_wrap=True)
    for name, entry in sorted(manifest.files.items()):
        table.add_row(name, str(entry.size), entry.sha256[:16])
    print_table(table)
