"""`fastcar opt`: run passes over a saved graph, as mlir-opt and xdsl-opt do."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

from typer import Argument, Option

from fastcar_compile.cli.common import JsonOption, Writes, command, stages
from fastcar_compile.cli.options import OUTPUT
from fastcar_compile.cli.output import print_json, print_result, print_table, print_text, visible
from fastcar_compile.config.listing import Needs
from fastcar_compile.errors import UserError, os_errors

if TYPE_CHECKING:
    from torch import Tensor

    from fastcar_compile.ir.pass_manager import Pass
    from fastcar_compile.ir.program import DecoderProgram

SMALL = 1 << 20
"""Largest constant that is read, in bytes: passes look at the values of rotary tables, never at large weights."""


Graph = Literal["before", "after"]
"""A graph of an artifact."""


@command
def opt_command(
    path: Annotated[Path | None, Argument(show_default=False)] = None,
    graph: Graph = "before",
    passes: Annotated[str, Option("--passes", "-p")] = "",
    output: Annotated[Path | None, OUTPUT, Writes("result")] = None,
    verify_each: Annotated[bool, Needs("passes")] = True,
    print_after_all: Annotated[bool, Option(), Needs("passes")] = False,
    list_passes: Annotated[bool, Option()] = False,
    as_json: JsonOption = False,
) -> None:
    """Run passes over a saved graph, and show the result.

    Args:
        path: Graph file (.json), or folder of an artifact.
        graph: Of an artifact: before or after the rewrite.
        passes: Such as 'canonicalize,skip-rows{"couple_cfg": true}'.
        output: Write the result: *.json as a graph file, else the listing.
        verify_each: Verify the program after every pass, not after the last only.
        print_after_all: Print the listing after every pass, on stderr.
        list_passes: List the passes, their options and types, and stop.
    """
    if list_passes:
        _list_passes(as_json)
        return
    if path is None:
        raise UserError("no graph is given", hint="give a graph file or an artifact's folder, or --list-passes")
    with stages(as_json, "opt", "reading the graph") as show:
        program = read_program(path, graph)
        show("running the passes")
        run_passes(program, passes, verify_each=verify_each, print_after_all=print_after_all)
    _emit(program, output, as_json)


def read_program(path: Path, graph: Graph = "before") -> DecoderProgram:
    """Return the program of a graph file, or of a graph of an artifact. Large weights have no values.

    Raises:
        UserError: the file is missing or malformed.
    """
    from fastcar_compile.artifact.programs import read_graph_file

    file = path / "graph" / f"{graph}.json" if path.is_dir() else path
    return read_graph_file(file, _constants(file.parent.parent / "weights"), missing_on_meta=True)


def run_passes(program: DecoderProgram, text: str, *, verify_each: bool = True, print_after_all: bool = False) -> None:
    """Run the passes of a pipeline text over the program, in place.

    Raises:
        CompileError: the text is malformed, or a pass cannot be applied.
    """
    from fastcar_compile.ir.pass_manager import pipeline_from_string, run_pipeline
    from fastcar_compile.ir.text import program_to_text
    from fastcar_compile.passes.pipeline import PASSES

    def listing(item: Pass) -> None:
        sys.stderr.write(visible(f"==== after {item.to_spec()} ====\n{program_to_text(program)}"))

    after_each = listing if print_after_all else None
    run_pipeline(program, pipeline_from_string(text, PASSES), verify_each=verify_each, after_each=after_each)


def _constants(folder: Path) -> dict[str, Tensor]:
    """Return the small tensors of an artifact's weight files; the dict is empty where the folder is missing."""
    import safetensors
    import torch

    found: dict[str, Tensor] = {}
    for file in sorted(path for path in folder.glob("model*.safetensors") if path.is_file()):
        with cast("Any", safetensors.safe_open(file, framework="pt")) as tensors:  # its stub has no types
            for name in tensors.keys():  # noqa: SIM118  (not a mapping)
                shape = torch.Size(tensors.get_slice(name).get_shape())
                if shape.numel() * 4 <= SMALL:
                    found[name] = tensors.get_tensor(name)
    return found


def _emit(program: DecoderProgram, output: Path | None, as_json: bool) -> None:
    from fastcar_compile.artifact.programs import graph_file_text, program_to_json
    from fastcar_compile.ir.text import program_to_text

    if output is not None:
        text = graph_file_text(program) if output.suffix == ".json" else program_to_text(program)
        with os_errors("the result cannot be written", output):
            output.write_text(text, encoding="utf-8")
    if as_json:
        print_json(program_to_json(program) if output is None else {"written": output})
    elif output is None:
        print_text(program_to_text(program).rstrip("\n"))


def _list_passes(as_json: bool) -> None:
    from fastcar_compile.ir.pass_manager import option_types
    from fastcar_compile.passes.pipeline import PASSES

    listed: list[dict[str, Any]] = [
        {"name": name, "summary": (kind.__doc__ or "").splitlines()[0], "options": option_types(kind)}
        for name, kind in PASSES.items()
    ]
    rows = ((p["name"], ", ".join(f"{o}: {t}" for o, t in p["options"].items()), p["summary"]) for p in listed)
    titles = ("pass", "options", "what it does")
    print_result(as_json, {"passes": listed}, lambda: print_table(titles, rows))
