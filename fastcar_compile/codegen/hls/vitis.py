"""The Vitis project: one HLS configuration per kernel, the linker's configuration, and the Makefile.

Keys and commands follow UG1399 ("HLS Config File Commands", "Package Options") and UG1393 or UG1702 ("v++ Command") of
Vitis 2023.2 and newer. No Vitis has run them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle

from fastcar_compile.codegen.hls.design.banks import bank_map
from fastcar_compile.codegen.hls.design.footprint import shares_memory
from fastcar_compile.codegen.hls.interface import KernelInterface
from fastcar_compile.codegen.hls.render import render
from fastcar_compile.targets import Target

_WEIGHT_BUNDLE = re.compile(r"gmem_w(\d+)")


@dataclass(frozen=True)
class Bench:
    """A kernel and the C++ test bench that C simulation and co-simulation run."""

    kernel: KernelInterface
    source: str


@dataclass(frozen=True)
class Benches:
    """Test benches of a project.

    Args:
        linked: every kernel with its benches; of several, the last is the one of the kernel's configuration.
        alone: of kernels that are simulated and synthesised alone, not linked.
    """

    linked: Sequence[Bench]
    alone: Sequence[Bench] = ()


def vitis_files(part: str, clock_mhz: float, benches: Benches, board: Target | None = None) -> dict[str, str]:
    """Return the texts of the project by file name: Makefile, link.cfg and `<kernel>_hls_config.cfg`.

    Args:
        part: vendor part name. clock_mhz: kernel clock, MHz.
        benches: of every kernel.
        board: whose memory the kernels are connected to; None: v++ chooses.
    """
    kernels, every = list(dict.fromkeys(b.kernel for b in benches.linked)), (*benches.linked, *benches.alone)
    texts = {
        "Makefile": render(
            "Makefile",
            kernels=[k.name for k in kernels],
            alone=[b.kernel.name for b in benches.alone],
            benches=[b.source.removesuffix(".cpp") for b in every],
            card=board is not None and not shares_memory(board),
        ),
        "link.cfg": link_config(kernels, clock_mhz, board),
    }
    for bench in every:
        texts |= kernel_config(bench, part, clock_mhz)
    return texts


def link_config(kernels: Sequence[KernelInterface], clock_mhz: float, board: Target | None) -> str:
    """Return the linker's configuration of these kernels."""
    lines = connections(board, kernels)
    return render("link.cfg", kernels=kernels, connections=lines, hertz=round(clock_mhz * 1e6))


def kernel_config(bench: Bench, part: str, clock_mhz: float) -> dict[str, str]:
    """Return the HLS configuration of the kernel with this bench, by file name."""
    clock = f"{clock_mhz:g}"
    text = render("hls_config.cfg", part=part, clock=clock, kernel=bench.kernel.name, testbench=bench.source)
    return {config_name(bench.kernel): text}


def config_name(kernel: KernelInterface) -> str:
    """Return the file name of the kernel's HLS configuration."""
    return f"{kernel.name}_hls_config.cfg"


def connections(board: Target | None, kernels: Sequence[KernelInterface]) -> list[str]:
    """Return one `sp=` line per memory argument: weight port p of every kernel on the same memory, others on what is left.

    None for a board whose target file names no connections: v++ picks the memory itself.
    """
    banks = bank_map(board, weight_ports(kernels)) if board else None
    if banks is None:
        return []
    tag_of: dict[tuple[str, str], str] = {}
    others = cycle(banks.others)
    for kernel in kernels:
        for bundle in kernel.bundles():
            weight = _WEIGHT_BUNDLE.fullmatch(bundle)
            # Weight ports of one number share their banks over all kernels; the other ports take what is left in turn.
            tag_of[kernel.name, bundle] = banks.weights[int(weight[1])] if weight else next(others)
    return [f"sp={k.name}_1.{p.name}:{tag_of[k.name, p.bundle]}" for k in kernels for p in k.ports if p.mode == "m_axi"]


def weight_ports(kernels: Sequence[KernelInterface]) -> int:
    """Return the AXI ports that read weight streams, those of the kernel with the most."""
    bundles = (bundle for kernel in kernels for bundle in kernel.bundles())
    return 1 + max((int(m[1]) for bundle in bundles if (m := _WEIGHT_BUNDLE.fullmatch(bundle))), default=-1)
