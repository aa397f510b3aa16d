"""`fastcar simulate`: one decode step of an emitted design, process by process."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fastcar_compile.cli.common import ExitCode, JsonOption, command, stages
from fastcar_compile.cli.estimate import prefill_text
from fastcar_compile.cli.options import existing, require_one
from fastcar_compile.cli.output import Column, print_fields, print_json, print_table, print_text
from fastcar_compile.cli.places import Writes
from fastcar_compile.errors import count_text

if TYPE_CHECKING:
    from fastcar_compile.simulation.simulate import Simulation

STALL_KINDS = ("memory", "FIFO empty", "FIFO full", "blocks empty", "blocks full", "barrier")
"""Beginnings of a cause, in the order of the columns."""

ROOTS = 6
"""Roots of the multipliers' waiting that are shown."""


@command
def simulate_command(
    artifact: Annotated[Path, typer.Argument(help="Folder of an artifact.")],
    replay: Annotated[float | None, typer.Option(help="Share of all MLPs that replay, 0 to 1; default: none.")] = None,
    trace: Annotated[Path | None, typer.Option(help="Recorded decisions (.npy of `fastcar run --trace`).")] = None,
    seed: Annotated[int, typer.Option(help="Of the decisions that are drawn for --replay.")] = 0,
    correlated: Annotated[bool, typer.Option("--correlated", help="Draw decisions in which all rows agree.")] = False,
    pairs: Annotated[
        bool, typer.Option("--pairs", help="Rows b and b + B / 2 are guidance pairs and replay together.")
    ] = False,
    static: Annotated[bool, typer.Option("--static", help="Map row b to core b mod C, to compare with DRS.")] = False,
    time_line: Annotated[
        Path | None, typer.Option(help="Write the step in Chrome's trace format here."), Writes("time line")
    ] = None,
    report: Annotated[
        Path | None,
        typer.Option(help="Write report.html with pictures of DRS into this folder."),
        Writes("report", folder=True),
    ] = None,
    as_json: JsonOption = False,
) -> ExitCode:
    """Simulate one decode step by the cycle model.

    Processes, FIFOs and the memory are those of the emitted design; loops have its intervals and depths.
    """
    from fastcar_compile.estimate.rows import Draw, Mapping
    from fastcar_compile.estimate.trace import load_trace
    from fastcar_compile.simulation.report import write_report
    from fastcar_compile.simulation.simulate import simulate
    from fastcar_compile.simulation.trace import write_trace

    require_one([("--replay", replay is not None), ("--trace", trace is not None)])
    require_one([("--correlated", correlated), ("--pairs", pairs)])
    with stages(as_json, "simulate") as show:
        show("running the processes of every call")
        result = simulate(
            artifact,
            replay=replay,
            decisions=None if trace is None else load_trace(existing(trace, "trace")),
            draw=Draw.CORRELATED if correlated else Draw.PAIRS if pairs else Draw.INDEPENDENT,
            seed=seed,
            mapping=Mapping.STATIC if static else Mapping.DRS,
        )
        if time_line is not None:
            write_trace(result, time_line)
        if report is not None:
            write_report(result, report)
    written = {"time_line_file": time_line, "report": report}
    if as_json:
        print_json(result.to_json() | {name: None if path is None else str(path) for name, path in written.items()})
        return ExitCode.OK
    _show(result)
    for path in (p for p in written.values() if p is not None):
        print_text(f"written: {path}")
    return ExitCode.OK


def _show(result: Simulation) -> None:
    total = result.seconds_per_step
    shares = ", ".join(f"{unit} {s / total:.1%}" for unit, s in sorted(result.seconds.items(), key=lambda i: -i[1]))
    waiting = sorted(result.roots.items(), key=lambda item: -item[1])[:ROOTS]
    asked = {"what if": f"NOT EMITTED by this compiler: {'; '.join(result.what_if)}"} if result.what_if else {}
    print_fields(
        asked
        | {
            "predicted": f"{result.clocks_per_step:,.0f} clocks, {total * 1e3:.2f} ms per step, "
            f"{result.tokens_per_second:.2f} {result.unit}s/s",
            "workload": f"{result.shape} {result.quant} on {result.target}, {count_text(result.batch, 'row')}, context "
            f"{result.context}, {result.replay_ratio:.1%} replay, in the fabric: {result.offload}",
            "time": shares,
            "over dense": f"{result.speedup_over_dense:.2f}x ({result.comparison['dense']:.2f} {result.unit}s/s)",
            "weights": f"{result.stream_of_memory:.1%} of what the memory could deliver while the engine works",
            "passes": f"{result.passes:.2f} over a tile, {count_text(result.cores, 'core')}, mapping {result.mapping}",
            "static over DRS": _gain(result.passes_by_mapping),
            "multipliers wait": ", ".join(f"{root} {clocks:,.0f}" for root, clocks in waiting) or "never",
            "deadlock": result.deadlock,
        }
        | _prefill(result)
    )
    print_table(_columns(), [_row(result, name) for name in result.processes])


def _prefill(result: Simulation) -> dict[str, str]:
    rate = result.prefill_positions_per_second
    return {} if rate is None else {"prefill": prefill_text(rate)}


def _gain(passes: dict[str, float]) -> str:
    """Return how many passes of the busiest core DRS spares on these decisions."""
    static, drs = passes["static"], passes["drs"]
    ratio = f"{static / drs:.2f}x passes, " if drs else ""
    return f"{ratio}{static:.2f} and {drs:.2f} per layer"


def _columns() -> list[Column]:
    return [Column("process"), *(Column(title.replace(" ", "\n"), right=True) for title in ("busy", *STALL_KINDS))]


def _row(result: Simulation, name: str) -> list[str]:
    """Return one process: its work and its waiting by kind, clocks of the step."""
    process = result.processes[name]
    kinds = [sum(c for cause, c in process.stalls.items() if cause.startswith(kind)) for kind in STALL_KINDS]
    return [name, *(f"{clocks:,.0f}" for clocks in (process.busy, *kinds))]
