"""Jinja templates of the HLS sources. A text of a model or of a target file cannot become code in them."""

import re
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from importlib.resources import files
from itertools import cycle

from jinja2 import Environment, StrictUndefined

from fastcar_compile.codegen.hls.design.design import Design
from fastcar_compile.codegen.hls.design.memory import bank_map
from fastcar_compile.codegen.hls.interface import KernelInterface, probe_interface
from fastcar_compile.config.targets import Target
from fastcar_compile.errors import InternalError
from fastcar_compile.support.packages import TEMPLATES

_PLAIN = re.compile(r"[ -~]*")
_BEYOND = re.compile(r"[\"'\\`$?]|/[/*]|\*/")
"""What ends a text, begins a comment or a directive, or means something to make and to a shell."""


class Code(str):
    """C++ of this package, or a string literal with its quotes."""


def literal(text: str) -> Code:
    """Return a text as a C++ string literal of its UTF-8 bytes."""
    return Code('"' + "".join(map(_escaped, text.encode("utf-8"))) + '"')


def _escaped(byte: int) -> str:
    sign = chr(byte)
    # Three octal digits end by themselves. A question mark could begin a trigraph.
    return f"\\{byte:03o}" if byte not in range(32, 127) or sign in '"\\?' else sign


_ARGUMENT = re.compile(r"([^=]*[\s*&])?(\w+)((?:\[[^]]*\])*)(?: = (.*))?")


def _arguments(text: str) -> Iterator[tuple[str, str]]:
    """Yield declaration and value of each argument of `type name = value, name, ...; type name[size]; ...`.

    The value of a name alone is it.
    """
    for of_type in filter(None, map(str.strip, " ".join(text.split()).split(";"))):
        ctype = ""
        for one in re.split(r", (?![^(]*\))", of_type):
            found = _ARGUMENT.fullmatch(one)
            if found is None:
                raise InternalError(f"{one!r} declares no argument")
            ctype = found[1] or ctype
            yield f"{ctype}{found[2]}{found[3]}", found[4] or found[2]


def _wrapped(arguments: Iterable[str]) -> Code:
    whole = ", ".join(one.replace(" ", "\0") for one in arguments)
    lines = textwrap.wrap(whole, 100, break_long_words=False, break_on_hyphens=False)
    return Code(f"\n{16 * ' '}".join(lines).replace("\0", " "))


FILTERS = {
    "literal": literal,
    "code": Code,
    "declared": lambda text: _wrapped(declaration for declaration, _ in _arguments(text)),
    "passed": lambda text: _wrapped(value for _, value in _arguments(text)),
}


def render(name: str, **values: object) -> str:
    """Return the text of `hls_templates/<name>.j2` with these values; a name that has none is an error.

    Raises:
        InternalError: a text that may not stand in code, and is not written through a filter.
    """
    environment = Environment(
        undefined=StrictUndefined, keep_trailing_newline=True, autoescape=False, finalize=_harmless
    )
    environment.filters |= FILTERS
    return environment.from_string((files(TEMPLATES) / f"{name}.j2").read_text()).render(**values)


def _harmless(value: object) -> object:
    if not isinstance(value, str) or isinstance(value, Code):
        return value
    if not _PLAIN.fullmatch(value) or _BEYOND.search(value):
        raise InternalError(f"the text {value!r:.80} cannot stand in generated code")
    return value


# The Vitis project: one HLS configuration per kernel, a Tcl script for one in RTL, the linker's configuration, and the Makefile.
#
# Keys and commands follow UG1399 ("HLS Config File Commands", "Package Options") and UG1393 or UG1702 ("v++ Command")
# of Vitis 2023.2 and newer. No Vitis has run them.


_WEIGHT_BUNDLE = re.compile(r"gmem_w(\d+)")


def vitis_files(
    part: str,
    clock_mhz: float,
    kernels: Sequence[KernelInterface],
    board: Target | None = None,
) -> dict[str, str]:
    """Return the texts of the project by file name: Makefile, link.cfg and `<kernel>_hls_config.cfg`.

    Args:
        part: vendor part name. clock_mhz: kernel clock, MHz.
        kernels: the one in C++, then the engine where it is one in RTL.
        board: whose memory the kernels are connected to; None: v++ chooses.
    """
    kernel, *engines = kernels
    platform = None if board is None else board.platform
    texts = {
        "Makefile": render(
            "Makefile",
            kernel=kernel.name,
            engine=engines[0].name if engines else None,
            bench=kernel.bench.removesuffix(".cpp"),
            card=board is not None and not board.shares_memory,
            platform=platform,
            title=platform_name(board),
            variants=probe_variants(board, weight_port_count(kernels)),
        ),
        "link.cfg": link_config(kernels, clock_mhz, board),
    }
    if engines:
        texts["package_engine.tcl"] = render("package_engine.tcl", engine=engines[0], part=part)
    if board is not None and platform is not None:
        memory = board.weight_memories[0]
        values = {"target": board, "platform": platform, "title": platform_name(board), "clock": f"{clock_mhz:g}"}
        values |= {"tags": [c.tag for c in memory.connections]}
        # The lower 2 GB of a Zynq UltraScale+ are DDR_LOW, what is above is DDR_HIGH (UG1085).
        values["high"] = memory.capacity_bytes > 2 << 30
        texts |= {f"{script}.tcl": render(f"{script}.tcl", **values) for script in ("platform", "xpfm")}
        if platform.loader == "sd":
            texts["linux.bif"] = (files(TEMPLATES) / "linux.bif").read_text()
    # Co-simulation runs the bench on one kernel alone, and this one would wait for its engine.
    return texts | kernel_config(kernel, part, clock_mhz, board, None if engines else kernel.bench)


