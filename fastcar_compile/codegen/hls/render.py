"""Jinja templates of the HLS sources. A text of a model or of a target file cannot become code in them."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from itertools import cycle

from jinja2 import Environment, StrictUndefined

from fastcar_compile.codegen.hls.design.design import Design
from fastcar_compile.codegen.hls.design.memory import bank_map
from fastcar_compile.codegen.hls.interface import TYPE_BYTES, KernelInterface, probe_interface
from fastcar_compile.config.targets import Target
from fastcar_compile.errors import InternalError
from fastcar_compile.support.packages import TEMPLATES

_PLAIN = re.compile(r"[ -~]*")
_BEYOND = re.compile(r"[\"'\\`$?]|/[/*]|\*/")
"""What ends a text, begins a comment or a directive, or means something to make and to a shell."""


class Literal(str):
    """A C++ string literal with its quotes."""


def literal(text: str) -> Literal:
    """Return a text as a C++ string literal of its UTF-8 bytes."""
    return Literal('"' + "".join(map(_escaped, text.encode("utf-8"))) + '"')


def _escaped(byte: int) -> str:
    sign = chr(byte)
    # Three octal digits end by themselves. A question mark could begin a trigraph.
    return f"\\{byte:03o}" if byte not in range(32, 127) or sign in '"\\?' else sign


def render(name: str, **values: object) -> str:
    """Return the text of `hls_templates/<name>.j2` with these values; a name that has none is an error.

    Raises:
        InternalError: a text that may not stand in code, and is not written through the filter `literal`.
    """
    environment = Environment(
        undefined=StrictUndefined, keep_trailing_newline=True, autoescape=False, finalize=_harmless
    )
    environment.filters["literal"] = literal
    return environment.from_string((files(TEMPLATES) / f"{name}.j2").read_text()).render(**values)


def _harmless(value: object) -> object:
    if not isinstance(value, str) or isinstance(value, Literal):
        return value
    if not _PLAIN.fullmatch(value) or _BEYOND.search(value):
        raise InternalError(f"the text {value!r:.80} cannot stand in generated code")
    return value


# The Vitis project: one HLS configuration per kernel, the linker's configuration, and the Makefile.
#
# Keys and commands follow UG1399 ("HLS Config File Commands", "Package Options") and UG1393 or UG1702 ("v++ Command")
# of
# Vitis 2023.2 and newer. No Vitis has run them.


_WEIGHT_BUNDLE = re.compile(r"gmem_w(\d+)")


@dataclass(frozen=True)
class Bench:
    """A kernel and the C++ test bench that C simulation and co-simulation run."""

    kernel: KernelInterface
    source: str


def vitis_files(
    part: str, clock_mhz: float, linked: Bench, alone: Sequence[Bench] = (), *, board: Target | None = None
) -> dict[str, str]:
    """Return the texts of the project by file name: Makefile, link.cfg and `<kernel>_hls_config.cfg`.

    Args:
        part: vendor part name. clock_mhz: kernel clock, MHz.
        alone: of kernels that are simulated and synthesised alone, not linked.
        board: whose memory the kernel is connected to; None: v++ chooses.
    """
    every = (linked, *alone)
    platform = None if board is None else board.platform
    texts = {
        "Makefile": render(
            "Makefile",
            kernels=[linked.kernel.name],
            alone=[b.kernel.name for b in alone],
            benches=[b.source.removesuffix(".cpp") for b in every],
            card=board is not None and not board.shares_memory,
            platform=platform,
            title=platform_name(board),
            variants=probe_variants(board, most_weight_ports([linked.kernel])),
        ),
        "link.cfg": link_config([linked.kernel], clock_mhz, board),
    }
    if board is not None and platform is not None:
        memory = board.weight_memories[0]
        values = {"target": board, "platform": platform, "title": platform_name(board), "clock": f"{clock_mhz:g}"}
        values |= {"memory": memory, "tags": [c.tag for c in memory.connections]}
        # The lower 2 GB of a Zynq UltraScale+ are DDR_LOW, what is above is DDR_HIGH (UG1085).
        values["high"] = memory.capacity_bytes > 2 << 30
        texts |= {f"{script}.tcl": render(f"{script}.tcl", **values) for script in ("platform", "xpfm")}
    for bench in every:
        texts |= kernel_config(bench, part, clock_mhz, board)
    return texts


def platform_name(board: Target | None) -> str:
    """Return the board's name as a word of Tcl, of make and of a file name."""
    return "" if board is None else re.sub(r"\W", "_", board.name, flags=re.ASCII)


