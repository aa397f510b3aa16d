"""`fastcar targets`, `doctor`, `cache`: boards to compile for, what this machine has, and what it keeps of builds."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

import fastcar_compile as fc
from fastcar_compile.cli.common import ExitCode, JsonOption, command
from fastcar_compile.cli.options import TARGETS
from fastcar_compile.cli.output import print_fields, print_result, print_table, print_text
from fastcar_compile.errors import UserError, count_text, size_text

if TYPE_CHECKING:
    from fastcar_compile.config.targets import Memory
    from fastcar_compile.report.environment import Check


@command
def targets_command(
    name: Annotated[str | None, Argument(autocompletion=TARGETS)] = None, as_json: JsonOption = False
) -> None:
    """List the targets, or show one with its sources.

    Args:
        name: A target's name or a path to its .toml file.
    """
    if name is not None:
        target = fc.load_target(name)
        facts = {"target": target.model_dump(mode="json"), "budget": target.budget()}
        print_result(as_json, facts, lambda: _show_one(target))
        return
    targets = [fc.load_target(each) for each in fc.available_targets()]
    found = {"targets": [target.model_dump(mode="json") for target in targets]}
    print_result(as_json, found, lambda: print_table(_TITLES, map(_row, targets)))


_TITLES = ("target", "part", "host", ">LUT", ">DSP", ">BRAM36", ">URAM", ">GB/s", ">MHz")


def _row(target: fc.Target) -> tuple[object, ...]:
    fabric = target.fabric
    counts = ("-",) * 4 if fabric is None else (fabric.lut, fabric.dsp, fabric.bram36, fabric.uram)
    clock = "-" if fabric is None else f"{fabric.clock_mhz:g}"
    part = target.part or "-" if target.estimate_only is None else "estimate only"
    return target.name, part, target.host.cpu, *counts, f"{target.peak_bandwidth / 1e9:.1f}", clock


def _show_one(target: fc.Target) -> None:
    host = target.host
    facts = [] if target.estimate_only is None else [("estimate only", "no artifact is built", target.estimate_only)]
    facts.append(("host", f"{target.host_triple}, {host.cpu}, {host.cores or 'all'} cores", host.source))
    if target.fabric is not None and target.limits is not None:
        fabric = target.fabric
        counts = f"{fabric.lut} LUT, {fabric.ff} FF, {fabric.dsp} DSP, {fabric.bram36} BRAM36, {fabric.uram} URAM"
        budget = ", ".join(f"{count} {resource.upper()}" for resource, count in target.budget().items())
        facts.append(("fabric", f"{target.part}: {counts}, {fabric.clock_mhz:g} MHz", fabric.source))
        facts.append(("budget", budget, target.limits.source))
    for memory in target.memories:
        facts += _memory_facts(memory)
    power = target.power
    text = f"{power.static_w:g} W static, {power.dram_pj_per_byte:g} pJ/byte DRAM, {power.mac_int8_pj:g} pJ/MAC int8"
    facts.append(("power", text, power.source))
    print_text(f"{target.name} ({target.kind}): {target.description}\n")
    print_fields({name: f"{value}\n{source}" for name, value, source in facts})


def _memory_facts(memory: Memory) -> list[tuple[str, str, str]]:
    """Return name, text and source of what is known of a memory."""
    size, speed = size_text(memory.capacity_bytes), memory.peak_bandwidth / 1e9
    ports = f"{count_text(memory.ports, 'port')} of {memory.width_bits} bits"
    ports += f", bursts of up to {memory.burst_bytes} bytes"
    facts = [(f"memory {memory.name}", f"{size}, {speed:.1f} GB/s peak, {ports}", memory.source)]
    if memory.measured is not None:
        share = memory.measured.share
        text = f"{share * speed:.1f} GB/s, {share:.1%} of the peak"
        facts.append((f"{memory.name} measured", text, memory.measured.source))
    return facts


ORDER = ("error", "warning", "info", "ok")


@command
def doctor_command(as_json: JsonOption = False) -> ExitCode:
    """Look for compilers, packages, headers and devices.

    The exit code is 2 where something needed is missing.
    """
    checks = fc.doctor()
    print_result(as_json, {"checks": [check.model_dump(mode="json") for check in checks]}, lambda: _show(checks))
    return ExitCode.USER_ERROR if any(check.severity == "error" for check in checks) else ExitCode.OK


def _show(checks: tuple[Check, ...]) -> None:
    """Print the checks, the worst first."""
    rows = (
        (check.severity, check.name, check.message + (f"; hint: {check.hint}" if check.hint else ""))
        for check in sorted(checks, key=lambda check: ORDER.index(check.severity))
    )
    print_table(("severity", "what", "found"), rows)
    counts = Counter(check.severity for check in checks)
    print_text("\n" + ", ".join(f"{counts[name]} {name}" for name in ORDER if counts[name]))


_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}


@command
def cache_command(
    folder: Annotated[Path | None, Option()] = None,
    trim: Annotated[str | None, Option(metavar="SIZE")] = None,
    as_json: JsonOption = False,
) -> None:
    """Show what the build cache holds, or trim it.

    Args:
        folder: Folder of the cache; default: builds in $FASTCAR_CACHE.
        trim: Remove what was used least recently, until at most this is left, such as 10GB or 0.
    """
    cache = fc.Cache(folder)
    if trim is not None:
        cache.trim(_bytes_of(trim))
    size, entries = sum(cache.sizes().values()), len(cache.entries())
    facts = {"folder": str(cache.folder), "bytes": size, "entries": entries}
    fields = {"folder": str(cache.folder), "size": size_text(size), "entries": str(entries)}
    print_result(as_json, facts, lambda: print_fields(fields))


def _bytes_of(text: str) -> int:
    """Return the bytes of a size such as "10GB".

    Raises:
        UserError: it is not a size.
    """
    found = re.fullmatch(r"(\d{1,6}(?:\.\d{1,3})?) ?([KMGT]?)B?", text.strip(), re.IGNORECASE)
    if found is None:
        raise UserError(f"{text!r} is not a size", where="--trim", hint="give for example 10GB, or 0")
    return int(float(found[1]) * _UNITS[found[2].upper()])