def platform_name(board: Target | None) -> str:
    """Return the board's name as a word of Tcl, of make and of a file name."""
    return "" if board is None else re.sub(r"\W", "_", board.name, flags=re.ASCII)


def link_config(
    kernels: Sequence[KernelInterface], clock_mhz: float, board: Target | None, last: str | None = None
) -> str:
    """Return the linker's configuration of kernels; see `connections`."""
    lines = [*connections(board, kernels, last), *_stream_connections(kernels)]
    names = [kernel.name for kernel in kernels]
    return render("link.cfg", kernels=names, connections=lines, hertz=round(clock_mhz * 1e6))


def kernel_config(
    kernel: KernelInterface, part: str, clock_mhz: float, board: Target | None, bench: str | None = None
) -> dict[str, str]:
    """Return the HLS configuration of the kernel, by file name. bench: file of its test bench; None: it has none."""
    values = {"part": part, "clock": f"{clock_mhz:g}", "kernel": kernel.name, "testbench": bench}
    fabric = None if board is None else board.fabric
    share = None if fabric is None else f"{fabric.clock_uncertainty:.4%}".rstrip("0%").rstrip(".")
    return {f"{kernel.name}_hls_config.cfg": render("hls_config.cfg", **values, uncertainty=share)}


def connections(board: Target | None, kernels: Sequence[KernelInterface], last: str | None = None) -> list[str]:
    """Return one `sp=` line per memory argument: weight ports on memories of their own, others on what is left in turn.

    None for a board whose target file names no connections: v++ picks the memory itself.

    Args:
        last: tag that the last weight port takes; None: its own.
    """
    banks = bank_map(board, weight_port_count(kernels)) if board else None
    if banks is None:
        return []
    weights = banks.weights if last is None else (*banks.weights[:-1], last)
    others, tag_of = cycle(banks.others), dict[str, str]()
    for bundle in dict.fromkeys(bundle for kernel in kernels for bundle in kernel.bundles()):
        weight = _WEIGHT_BUNDLE.fullmatch(bundle)
        tag_of[bundle] = weights[int(weight[1])] if weight else next(others)
    return [f"sp={own.name}_1.{port.name}:{tag_of[port.bundle]}" for own in kernels for port in own.memories()]


def _stream_connections(kernels: Sequence[KernelInterface]) -> list[str]:
    """Return a `stream_connect=` line per stream, from the kernel that writes it to the one that reads it."""
    ends = [(port, f"{kernel.name}_1.{port.name}") for kernel in kernels for port in kernel.streams()]
    pairs = [(a, b) for p, a in ends for q, b in ends if p.name == q.name and p.writable and not q.writable]
    return [f"stream_connect={source}:{target}" for source, target in pairs]


def weight_port_count(kernels: Sequence[KernelInterface]) -> int:
    """Return the memories that kernels read weight streams from, each through an AXI port of its own."""
    bundles = {bundle for kernel in kernels for bundle in kernel.bundles()}
    return sum(_WEIGHT_BUNDLE.fullmatch(bundle) is not None for bundle in bundles)


# The HLS sources of the bandwidth probe, and how it is linked: alone, so that the engine's ports stay its own.


def probe_files(design: Design, board: Target | None) -> dict[str, str]:
    """Return the texts of the probe by file name: top, HLS configuration and link configuration."""
    kernel = probe_interface(design)
    ports, part, clock = weight_port_count([kernel]), design.budget.part, design.budget.clock_mhz
    return {
        f"{kernel.name}.cpp": render("fastcar_probe.cpp", kernel=kernel, ports=ports),
        **kernel_config(kernel, part, clock, board),
        "probe_link.cfg": link_config([kernel], clock, board),
    } | {f"probe_link_{tag}.cfg": link_config([kernel], clock, board, tag) for tag in probe_variants(board, ports)}


def probe_variants(board: Target | None, ports: int) -> tuple[str, ...]:
    """Return the connections that no weight port has, where they lead to the same bytes: what the probe's last port may try."""
    banks = bank_map(board, ports) if board is not None else None
    if board is None or banks is None or banks.bank_bytes is not None:
        return ()
    return tuple(c.tag for c in board.weight_memories[0].connections if c.tag not in banks.weights)
