"""`fastcar explore`: compare a matrix of decoders, targets, precisions and gates."""

import json
from pathlib import Path
from typing import Annotated, Any

from fastcar_compile.cli import options
from fastcar_compile.cli.common import JsonOption, Writes, command, stages
from fastcar_compile.cli.output import print_result, print_table, print_text
from fastcar_compile.errors import os_errors
from fastcar_compile.support.packages import require


@command
@options.takes("executor")
def explore_command(
    matrix: Path,
    output: Annotated[Path, options.OUTPUT, Writes("results", folder=True)],
    as_json: JsonOption = False,
    **given: Any,
) -> None:
    """Compare speed and quality of a matrix.

    A board's speed is predicted. For a CPU the decoder is built, and decodes on this machine, or on a worker's. An
    interrupted exploration goes on from the folder's journal.

    Args:
        matrix: .toml file, such as examples/sweep/sweep.toml.
        output: Folder for rows.json, rows.csv and index.html.
    """
    require("evaluate", "matplotlib")
    from fastcar_compile.explore import Matrix, explore
    from fastcar_compile.report.sweep import front, page, table

    with stages(as_json, "explore", "reading the matrix") as show, options.executor_of(given["executor"]) as workers:
        asked = Matrix.load(matrix)
        with os_errors("the results cannot be written", output):
            output.mkdir(parents=True, exist_ok=True)
        rows = explore(asked, executor=workers, journal=output / "journal.json", progress=show)
        texts = {"rows.json": lambda: json.dumps(rows, indent=1, sort_keys=True) + "\n"}
        texts |= {"rows.csv": lambda: table(rows), "index.html": lambda: page(rows, matrix.stem)}
        for name, text in texts.items():  # the page last, because only drawing it can fail
            with os_errors("the results cannot be written", output / name):
                (output / name).write_text(text(), "utf-8")
    best = front(rows)
    print_result(as_json, {"rows": rows, "front": best}, lambda: _show([rows[i] for i in best], len(rows), output))


def _show(best: list[dict[str, Any]], count: int, output: Path) -> None:
    names = ("model", "target", "quant", "gate")
    print_table((*names, ">replay", ">NLL of dense", ">tokens/s"), (_cells(row, names) for row in best))
    print_text(f"{len(best)} of {count} that no other one beats; all are in {output / 'index.html'}")


def _cells(row: dict[str, Any], names: tuple[str, ...]) -> tuple[str, ...]:
    loss = f"{row['nll_of_dense']:.3f}x" if "nll_of_dense" in row else ""
    return *(str(row[name]) for name in names), f"{row['target_replay']:.0%}", loss, f"{row['tokens_per_second']:.4g}"
