"""The HLS sources of the bandwidth probe, and how it is linked: alone, so that the engine's ports stay its own."""

from __future__ import annotations

from fastcar_compile.codegen.hls.design.design import Design
from fastcar_compile.codegen.hls.interface import TYPE_BYTES, KernelInterface, probe_interface
from fastcar_compile.codegen.hls.render import render
from fastcar_compile.codegen.hls.vitis import Bench, kernel_config, link_config, weight_ports
from fastcar_compile.targets import Target

BENCH_WORDS = 64
"""Words that the test bench reads on every port at most; no more than C/RTL co-simulation maps."""

PROBE_BENCH = "probe_testbench.cpp"


def probe_files(design: Design, board: Target | None) -> dict[str, str]:
    """Return the texts of the probe by file name: top, test bench, HLS configuration and link configuration."""
    kernel = probe_interface(design)
    ports, weights = weight_ports([kernel]), kernel.ports[0]
    part, clock = design.budget.part, design.budget.clock_mhz
    words = min(BENCH_WORDS, weights.depth)
    return {
        f"{kernel.name}.cpp": render("fastcar_probe.cpp", kernel=kernel, ports=ports),
        PROBE_BENCH: render(PROBE_BENCH, kernel=kernel, ports=ports, words=words, word=weights.ctype),
        **kernel_config(Bench(kernel, PROBE_BENCH), part, clock),
        "probe_link.cfg": link_config([kernel], clock, board),
    }


def probe_word_bytes(kernel: KernelInterface) -> int:
    """Return the bytes of one word of a weight port."""
    return TYPE_BYTES[kernel.ports[0].ctype]
