"""What the tools report of a kernel, and what the model and the sources of its artifact say: the comparison."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal
from xml.etree import ElementTree

from fastcar_compile.artifact.reader import StoredArtifact
from fastcar_compile.codegen.hls.control_table.reader import read_table
from fastcar_compile.codegen.hls.design.design import Design
from fastcar_compile.codegen.hls.design.exploration import resources_of
from fastcar_compile.codegen.hls.design.loops import Loop, load_loop, quantize_loops, tile_loops
from fastcar_compile.codegen.hls.design.step_loops import AttendWork, VectorWork, attend_loops
from fastcar_compile.codegen.hls.model.workload import design_of, program_of, workload_of
from fastcar_compile.codegen.hls.step_program.instructions import Attend
from fastcar_compile.config.targets import ON_A_BOARD
from fastcar_compile.errors import InputError, shown
from fastcar_compile.support.limits import MIB
from fastcar_compile.support.values import file_bytes

MOST_BYTES, MOST_TAGS = 64 * MIB, 2_000_000
"""Of one report. Vivado's longest are a few megabytes; an element of a tree takes many times the bytes of its tag."""

HINT = "give the folder that `make csynth`, `make link` and `make reports` wrote"


@dataclass(frozen=True)
class ToolLoop:
    """A pipelined loop of csynth.xml. function: its module. interval, depth: clocks; None: not told."""

    function: str
    label: str
    interval: int
    depth: int | None


@dataclass
class ToolReports:
    """What was found.

    Args:
        files: that were read. loops: of all modules.
        period_ns: estimated by HLS, its margin apart.
        hls, placed: resources by HLS, and after placement of the whole device: lut, ff, dsp, bram36, uram.
        slack_ns: worst, of setup. clock_mhz: of the device binary.
    """

    files: list[Path] = field(default_factory=list)
    loops: list[ToolLoop] = field(default_factory=list)
    period_ns: float | None = None
    hls: dict[str, float] = field(default_factory=dict)
    placed: dict[str, float] = field(default_factory=dict)
    slack_ns: float | None = None
    clock_mhz: float | None = None


def read_reports(folder: Path, kernel: str) -> ToolReports:
    """Return what a folder and those below it have of a kernel.

    Raises:
        InputError: there is no report of a known form, or one cannot be read or is damaged.
    """
    found = ToolReports()
    for path in sorted(folder.rglob("csynth.xml")):
        _read_synthesis(_xml(path), kernel, found, path)
    for path in sorted(folder.rglob("*.rpt"), key=_stage):
        text = _text(path)
        if "Design Timing Summary" in text and found.slack_ns is None and (slack := _slack(text, path)) is not None:
            found.slack_ns = slack
            found.files.append(path)
        if "Utilization Design Information" in text and not found.placed and (placed := dict(_placed(text, path))):
            found.placed = placed
            found.files.append(path)
    for path in sorted(folder.rglob("*.xclbin.info")):
        if (clock := _clock(_text(path), path)) is not None:
            found.clock_mhz = clock
            found.files.append(path)
    if not found.files:
        what = f"there is no csynth.xml of {kernel}, no report of Vivado and no .xclbin.info"
        raise InputError(what, where=str(folder), hint=HINT)
    return found


def _stage(path: Path) -> tuple[int, str]:
    """Order reports of the same kind: what was routed is nearer to the truth than what was placed."""
    order = ("routed", "placed")
    return next((n for n, word in enumerate(order) if word in path.name), len(order)), str(path)


def _text(path: Path) -> str:
    try:
        return file_bytes(path, MOST_BYTES).decode("utf-8", "replace")
    except (OSError, ValueError) as error:
        text = getattr(error, "strerror", None) or error
        raise InputError(f"the report cannot be read: {text}", where=str(path), hint=HINT) from error


def _xml(path: Path) -> ElementTree.Element:
    text = _text(path)
    try:
        if "<!DOCTYPE" in text or text.count("<") > MOST_TAGS:  # the entities of a document type can grow without end
            raise ValueError(f"it declares a document type, or has more than {MOST_TAGS} tags")
        return ElementTree.fromstring(text)
    except (ElementTree.ParseError, ValueError) as error:
        raise InputError(f"the report is no XML: {error}", where=str(path), hint="run `make csynth` again") from error


_RESOURCES = {"LUT": "lut", "FF": "ff", "DSP": "dsp", "DSP48E": "dsp", "URAM": "uram"}


