"""`fastcar estimate`: predict how fast a decoder runs on a board."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from fastcar_compile.cli.common import (
    ExitCode,
    JsonOption,
    command,
    existing,
    print_json,
    print_table,
    require_one,
    stages,
    stdout,
)
from fastcar_compile.errors import UserError
from fastcar_compile.estimate.explore import Design, design_from_json
from fastcar_compile.estimate.gate import GateModel
from fastcar_compile.estimate.shapes import load_shape, shape_of_sections
from fastcar_compile.estimate.system import Estimate, Workload, estimate
from fastcar_compile.estimate.trace import load_trace
from fastcar_compile.formats import kv_type
from fastcar_compile.formats.quant import ACCELERATED
from fastcar_compile.targets import Target, load_target

SHAPE_CONTEXT = 512
SHAPE_QUANT, SHAPE_OFFLOAD, SHAPE_KV_BITS = "w8a8", "all", 8

OFFLOADS = ("mlp", "linears", "all")


@command
def estimate_command(
    artifact: Annotated[Path | None, typer.Argument(help="Folder of an artifact; or give --shape.")] = None,
    shape: Annotated[str | None, typer.Option(help="A decoder by name, without weights, e.g. llama2-7b.")] = None,
    target: Annotated[str | None, typer.Option(help="Board; default: the artifact's, or zcu102.")] = None,
    quant: Annotated[str | None, typer.Option(help="w8a8 or w4a8; default: the artifact's, or w8a8.")] = None,
    context: Annotated[int | None, typer.Option(min=1, help="Positions that attention reads.")] = None,
    batch: Annotated[int | None, typer.Option(min=1, max=32, help="Rows decoded together.")] = None,
    replay: Annotated[float | None, typer.Option(help="Share of all MLPs that replay, 0 to 1.")] = None,
    trace: Annotated[Path | None, typer.Option(help="Recorded decisions (.npy of `fastcar run --trace`).")] = None,
    offload: Annotated[str | None, typer.Option(help="In the fabric: mlp, linears, or all (attention too).")] = None,
    kv_bits: Annotated[int | None, typer.Option(help="Bits of a cached key or value element: 8, 16 or 32.")] = None,
    sink_window: Annotated[str | None, typer.Option(help="Sparse attention as SINKS,WINDOW tokens.")] = None,
    gate: Annotated[str | None, typer.Option(help="What decides; default: the artifact's, or tas.")] = None,
    gate_units: Annotated[int | None, typer.Option(min=1, help="Hidden units of gate learned; default: 16.")] = None,
    ignore_capacity: Annotated[bool, typer.Option(help="Predict even what does not fit the board's memory.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Draw the time line of one token into this file.")] = None,
    as_json: JsonOption = False,
) -> ExitCode:
    """Predict tokens per second, bandwidth, energy and resources on a board; nothing is run."""
    require_one([("ARTIFACT", artifact is not None), ("--shape", shape is not None)])
    require_one([("--replay", replay is not None), ("--trace", trace is not None)])
    if artifact is None and shape is None:
        raise UserError("nothing to estimate", hint="give the folder of an artifact, or --shape NAME")
    if artifact is not None:
        work, board, design = _of_artifact(artifact, target)
    else:
        work, board, design = (
            Workload(load_shape(str(shape)), SHAPE_QUANT, SHAPE_CONTEXT),
            load_target(target or "zcu102"),
            None,
        )
    chosen = _with_options(work, quant, context, batch, replay, offload, kv_bits, sink_window)
    if gate is not None or gate_units is not None:
        chosen = replace(chosen, gate=GateModel.named(gate or chosen.gate.name, gate_units))
    if (chosen.quant, chosen.batch) != (work.quant, work.batch):
        design = None
    with stages(as_json, "estimate") as show:
        show("simulating")
        decisions = None if trace is None else load_trace(existing(trace, "trace"))
        result = estimate(chosen, board, decisions=decisions, design=design, check_memory=not ignore_capacity)
        if plot is not None:
            from fastcar_compile.estimate.plot import plot_time_line

            plot_time_line(result, plot)
    if as_json:
        print_json(result.to_json() | {"plot": None if plot is None else str(plot)})
    else:
        _show(result, plot)
    return ExitCode.OK


def _of_artifact(path: Path, target: str | None) -> tuple[Workload, Target, Design | None]:
    import fastcar_compile as fc

    sections = fc.load(str(path)).manifest.sections
    config, accelerator = sections["config"], sections["accelerator"]
    own = Target.model_validate(sections["target"])
    board = own if target is None else load_target(target)
    design = design_from_json(accelerator["design"]) if accelerator is not None and board == own else None
    ring, kept = sections["decoder"].get("ring"), kv_type(config.get("kv", "float32"))
    work = Workload(
        shape_of_sections(sections),
        config["quant"] if config["quant"] in ACCELERATED else SHAPE_QUANT,
        max(1, config["max_seq_len"] // 2),
        batch=config["batch_size"],
        offload=config.get("offload", "mlp"),
        kv_bits=kept.bits,
        kv_block=kept.block,
        sink_window=None if ring is None else (ring["sinks"], ring["window"]),
        kv_rows=None if ring is None else ring["sinks"] + ring["rows"],
        gate=GateModel.of_sections(config, sections["sites"]),
    )
    return work, board, design


def _with_options(
    work: Workload,
    quant: str | None,
    context: int | None,
    batch: int | None,
    replay: float | None,
    offload: str | None,
    kv_bits: int | None,
    sink_window: str | None,
) -> Workload:
    if quant is not None and quant not in ACCELERATED:
        raise UserError(f"there is no engine for --quant {quant}", hint="give w8a8 or w4a8")
    if offload is not None and offload not in OFFLOADS:
        raise UserError(f"--offload {offload} is not known", hint=f"give one of {', '.join(OFFLOADS)}")
    given: dict[str, Any] = {
        "quant": quant,
        "context": context,
        "batch": batch,
        "replay": replay,
        "offload": offload,
        "kv_bits": kv_bits,
        "sink_window": None if sink_window is None else parse_sink_window(sink_window),
    }
    changed = {name: value for name, value in given.items() if value is not None}
    if sink_window is not None:
        changed["kv_rows"] = None  # of an artifact with another window
    return replace(work, **changed)


def parse_sink_window(text: str) -> tuple[int, int]:
    """Sinks and window from "4,256".

    Raises:
        UserError: not two whole numbers, or the window is 0.
    """
    parts = text.split(",")
    if len(parts) == 2 and all(p.strip().isdecimal() for p in parts) and int(parts[1]) > 0:
        return int(parts[0]), int(parts[1])
    raise UserError(f"--sink-window {text!r} is not SINKS,WINDOW", hint="give two whole numbers, for example 4,256")


def _gate(result: Estimate) -> str:
    """Who decides, and what the gate keeps beside the MLP cache."""
    gate = result.gate
    extra = f"{gate['cache_bytes'] / 1e6:.2f} MB of gate cache" if gate["cache_bytes"] else "no cache of its own"
    weights = f", {gate['weight_bytes'] / 1e6:.3f} MB of weights ({gate['units']} units)" if gate["units"] else ""
    return f"{gate['name']}, decided on the {gate['decided_on']}; {extra}{weights}"


def _show(result: Estimate, plot: Path | None) -> None:
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column()
    shares = ", ".join(f"{unit} {share:.1%}" for unit, share in sorted(result.shares.items(), key=lambda s: -s[1]))
    used = ", ".join(f"{name} {r['used']} of {r['limit']}" for name, r in result.resources.items())
    versus = result.comparison
    rows = {
        "predicted": f"{result.tokens_per_second:.2f} tokens/s, {result.seconds_per_step * 1e3:.2f} ms per step",
        "workload": f"{result.shape} {result.quant}, {result.batch} row(s), context {result.context}, "
        f"{result.replay_ratio:.1%} replay, in the fabric: {result.offload}",
        "over dense": f"{result.speedup_over_dense:.2f}x ({versus['dense']:.2f} tokens/s)",
        "without": f"DRS {versus['static_mapping']:.2f}, prefetch {versus['no_prefetch']:.2f}, "
        f"both {versus['static_no_prefetch']:.2f} tokens/s",
        "bound by": f"{result.bound_by} ({shares})",
        "bandwidth": f"{result.bandwidth_utilisation:.1%} of peak; weights {result.weight_stream_utilisation:.1%}",
        "energy": f"{result.energy_per_token_j:.3f} J per token, {result.power_w:.1f} W",
        "attention": f"reads {result.attended} of {result.context} positions; "
        f"keys and values {result.memory['kv_cache'] / 1e6:.2f} MB",
        "gate": _gate(result),
        "memory": f"{result.memory['total'] / 1e9:.2f} of {result.memory['capacity'] / 1e9:.2f} GB",
        "engine": f"{result.design['ports']} weight ports, {result.design['lanes']} lanes, "
        f"{result.design['spec']['cores']} core(s); {used}",
    }
    if result.exploration:
        found = result.exploration
        why = f" (a faster design needs {', '.join(found['faster'])})" if found["faster"] else ""
        rows["exploration"] = (
            f"{found['tried']} designs, {found['rejected']} do not fit; bound by {found['bound_by']}{why}"
        )
    for name, value in rows.items():
        table.add_row(f"[bold]{name}[/]", value)
    print_table(table)
    if plot is not None:
        stdout().print(f"time line drawn in {plot}", markup=False, soft_wrap=True)
