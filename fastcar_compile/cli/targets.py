"""`fastcar targets`: the boards that artifacts can be compiled for."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.table import Table

from fastcar_compile.cli.common import ExitCode, JsonOption, command, print_json, print_table, stdout
from fastcar_compile.targets import Target, available_targets, load_target


@command
def targets_command(
    name: Annotated[str | None, typer.Argument(help="A target's name or a path to its .toml file.")] = None,
    as_json: JsonOption = False,
) -> ExitCode:
    """List the targets, or show one with the source of each figure."""
    if name is not None:
        target = load_target(name)
        if as_json:
            print_json({"target": target.model_dump(mode="json"), "budget": target.budget()})
        else:
            _show_one(target)
        return ExitCode.OK
    targets = [load_target(each) for each in available_targets()]
    if as_json:
        print_json({"targets": [target.model_dump(mode="json") for target in targets]})
    else:
        _show_all(targets)
    return ExitCode.OK


def _show_all(targets: list[Target]) -> None:
    table = Table(box=None, pad_edge=False)
    for title in ("target", "part", "host"):
        table.add_column(title, no_wrap=True)
    for title in ("LUT", "DSP", "BRAM36", "URAM", "GB/s", "MHz"):
        table.add_column(title, justify="right", no_wrap=True)
    for target in targets:
        fabric = target.fabric
        counts = ["-"] * 4 if fabric is None else [str(n) for n in (fabric.lut, fabric.dsp, fabric.bram36, fabric.uram)]
        clock = "-" if fabric is None else f"{fabric.clock_mhz:g}"
        bandwidth = f"{target.peak_bandwidth / 1e9:.1f}"
        table.add_row(target.name, target.part or "-", target.host.cpu, *counts, bandwidth, clock)
    print_table(table)


def _show_one(target: Target) -> None:
    table = Table(title=target.description, title_justify="left", box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column()
    table.add_column(style="dim")
    table.add_row("name", f"{target.name} ({target.kind})", "")
    table.add_row(
        "host", f"{target.host_triple}, {target.host.cpu}, {target.host.cores or 'all'} cores", target.host.source
    )
    if target.fabric is not None:
        fabric = target.fabric
        budget = ", ".join(f"{name} {count}" for name, count in target.budget().items())
        counts = f"{fabric.lut} LUT, {fabric.ff} FF, {fabric.dsp} DSP, {fabric.bram36} BRAM36, {fabric.uram} URAM"
        table.add_row("part", str(target.part), "")
        table.add_row("fabric", f"{counts}, {fabric.clock_mhz:g} MHz", fabric.source)
        table.add_row("budget", budget, target.limits.source if target.limits else "")
    for memory in target.memories:
        size, speed = memory.capacity_bytes / 2**30, memory.peak_bandwidth / 1e9
        text = f"{size:g} GiB, {speed:.1f} GB/s peak, {memory.ports} ports of {memory.width_bits} bits"
        table.add_row(f"memory {memory.name}", text, memory.source)
    power = target.power
    text = f"{power.static_w:g} W static, {power.dram_pj_per_byte:g} pJ/byte DRAM, {power.mac_int8_pj:g} pJ/MAC int8"
    table.add_row("power", text, power.source)
    stdout().print(table)