def link_config(
    kernels: Sequence[KernelInterface], clock_mhz: float, board: Target | None, last: str | None = None
) -> str:
    """Return the linker's configuration of these kernels; see `connections`."""
    lines = connections(board, kernels, last)
    return render("link.cfg", kernels=kernels, connections=lines, hertz=round(clock_mhz * 1e6))


def kernel_config(bench: Bench, part: str, clock_mhz: float, board: Target | None) -> dict[str, str]:
    """Return the HLS configuration of the kernel with this bench, by file name."""
    values = {"part": part, "clock": f"{clock_mhz:g}", "kernel": bench.kernel.name, "testbench": bench.source}
    fabric = None if board is None else board.fabric
    share = None if fabric is None else f"{fabric.clock_uncertainty:.4%}".rstrip("0%").rstrip(".")
    return {f"{bench.kernel.name}_hls_config.cfg": render("hls_config.cfg", **values, uncertainty=share)}


def connections(board: Target | None, kernels: Sequence[KernelInterface], last: str | None = None) -> list[str]:
    """Return one `sp=` line per memory argument: weight port p of every kernel on the same memory, others on what is left.

    None for a board whose target file names no connections: v++ picks the memory itself.

    Args:
        last: tag that the last weight port takes; None: its own.
    """
    banks = bank_map(board, most_weight_ports(kernels)) if board else None
    if banks is None:
        return []
    tag_of: dict[tuple[str, str], str] = {}
    others = cycle(banks.others)
    weights = banks.weights if last is None else (*banks.weights[:-1], last)
    for kernel in kernels:
        for bundle in kernel.bundles():
            weight = _WEIGHT_BUNDLE.fullmatch(bundle)
            # Weight ports of one number share their banks over all kernels; the other ports take what is left in turn.
            tag_of[kernel.name, bundle] = weights[int(weight[1])] if weight else next(others)
    return [f"sp={k.name}_1.{p.name}:{tag_of[k.name, p.bundle]}" for k in kernels for p in k.ports if p.mode == "m_axi"]


def most_weight_ports(kernels: Sequence[KernelInterface]) -> int:
    """Return the AXI ports that read weight streams, those of the kernel with the most."""
    bundles = (bundle for kernel in kernels for bundle in kernel.bundles())
    return 1 + max((int(m[1]) for bundle in bundles if (m := _WEIGHT_BUNDLE.fullmatch(bundle))), default=-1)


# The HLS sources of the bandwidth probe, and how it is linked: alone, so that the engine's ports stay its own.


BENCH_WORDS = 64
"""Words that the test bench reads on every port at most; no more than C/RTL co-simulation maps."""

PROBE_BENCH = "probe_testbench.cpp"


def probe_files(design: Design, board: Target | None) -> dict[str, str]:
    """Return the texts of the probe by file name: top, test bench, HLS configuration and link configuration."""
    kernel = probe_interface(design)
    ports, weights = most_weight_ports([kernel]), kernel.ports[0]
    part, clock = design.budget.part, design.budget.clock_mhz
    words = min(BENCH_WORDS, weights.depth)
    return {
        f"{kernel.name}.cpp": render("fastcar_probe.cpp", kernel=kernel, ports=ports),
        PROBE_BENCH: render(PROBE_BENCH, kernel=kernel, ports=ports, words=words, word=weights.ctype),
        **kernel_config(Bench(kernel, PROBE_BENCH), part, clock, board),
        "probe_link.cfg": link_config([kernel], clock, board),
    } | {f"probe_link_{tag}.cfg": link_config([kernel], clock, board, tag) for tag in probe_variants(board, ports)}


def probe_variants(board: Target | None, ports: int) -> tuple[str, ...]:
    """Return the connections that no weight port has, where they lead to the same bytes: what the probe's last port may try."""
    banks = bank_map(board, ports) if board is not None else None
    if board is None or banks is None or banks.bank_bytes is not None:
        return ()
    return tuple(c.tag for c in board.weight_memories[0].connections if c.tag not in banks.weights)


def probe_word_bytes(kernel: KernelInterface) -> int:
    """Return the bytes of one word of a weight port."""
    return TYPE_BYTES[kernel.ports[0].ctype]