def _read_synthesis(root: ElementTree.Element, kernel: str, found: ToolReports, path: Path) -> None:
    if root.findtext("UserAssignments/TopModelName", "").strip() != kernel:
        return
    found.files.append(path)
    found.period_ns = _figure(root, "PerformanceEstimates/SummaryOfTimingAnalysis/EstimatedClockPeriod", path)
    for item in root.iterfind("AreaEstimates/Resources/*"):
        value = _number(item.text, item.tag, path)
        if value is not None and item.tag == "BRAM_18K":
            found.hls["bram36"] = value / 2
        elif value is not None and item.tag in _RESOURCES:
            found.hls[_RESOURCES[item.tag]] = value
    modules = [
        (kernel, root),
        *((m.findtext("Name", "").strip(), m) for m in root.iterfind("ModuleInformation/Module")),
    ]
    for name, module in modules:
        for summary in module.iterfind("PerformanceEstimates/SummaryOfLoopLatency"):
            found.loops += _loops(name, summary, path)


def _loops(function: str, parent: ElementTree.Element, path: Path) -> Iterator[ToolLoop]:
    """Yield the pipelined loops below an element; nested loops are nested elements, named by their labels."""
    for loop in parent.iter():
        interval, depth = (_figure(loop, name, path) for name in ("PipelineII", "PipelineDepth"))
        if interval is not None:
            yield ToolLoop(function, loop.tag, int(interval), None if depth is None else int(depth))


def _figure(parent: ElementTree.Element, place: str, path: Path) -> float | None:
    return _number(parent.findtext(place), f"{parent.tag}/{place}", path)


_UNTOLD = re.compile(r"|[-?]|undef|NA|N/A|\S+ ?~ ?\S+")
"""What the tools write in the place of a figure, the last form where they know a range."""

_LARGEST = 1e15
"""Of a figure: any of them is far below, and a float holds every whole number up to here."""


def _number(text: str | None, name: str, path: Path) -> float | None:
    """Return a figure of a report, `name` by name; None: the tool does not tell it.

    Raises:
        InputError: the text is neither a number nor what the tools write without one.
    """
    given = (text or "").strip()
    if _UNTOLD.fullmatch(given):
        return None
    with suppress(ValueError):
        if abs(value := float(given)) <= _LARGEST:
            return value
    raise InputError(f"{name} of the report is {shown(given)}, not a figure", where=str(path), hint=HINT)


_SITES = {"CLB LUTs": "lut", "CLB Registers": "ff", "DSPs": "dsp", "Block RAM Tile": "bram36", "URAM": "uram"}


def _placed(text: str, path: Path) -> Iterator[tuple[str, float]]:
    for line in text.splitlines():
        start, *cells = (cell.strip() for cell in line.split("|", 3))
        site = cells[0].rstrip("* ") if len(cells) == 3 and not start else ""
        if site in _SITES and (used := _number(cells[1], site, path)) is not None:
            yield _SITES[site], used


def _slack(text: str, path: Path) -> float | None:
    """Return the figure below the title WNS(ns), which stands first in its line."""
    lines = iter(text.splitlines())
    if not any(line.lstrip().startswith("WNS(ns)") for line in lines):
        return None
    next(lines, "")  # of dashes
    return _number(next(iter(next(lines, "").split()), ""), "WNS(ns)", path)


def _clock(text: str, path: Path) -> float | None:
    """Return the frequency of the kernels' clock: the one of type DATA, else the first."""
    clocks = re.findall(r"Type: +(\S+)\s+Frequency: +(\S+) MHz", text)
    data = [rate for kind, rate in clocks if kind == "DATA"] or [rate for _, rate in clocks]
    return _number(data[0], "Frequency", path) if data else None


@dataclass(frozen=True)
class ReportCheck:
    """A figure of a tool and the model's. what: of what, with its unit; worse: beyond what is allowed."""

    kind: Literal["loop", "clock", "resource"]
    what: str
    model: float
    tool: float
    source: str
    worse: bool


def compared(expected: Expected, found: ToolReports, tolerance: float) -> list[ReportCheck]:
    """Return every figure that both have.

    Args:
        tolerance: share by which a depth or a resource may be more than the model's.
    """
    return [
        *_clocks(expected, found),
        *_resources(expected, found, tolerance),
        *_loop_checks(expected, found, tolerance),
    ]


def _clocks(expected: Expected, found: ToolReports) -> Iterator[ReportCheck]:
    if found.period_ns is not None:
        asked = 1e3 / expected.clock_mhz
        yield ReportCheck("clock", "period, ns", round(asked, 3), found.period_ns, "Vitis HLS", found.period_ns > asked)
    if found.slack_ns is not None:
        yield ReportCheck("clock", "worst slack, ns", 0.0, found.slack_ns, "Vivado", found.slack_ns < 0)
    if found.clock_mhz is not None:
        # The binary has whole megahertz.
        slow = found.clock_mhz < int(expected.clock_mhz)
        yield ReportCheck("clock", "clock, MHz", expected.clock_mhz, found.clock_mhz, "xclbin", slow)


