"""Write the HLS project of a design: headers, tops, test bench, Makefile and Vitis configurations."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from fastcar_compile.codegen.drs.table import DrsTable, Limits
from fastcar_compile.codegen.hls.design import MlpDesign
from fastcar_compile.codegen.hls.emit_drs import emit_drs, limits_of, table_of_sizes
from fastcar_compile.codegen.hls.interface import KernelInterface, mlp_interface
from fastcar_compile.codegen.hls.render import TEMPLATES
from fastcar_compile.codegen.hls.render import render as _render

ZYNQ_PORTS = ("HP0", "HP1", "HP2", "HP3", "HPC0", "HPC1")
"""Memory tags of AMD's Zynq UltraScale+ base platforms: four HP and two HPC ports."""

MEMORY_TAGS = {
    "xczu": ZYNQ_PORTS,
    "xck26": ZYNQ_PORTS,
    "xcu280": tuple(f"HBM[{i}]" for i in range(32)),
}
"""Part prefix -> memory tags for the linker. For another part v++ picks the memory itself."""


def emit_hls(
    design: MlpDesign, out_dir: Path, table: DrsTable | None = None, limits: Limits | None = None
) -> list[Path]:
    """Write the project into `out_dir` (made if needed); returns the files, sorted. Same arguments, same bytes.

    Args:
        table: the DRS control table that the controller has to hold; None: one of the design's sizes.
        limits: what the controller can hold; None: what the table needs.
    """
    out_dir.mkdir(parents=True, exist_ok=True)
    mlp = mlp_interface(design)
    table = table or table_of_sizes(design)
    controller = emit_drs(table, limits or limits_of(table))
    drs = controller.kernel
    kernels = [mlp, drs]
    clock = f"{design.budget.clock_mhz:g}"
    texts = {
        "fastcar_config.hpp": _render("fastcar_config.hpp", design=design),
        "fastcar_mlp.hpp": _render("fastcar_mlp.hpp", kernel=mlp),
        "fastcar_mlp.cpp": _render("fastcar_mlp.cpp", design=design, kernel=mlp),
        "csim_entry.cpp": _render("csim_entry.cpp", design=design),
        "testbench.cpp": _render("testbench.cpp", design=design),
        **controller.texts,
        "fastcar_host.hpp": _render("fastcar_host.hpp", kernels=kernels),
        "Makefile": _render(
            "Makefile", sources=[f"{k.name}.cpp" for k in kernels], benches=["testbench", "drs_testbench"]
        ),
        "link.cfg": _render(
            "link.cfg",
            kernels=kernels,
            connections=_connections(design, kernels),
            hertz=round(design.budget.clock_mhz * 1e6),
        ),
    }
    for name, kernel, bench in (
        ("hls_config.cfg", mlp, "testbench.cpp"),
        ("drs_hls_config.cfg", drs, "drs_testbench.cpp"),
    ):
        texts[name] = _render("hls_config.cfg", design=design, kernel=kernel, clock=clock, testbench=bench)
    texts |= {path.name: path.read_text() for path in files(TEMPLATES).iterdir() if path.name.endswith(".hpp")}
    return [_write(out_dir / name, text) for name, text in sorted(texts.items())]


def _connections(design: MlpDesign, kernels: list[KernelInterface]) -> list[str]:
    """One `sp=` line per memory argument: weights on the first ports, rows on the last two, DRS with the rows."""
    tags = next((tags for prefix, tags in MEMORY_TAGS.items() if design.budget.part.startswith(prefix)), ())
    if not tags:
        return []
    tag_of: dict[str, str] = {}
    for kernel in kernels:
        for bundle in kernel.bundles():
            tag_of[bundle] = tags[min(len(tag_of), len(tags) - 1)]
    return [
        f"sp={kernel.name}_1.{port.name}:{tag_of[port.bundle]}"
        for kernel in kernels
        for port in kernel.ports
        if port.mode == "m_axi"
    ]


def _write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path
