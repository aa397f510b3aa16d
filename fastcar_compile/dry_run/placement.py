"""Where every part of the decode step runs."""

from __future__ import annotations

from collections.abc import Iterator

from fastcar_compile.codegen.hls.plan import AcceleratorPlan
from fastcar_compile.config import CompileConfig
from fastcar_compile.dry_run.report import Fallback, Placement
from fastcar_compile.ir.program import DecoderProgram
from fastcar_compile.targets import Target

REST = "attention, norms, embedding, residual adds"
NO_KERNEL = "the accelerator has no kernel for them"
WHOLE = "decode step: MLPs, gates, linears, attention, norms, residual adds"


def placements_of(
    program: DecoderProgram, config: CompileConfig, board: Target, plan: AcceleratorPlan | None, kept: list[Fallback]
) -> list[Placement]:
    """Return the parts, the accelerator's first. `kept`: the fallbacks, whose reasons the host's parts repeat."""
    layers = tuple(site.layer for site in program.sites)
    if plan is None:
        return [Placement(what="every part", unit="host", layers=layers, reason=_why_host(board, kept))]
    if config.offload == "all":
        return _whole_step(layers)
    own = tuple(layer for layer, factor in enumerate(plan.table.factors) if factor != 0)
    found = [Placement(what="MLP", unit="accelerator", layers=layers, calls=len(layers), reason="offload")]
    if own:
        found.append(Placement(what="gate", unit="accelerator", layers=own, calls=len(own), reason="offload"))
    found += _calls(plan)
    found += [
        Placement(what=f.what, unit="host", layers=f.layers, reason=f.reason)
        for f in kept
        if f.kind in ("gate", "linear")
    ]
    if config.offload == "mlp":
        found.append(Placement(what="projections and head", unit="host", layers=layers, reason="offload is 'mlp'"))
    found.append(Placement(what=REST, unit="host", layers=layers, reason=NO_KERNEL))
    if program.prefill is not None:
        found.append(Placement(what="prefill", unit="host", layers=layers, reason="the accelerator decodes only"))
    return found


def _whole_step(layers: tuple[int, ...]) -> list[Placement]:
    """Return the parts with offload "all"."""
    reason = "offload is 'all'"
    return [
        Placement(what=WHOLE, unit="accelerator", layers=layers, calls=1, reason=reason),
        Placement(what="prefill", unit="accelerator", layers=layers, reason="a launch for every position of a prompt"),
        Placement(what="embedding", unit="host", reason="it reads one row of a table per token"),
    ]


def _why_host(board: Target, kept: list[Fallback]) -> str:
    """Return why nothing is offloaded."""
    if board.kind != "fpga":
        return f"target {board.name} has no accelerator"
    return next((f.reason for f in kept if f.kind == "accelerator"), "no engine was found: see the problems")


def _calls(plan: AcceleratorPlan) -> Iterator[Placement]:
    """Yield the linear calls by their place in a layer."""
    layers: dict[str, list[int]] = {}
    counts: dict[str, int] = {}
    for call in plan.calls:
        place = call.name.rpartition(".")[2]
        found = layers.setdefault(place, [])
        counts[place] = counts.get(place, 0) + 1
        if call.layer is not None:
            found.append(call.layer)
    for place, found in layers.items():
        reason = "offload is 'linears'"
        yield Placement(what=place, unit="accelerator", layers=tuple(found), calls=counts[place], reason=reason)
