"""The Vitis project: one HLS configuration per kernel, the linker's configuration, and the Makefile.

Keys and commands follow UG1399 ("HLS Config File Commands", "Package Options") and UG1393 or UG1702 ("v++ Command") of
Vitis 2023.2 and newer. No Vitis has run them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from fastcar_compile.codegen.hls.interface import KernelInterface
from fastcar_compile.codegen.hls.render import render

ZYNQ_PORTS = ("HP0", "HP1", "HP2", "HP3", "HPC0", "HPC1")
"""Memory tags of AMD's Zynq UltraScale+ base platforms: four HP and two HPC ports."""

MEMORY_TAGS = {
    "xczu": ZYNQ_PORTS,
    "xck26": ZYNQ_PORTS,
    "xcu280": tuple(f"HBM[{i}]" for i in range(32)),
}
"""Part prefix -> memory tags for the linker. For another part v++ picks the memory itself."""

CARDS = ("xcu",)
"""Part prefixes of PCIe cards: what the linker writes is loaded as it is. Other parts boot from an SD card."""

_WEIGHT_BUNDLE = re.compile(r"gmem_w(\d+)")


@dataclass(frozen=True)
class Bench:
    """A kernel and the C++ test bench that C simulation and co-simulation run."""

    kernel: KernelInterface
    source: str


def vitis_files(part: str, clock_mhz: float, benches: Sequence[Bench], alone: Sequence[Bench] = ()) -> dict[str, str]:
    """Return the texts of the project by file name: Makefile, link.cfg and `<kernel>_hls_config.cfg`.

    Args:
        part: vendor part name. clock_mhz: kernel clock, MHz.
        benches: every kernel with its benches; of several, the last is the one of the kernel's configuration.
        alone: kernels that are simulated and synthesised alone, not linked.
    """
    kernels = list(dict.fromkeys(b.kernel for b in benches))
    texts = {
        "Makefile": render(
            "Makefile",
            kernels=[k.name for k in kernels],
            alone=[b.kernel.name for b in alone],
            benches=[b.source.removesuffix(".cpp") for b in (*benches, *alone)],
            card=part.startswith(CARDS),
        ),
        "link.cfg": render(
            "link.cfg", kernels=kernels, connections=connections(part, kernels), hertz=round(clock_mhz * 1e6)
        ),
    }
    for bench in (*benches, *alone):
        texts[config_name(bench.kernel)] = render(
            "hls_config.cfg", part=part, clock=f"{clock_mhz:g}", kernel=bench.kernel.name, testbench=bench.source
        )
    return texts


def config_name(kernel: KernelInterface) -> str:
    """Return the file name of the kernel's HLS configuration."""
    return f"{kernel.name}_hls_config.cfg"


def connections(part: str, kernels: Sequence[KernelInterface]) -> list[str]:
    """Return one `sp=` line per memory argument: weight port p of every kernel on memory p, others on what is left."""
    tags = next((tags for prefix, tags in MEMORY_TAGS.items() if part.startswith(prefix)), ())
    if not tags:
        return []
    bundles = [(k.name, b) for k in kernels for b in k.bundles()]
    streams = 1 + max((int(m[1]) for _, b in bundles if (m := _WEIGHT_BUNDLE.fullmatch(b))), default=-1)
    shared = tags[streams:] or tags[-1:]
    tag_of: dict[tuple[str, str], str] = {}
    others = 0
    for bundle in bundles:
        if weight := _WEIGHT_BUNDLE.fullmatch(bundle[1]):
            tag_of[bundle] = tags[min(int(weight[1]), len(tags) - 1)]
        else:
            tag_of[bundle] = shared[others % len(shared)]
            others += 1
    return [f"sp={k.name}_1.{p.name}:{tag_of[k.name, p.bundle]}" for k in kernels for p in k.ports if p.mode == "m_axi"]
