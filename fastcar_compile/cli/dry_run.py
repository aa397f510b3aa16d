"""The text of `fastcar compile --dry-run`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from fastcar_compile.cli.output import Column, print_fields, print_table, print_text, size_text
from fastcar_compile.errors import count_text

if TYPE_CHECKING:
    from fastcar_compile.artifact.sections import LayerPart
    from fastcar_compile.dry_run.report import Bank, DryRun


def show_dry_run(report: DryRun) -> None:
    """Print what would be built: layers, places, memory, engine, speed, and what is refused."""
    print_fields(_summary(report))
    print_text("")
    _show_layers(report.layers)
    _show_places(report)
    _show_memory(report)
    _show_speed(report)
    _show_list("fallbacks", [_fallback(report, i) for i in range(len(report.fallbacks))])
    _show_list("refused by compile", [_lines(p.what, p.where, p.hint) for p in report.problems])


def _summary(report: DryRun) -> dict[str, str]:
    decoder, options = report.decoder, report.options
    able = sum(layer.replay is not None for layer in report.layers)
    fields = {
        "dry run": "would be built; nothing was written" if report.ok else "would be REFUSED, see below",
        "decoder": f"{count_text(decoder.num_layers, 'layer')}, hidden {decoder.hidden_size}, "
        f"{decoder.vocab_size or 'no'} vocabulary entries, {decoder.max_seq_len} positions, "
        f"{count_text(decoder.tokens_per_frame, 'token')} per frame, {count_text(decoder.batch_size, 'row')}",
        "options": f"target {report.target}, quant {options.quant}, kv {options.kv}, numerics {options.numerics}, "
        f"offload {options.offload}",
        "replay": f"{able} of {count_text(len(report.layers), 'layer')} may replay",
        "pipeline": re.sub(r"\{.*?\}(?=,|$)", "", report.pipeline).replace(",", ", "),
    }
    return fields | _engine(report)


def _engine(report: DryRun) -> dict[str, str]:
    design, found = report.design, report.exploration
    if design is None or found is None:
        return {"engine": "none"}
    why = f"; a faster one needs {', '.join(found.faster)}" if found.faster else ""
    return {
        "engine": f"{count_text(design.ports, 'weight port')} of 128 bits, {count_text(design.lanes, 'lane')}, "
        f"{count_text(design.spec.cores, 'core')} at {design.budget.clock_mhz:g} MHz",
        "chosen": f"of {count_text(found.tried, 'design')}, {found.rejected} too large; bound by {found.bound_by}{why}",
    }


def _show_layers(layers: Sequence[LayerPart]) -> None:
    rows: list[list[str]] = []
    for _, alike in groupby(layers, _kind):
        group = list(alike)
        first, attention, mlp = group[0], group[0].attention, group[0].mlp
        kind = f"{'gated ' if mlp.gated else ''}{mlp.activation}"
        replay = first.replay
        rows.append(
            [
                span([layer.layer for layer in group]),
                f"{_pattern(first, len(group))}\n{PurePosixPath(first.source).name}",
                f"{kind} {mlp.hidden} -> {mlp.intermediate}\n"
                f"heads {attention.num_heads}, kv {attention.num_kv_heads}, dim {attention.head_dim}",
                "computes always" if replay is None else f"{replay.gate}, threshold {replay.threshold:g}",
            ]
        )
    titles = ("layers", "MLP, source", "size", "replay")
    print_table([Column(title) for title in titles], rows)


def _kind(layer: LayerPart) -> tuple[object, ...]:
    """What layers of one row of the table have in common."""
    attention, mlp, replay = layer.attention, layer.mlp, layer.replay
    heads = (attention.num_heads, attention.num_kv_heads, attention.head_dim)
    rule = None if replay is None else (replay.gate, replay.threshold)
    return layer.source, heads, mlp.gated, mlp.activation, mlp.hidden, mlp.intermediate, rule


def _pattern(layer: LayerPart, count: int) -> str:
    """The module path, with a star for the layer's number where it stands for several layers."""
    return layer.module_path if count == 1 else re.sub(rf"\b{layer.layer}\b", "*", layer.module_path, count=1)


def _show_places(report: DryRun) -> None:
    rows = [[p.what, p.unit, span(p.layers), str(p.calls or ""), p.reason] for p in report.placements]
    print_text("")
    columns = (Column("part"), Column("runs on"), Column("layers"), Column("calls", right=True), Column("why"))
    print_table(columns, rows)


def _show_memory(report: DryRun) -> None:
    memory = report.memory
    state = ", ".join(f"{role} {size_text(size)}" for role, size in memory.state.items())
    print_text("")
    print_fields({"parameters": size_text(memory.weights), "state": state})
    rows: list[list[str]] = []
    for _, alike in groupby(memory.banks, lambda b: (b.memory, b.used, b.capacity, not b.tag)):
        group = list(alike)
        rows.append(_bank_row(group))
    print_text("")
    columns = (Column("memory"), Column("holds"), Column("used", right=True), Column("of", right=True), Column("fits"))
    print_table(columns, rows)


def _bank_row(group: Sequence[Bank]) -> list[str]:
    """One row for banks that are filled alike."""
    first, last = group[0], group[-1]
    tags = first.tag if len(group) == 1 else f"{first.tag} .. {last.tag}, each"
    holds = first.holds if len(group) == 1 else f"weight streams of ports 0 to {len(group) - 1}"
    room = "-" if first.capacity is None else size_text(first.capacity)
    fits = "-" if first.capacity is None else "yes" if first.fits else "NO"
    return [f"{first.memory} {tags}".rstrip(), holds, size_text(first.used), room, fits]


def _show_speed(report: DryRun) -> None:
    if not report.speed:
        return
    rows = [
        [
            s.case,
            f"{s.replay_ratio:.1%}",
            f"{s.tokens_per_second:.2f}",
            f"{s.seconds_per_step * 1e3:.2f}",
            f"{s.bandwidth_utilisation:.1%}",
            f"{s.energy_per_token_j:.3f}",
            s.bound_by,
        ]
        for s in report.speed
    ]
    print_text("")
    titles = ("replays", "MLPs", "tokens/s", "ms/step", "bandwidth", "J/token")
    print_table([Column("predicted"), *(Column(t, right=True) for t in titles[1:]), Column("bound by")], rows)


def _fallback(report: DryRun, index: int) -> str:
    found = report.fallbacks[index]
    layers = f" of layers {span(found.layers)}" if found.layers else ""
    return _lines(f"{found.what}{layers}: {found.instead}; {found.reason}", found.where, found.hint)


def _lines(what: str, where: str, hint: str) -> str:
    more = [f"    {name}: {text}" for name, text in (("where", where), ("hint", hint)) if text]
    return "\n".join([what, *more])


def _show_list(title: str, items: Iterable[str]) -> None:
    texts = list(items)
    if texts:
        print_text(f"\n{title}:")
    for text in texts:
        print_text(f"  - {text}")


def span(layers: Sequence[int]) -> str:
    """Return numbers as runs: "0-3, 5"."""
    runs: list[list[int]] = []
    for layer in layers:
        if runs and layer == runs[-1][-1] + 1:
            runs[-1].append(layer)
        else:
            runs.append([layer])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