def _resources(expected: Expected, found: ToolReports, tolerance: float) -> Iterator[ReportCheck]:
    for source, used in (("Vitis HLS", found.hls), ("Vivado, device", found.placed)):
        for name, model in expected.resources.items():
            if name in used:
                # What is placed has the platform in it.
                worse = source == "Vitis HLS" and used[name] > model * (1 + tolerance)
                yield ReportCheck("resource", name, model, used[name], source, worse)


def _loop_checks(expected: Expected, found: ToolReports, tolerance: float) -> Iterator[ReportCheck]:
    for loop in found.loops:
        place = _place(expected, loop)
        if place is None:
            continue
        (interval, depth), name = expected.loops[place], ".".join(place)
        yield ReportCheck("loop", f"{name}: interval", interval, loop.interval, "Vitis HLS", loop.interval > interval)
        if depth is not None and loop.depth is not None:
            # The model's depth does not count the clock in which an iteration starts.
            worse = loop.depth > (depth + 1) * (1 + tolerance)
            yield ReportCheck("loop", f"{name}: depth", depth + 1, loop.depth, "Vitis HLS", worse)


def _place(expected: Expected, loop: ToolLoop) -> tuple[str, str] | None:
    """Return the function and label of a loop in the sources; HLS adds template arguments to a module's name."""
    found = [place for place in expected.loops if place[1] == loop.label and place[0] in loop.function]
    return max(found, key=lambda place: len(place[0]), default=None)


# What the model and the sources of an artifact say of its kernel.


@dataclass(frozen=True)
class Expected:
    """A kernel as it should come out.

    Args:
        loops: (function, label) -> the interval of its PIPELINE pragma, and the model's depth in clocks; None: not
            modelled.
        resources: by name: lut, ff, dsp, bram36, uram; estimates.
    """

    kernel: str
    clock_mhz: float
    loops: dict[tuple[str, str], tuple[int, int | None]]
    resources: dict[str, float]


def expected_of(artifact: StoredArtifact) -> Expected:
    """Return what an artifact's kernel should be.

    Raises:
        InputError: the artifact has no kernel.
    """
    manifest = artifact.manifest
    design, accelerator = design_of(manifest, manifest.target), manifest.accelerator
    if design is None or accelerator is None:
        raise InputError("the artifact has no kernel", where=str(artifact.path), hint=ON_A_BOARD)
    depths = {(loop.process, loop.label): loop.depth for loop in _model_loops(design, artifact)}
    names = [name for name in manifest.files if re.fullmatch(r"hls/fastcar_\w+\.(?:hpp|cpp)", name)]
    sources = [artifact.files.data(name, MIB).decode("utf-8") for name in names]
    # An interval that depends on the design is a macro.
    macros = {
        name: n for text in sources for name, n in re.findall(r"^#define (FASTCAR_\w+) (\d+)$", text, re.MULTILINE)
    }
    loops = {
        key: (int(macros.get(interval, interval)), depths.get(key))
        for text in sources
        for key, interval in _pragmas(text)
    }
    counted = resources_of(design, workload_of(manifest).kernel_spec(), manifest.target)
    return Expected(
        kernel=accelerator.kernels[0].name,
        clock_mhz=design.budget.clock_mhz,
        loops=loops,
        resources={name: float(entry["used"]) for name, entry in counted.items()},
    )


def _model_loops(design: Design, artifact: StoredArtifact) -> Iterator[Loop]:
    """Yield the loops of the model that the kernel has."""
    load = design.load()
    for product in design.products:
        yield from tile_loops(product, load).stages
        yield from quantize_loops(product, load)
        yield load_loop(product.inputs, load)
    program, accelerator = program_of(artifact), artifact.manifest.accelerator
    if program is None or accelerator is None:
        return
    rows, table = design.mlp.batch, read_table(artifact.files.data(accelerator.table))
    work = VectorWork(rows, rows, design.ports, design.axi_words, table)
    for instruction in program.instructions:
        for part in instruction.loops(work):
            yield from part.loops
        if isinstance(instruction, Attend):
            queries = instruction.heads // instruction.key_heads
            shape = (rows, instruction.key_heads, queries, design.group or queries, instruction.blocks)
            loops = attend_loops(AttendWork(*shape, design.ports, program.sizes.positions, design.share))
            yield from (*loops.split, *(value for value in vars(loops).values() if isinstance(value, Loop)))


def _pragmas(text: str) -> Iterator[tuple[tuple[str, str], str]]:
    """Yield function and label of every pipelined loop of a source, and its interval."""
    text = re.sub(r"//[^\n]*", "", text)
    opened = [(m.start(), m[1]) for m in re.finditer(r"^(?:\S.*)?\b(\w+)\([^;]{0,2000}?\) \{$", text, re.MULTILINE)]
    for loop in re.finditer(r"\b(\w+):\s*for \([^)]{0,500}\) \{\s*FASTCAR_PIPELINE\((\w+)\)", text):
        function = next((name for start, name in reversed(opened) if start < loop.start()), "")
        yield (function, loop[1]), loop[2]
