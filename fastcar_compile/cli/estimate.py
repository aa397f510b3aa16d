"""`fastcar estimate` and `hls-report`: speed and resources on a board, by the model and by the tools."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

from typer import Argument, Option

import fastcar_compile as fc
from fastcar_compile.cli.common import ExitCode, JsonOption, MayRead, Writes, command, stages
from fastcar_compile.cli.options import TARGETS, existing, require_one
from fastcar_compile.cli.output import print_fields, print_json, print_result, print_table, print_text
from fastcar_compile.config.listing import Needs
from fastcar_compile.errors import CompileError, UserError, count_text, names_text, size_text

if TYPE_CHECKING:
    from fastcar_compile.codegen.hls.design.design import Design
    from fastcar_compile.codegen.hls.model.system import Estimate
    from fastcar_compile.codegen.hls.model.workload import Workload
    from fastcar_compile.codegen.hls.step_program.program import StepProgram
    from fastcar_compile.report.tool_reports import ReportCheck

ASSUMED: dict[str, Any] = {"target": "zcu102", "quant": "w8a8", "context": 512}
"""Of a shape, what nobody gives."""


@command
def estimate_command(
    artifact: Annotated[Path | None, Argument()] = None,
    shape: str | None = None,
    target: Annotated[str | None, Option(autocompletion=TARGETS), MayRead()] = None,
    quant: str | None = None,
    context: Annotated[int | None, Option(min=1)] = None,
    batch_size: Annotated[int | None, Option(min=1, max=32)] = None,
    rows: Annotated[int | None, Option(min=1, max=32)] = None,
    replay: float | None = None,
    trace: Path | None = None,
    offload: str | None = None,
    kv: str | None = None,
    window: Annotated[int | None, Option(min=1)] = None,
    sinks: Annotated[int | None, Option(min=0), Needs("window")] = None,
    gate: str | None = None,
    gate_units: Annotated[int | None, Option(min=1)] = None,
    draft_share: Annotated[float | None, Option(min=0, max=1)] = None,
    acceptance: float | None = None,
    what_if: bool = False,
    time_line: Annotated[Path | None, Writes("time line")] = None,
    as_json: JsonOption = False,
) -> None:
    """Predict speed, energy and resources on a board.

    Nothing is run: the model of the hardware simulates one decode step.

    Args:
        artifact: Folder of an artifact; or give --shape.
        shape: A decoder by name, without weights, e.g. llama2-7b.
        target: Board; default: the artifact's, or zcu102.
        quant: w8a8 or w4a8; default: the artifact's, or w8a8.
        context: Positions that attention reads.
        batch_size: Videos decoded together.
        rows: Rows of each video, each with a position of its own.
        replay: Share of all MLPs that replay, 0 to 1.
        trace: Recorded decisions (.npy of `fastcar run --trace`).
        offload: In the fabric: mlp; linears; all (the step). Default: the artifact's, or compile's.
        kv: Keys and values as float32, float16, bfloat16 or int8.
        window: Sparse attention: attend to this many last tokens.
        sinks: ... and to this many first ones; default: 16.
        gate: What decides; default: the artifact's, or tas.
        gate_units: Hidden units of gate learned; default: 16.
        draft_share: Weights of a draft in each layer, as a share of the MLP's; 0: none. Default: the artifact's.
        acceptance: Tokens of a video that a coupled launch accepts: tokens_per_step of `fastcar run --json`.
        what_if: Predict also a board without artifacts, and what does not fit the memory.
        time_line: Write the time line of one token in Chrome's trace format, call by call.
    """
    from fastcar_compile.codegen.hls.model.question import load_trace
    from fastcar_compile.codegen.hls.model.system import default_offload, estimate, write_time_line

    require_one({"ARTIFACT": artifact, "--shape": shape})
    require_one({"--replay": replay, "--trace": trace})
    found = of_shape(shape, target) if artifact is None else of_artifact(artifact, target)
    work, board, design, program = found
    free = offload is None and design is None  # the offload follows from the board
    if free and artifact is not None:
        work = as_compiled(artifact, work, board, kv)
        free = work is not found[0]
    own_sinks = fc.SparseAttention().sinks if sinks is None else sinks
    wishes: dict[str, Any] = {"quant": quant, "context": context, "rows": rows, "replay": replay, "offload": offload}
    wishes |= {"kv": kv, "accepted": acceptance}
    wishes["sink_window"] = None if window is None else (own_sinks, window)
    if batch_size is not None or rows is not None:
        wishes["batch"] = (batch_size or work.batch // work.rows) * (rows or work.rows)
    given = {"target": target, "quant": quant, "context": context}
    assumed = [f"--{name} {ASSUMED[name]}" for name, value in given.items() if artifact is None and value is None]
    chosen = with_options(work, wishes)
    chosen = with_gate(chosen, gate, gate_units, draft_share)
    if free and board.kind == "fpga":
        own = chosen.rows > 1 or bool(chosen.drafts)  # only whole steps have them
        chosen = replace(chosen, offload="all" if own else default_offload(chosen, board, what_if=what_if))
    made = ("quant", "batch", "rows", "offload", "drafts")
    if any(getattr(chosen, name) != getattr(work, name) for name in made):
        design = None
    if replace(chosen, context=work.context, replay=work.replay, memory=work.memory, accepted=None) != work:
        program = None
    with stages(as_json, "estimate", "simulating one token"):
        decisions = None if trace is None else load_trace(existing(trace, "trace"))
        result = estimate(chosen, board, decisions=decisions, design=design, program=program, what_if=what_if)
        if time_line is not None:
            write_time_line(result, time_line)
    if as_json:
        print_json(result.to_json() | {"assumed": assumed, "time_line_file": time_line})
        return
    first = {"assumed": ", ".join(assumed)} if assumed else {}
    print_fields(first | _speed_fields(result) | _cost_fields(result))
    if time_line is not None:
        print_text(f"time line written: {time_line}")


Question = tuple["Workload", "fc.Target", "Design | None", "StepProgram | None"]
"""What is asked of a board; the design and the step program that an artifact has for it."""


def of_shape(name: str | None, target: str | None) -> Question:
    """Return what a decoder shape asks of a board; nothing is emitted for it.

    Raises:
        UserError: there is no name.
    """
    from fastcar_compile.codegen.hls.model.shapes import load_shape
    from fastcar_compile.codegen.hls.model.workload import Workload

    if name is None:
        raise UserError("nothing to estimate", hint="give the folder of an artifact, or --shape NAME")
    board = fc.load_target(target or ASSUMED["target"])
    return Workload(load_shape(name), ASSUMED["quant"], ASSUMED["context"]), board, None, None


def of_artifact(path: Path, target: str | None) -> Question:
    """Return what an artifact asks of its own board, or of another one, and what was emitted for that board."""
    from fastcar_compile.codegen.hls.model.workload import design_of, program_of, workload_of

    artifact = fc.load(path)
    board = artifact.manifest.target if target is None else fc.load_target(target)
    design = design_of(artifact.manifest, board)
    return workload_of(artifact.manifest), board, design, None if design is None else program_of(artifact)


def as_compiled(path: Path, work: Workload, board: fc.Target, kv: str | None) -> Workload:
    """Return the workload of an artifact without an accelerator as `compile` would offload it to this board."""
    from fastcar_compile.codegen.hls.model.workload import workload_of_sections
    from fastcar_compile.config.resolve import whole_step

    manifest = fc.load(path).manifest
    names = ("tokens_per_frame", "max_seq_len", "batch_size", "rows", "sparse_attention")
    options = {name: getattr(manifest.options, name) for name in names} | {"quant": work.quant}
    wish = whole_step(board, options if kv is None else options | {"kv": kv})
    if manifest.accelerator is not None or wish is None or work.gate.on_host:
        return work
    from fastcar_compile.cli.opt import read_program
    from fastcar_compile.codegen.hls.accelerator import offloaded
    from fastcar_compile.codegen.plan import rewritten

    try:
        rewritten(program := read_program(path), wish)
        offloaded(program, wish.offload)
    except CompileError:
        return work
    config = wish.model_copy(update={"replay": manifest.options.replay})
    return replace(workload_of_sections(config, manifest.decoder, manifest.layers.layers), memory=None)


def with_options(work: Workload, wishes: dict[str, Any]) -> Workload:
    """Return the workload with what the command line asks for; None: as the workload has it.

    Raises:
        UserError: a quantisation, an offload or a type of the KV cache that there is not.
    """
    from fastcar_compile.config.formats import ACCELERATED, KV_TYPES

    offloads: tuple[str, ...] = get_args(fc.CompileConfig.model_fields["offload"].annotation)
    given = {name: value for name, value in wishes.items() if value is not None}
    if given.get("quant", ASSUMED["quant"]) not in ACCELERATED:
        hint = f"give one of {names_text(ACCELERATED, given['quant'])}"
        raise UserError(f"there is no engine for --quant {given['quant']}", hint=hint)
    for name, known in (("offload", offloads), ("kv", tuple(KV_TYPES))):
        if name in given and given[name] not in known:
            hint = f"give one of {names_text(known, given[name])}"
            raise UserError(f"--{name} {given[name]} is not known", hint=hint)
    if "sink_window" in given:
        given["kv_rows"] = None  # an artifact's own ring has another window
    if given.keys() - {"offload", "replay", "accepted"}:
        given["memory"] = None  # that of another decoder than was compiled
    return replace(work, **given)


def with_gate(work: Workload, gate: str | None, units: int | None, draft_share: float | None) -> Workload:
    """Return the workload with another gate and other drafts; None: as the workload has them.

    Raises:
        InputError: an unknown gate, units without a network, or a draft that is no smaller than the MLP.
    """
    from fastcar_compile.codegen.hls.model.workload import GateModel

    if draft_share and gate is None and not work.gate.kind.reads_input:
        gate = "learned"  # that of a draft's file
    if gate is not None or units is not None:
        work = replace(work, gate=GateModel.named(gate or work.gate.name, units))
    return work if draft_share is None else work.with_drafts(draft_share)


def _speed_fields(result: Estimate) -> dict[str, str]:
    shares = ", ".join(f"{unit} {share:.1%}" for unit, share in sorted(result.shares.items(), key=lambda s: -s[1]))
    versus, speed = result.comparison, f"{result.unit}s/s"
    asked = {"what if": f"NOT EMITTED by this compiler: {'; '.join(result.what_if)}"} if result.what_if else {}
    if head := result.depth:
        asked["with depth head"] = head.get("refused") or (
            f"{head['positions_per_second']:.2f} positions/s, dense {head['dense']:.2f}; "
            f"{head['codes']} codes in {head['seconds'] * 1e3:.1f} ms by a kernel of its own"
        )
    return asked | {
        "predicted": f"{result.tokens_per_second:.2f} {speed}, {result.seconds_per_step * 1e3:.2f} ms per step",
        "workload": f"{result.shape} {result.quant}, {count_text(result.batch, 'row')}, context {result.context}, "
        f"{result.replay_ratio:.1%} replay, in the fabric: {result.offload}",
        "over dense": f"{result.speedup_over_dense:.2f}x ({versus['dense']:.2f} {speed})",
        "static mapping": f"{versus['static_mapping']:.2f} {speed}",
        "bound by": f"{result.bound_by} ({shares})",
        "bandwidth": f"{result.bandwidth_utilisation:.1%} of peak; weights {result.weight_stream_utilisation:.1%}; "
        f"{result.measured_utilisation:.1%} of what was measured",
        "energy": f"{result.energy_per_token_j:.3f} J per {result.unit}, "
        f"{_with_range(result.tokens_per_second / w for w in result.watts)} per J, {_with_range(result.watts)} W",
        "by context": "\n".join(_curve_line(row, speed) for row in result.curve),
    }


def _with_range(figures: Iterable[float]) -> str:
    """Return a figure, and between which it may be."""
    value, *ends = figures
    return f"{value:.2f} ({min(ends):.2f} to {max(ends):.2f})"


def _curve_line(row: dict[str, float], speed: str) -> str:
    """Return one line of the table by context."""
    line = f"{row['context']:>6}: {row['tokens_per_second']:.2f} {speed}"
    if "accepted_per_second" in row:
        line += f", {row['accepted_per_second']:.2f} accepted"
    return f"{line}, a prompt's first after {row['first_token_s']:.1f} s" if "first_token_s" in row else line


def _cost_fields(result: Estimate) -> dict[str, str]:
    design, memory = result.design, result.memory
    fields = {
        "attention": f"reads {result.attended} of {result.context} positions; "
        f"keys and values {memory['kv_cache'] / 1e6:.2f} MB",
        "gate": _gate_text(result.gate),
        **_draft_fields(result.draft),
        "memory": f"{size_text(memory['total'])} of {size_text(memory['capacity'])}",
        "engine": f"{count_text(design['ports'], 'weight port')}, {count_text(design['lanes'], 'lane')}, "
        f"{count_text(design['spec']['cores'], 'core')}",
        "resources": ", ".join(f"{name} {r['used']} of {r['limit']}" for name, r in result.resources.items()),
    }
    if (rate := result.prefill_positions_per_second) is not None:
        each = "position" if result.rows == 1 else f"{result.rows} positions"
        fields["prefill"] = f"{rate:.2f} positions/s: one launch and one weight stream per {each} of a prompt"
    if result.exploration:
        found = result.exploration
        why = f" (a faster design needs {', '.join(found['faster'])})" if found["faster"] else ""
        fields["exploration"] = (
            f"{count_text(found['tried'], 'design')}, {found['rejected']} too large; bound by {found['bound_by']}{why}"
        )
    return fields


def _draft_fields(draft: dict[str, Any]) -> dict[str, str]:
    """Return the size of the drafts; nothing where there is none."""
    if not draft:
        return {}
    size = f"{draft['neurons']} neurons and rank {draft['rank']} in {count_text(draft['layers'], 'layer')}"
    return {"draft": f"{size}, {draft['share']:.1%} of the MLPs' weights, {draft['bytes'] / 1e6:.2f} MB"}


def _gate_text(gate: dict[str, Any]) -> str:
    """Return who decides, and what the gate keeps beside the MLP cache."""
    extra = f"{gate['cache_bytes'] / 1e6:.2f} MB of gate cache" if gate["cache_bytes"] else "no cache of its own"
    weights = f", {gate['weight_bytes'] / 1e6:.3f} MB of weights ({gate['units']} units)" if gate["units"] else ""
    return f"{gate['name']}, decided on the {gate['decided_on']}; {extra}{weights}"


TOLERANCE = 0.1


@command
def hls_report_command(
    artifact: Annotated[Path, Argument()],
    folder: Annotated[Path, Argument()],
    tolerance: Annotated[float, Option(min=0)] = TOLERANCE,
    as_json: JsonOption = False,
) -> ExitCode:
    """Compare reports of Vitis HLS and Vivado with the model.

    Reads csynth.xml, Vivado's utilisation and timing, and what `make reports` wrote, in the folder and below it.

    Args:
        artifact: Folder of the artifact that the kernel is of.
        folder: Where the tools have written, such as board/build.
        tolerance: Share by which a depth or a resource may exceed the model; an interval or a clock may not.
    """
    from fastcar_compile.report.tool_reports import compared, expected_of, read_reports

    expected = expected_of(fc.load(artifact))
    found = read_reports(existing(folder, "folder"), expected.kernel)
    checks = compared(expected, found, tolerance)
    worse = sum(check.worse for check in checks)
    result = {
        "kernel": expected.kernel,
        "files": [str(path) for path in found.files],
        "tolerance": tolerance,
        "checks": [asdict(check) for check in checks],
        "worse": worse,
    }
    print_result(as_json, result, lambda: _show_checks(checks, worse))
    return ExitCode.MISMATCH if worse else ExitCode.OK


_CHECKS = ("", "what", ">model", ">tool", "source")


def _show_checks(checks: list[ReportCheck], worse: int) -> None:
    """Print what differs, worse first; equal figures of loops are counted alone."""
    shown = sorted((c for c in checks if c.kind != "loop" or c.model != c.tool), key=lambda c: not c.worse)
    rows = (("worse" if c.worse else "", c.what, f"{c.model:.10g}", f"{c.tool:.10g}", c.source) for c in shown)
    print_table(_CHECKS, rows)
    equal = count_text(len(checks) - len(shown), "figure")
    print_text(f"\n{equal} of loops as in the model; {count_text(worse, 'figure')} worse")
