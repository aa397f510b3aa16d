"""Write the HLS project of a design: headers, tops, test bench, Makefile and Vitis configurations."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from jinja2 import Environment, StrictUndefined

from fastcar_compile.codegen.drs.simulator import simulate
from fastcar_compile.codegen.drs.table import HEADER_WORDS, build_table, layer_words, words_of
from fastcar_compile.codegen.hls.design import MlpDesign
from fastcar_compile.codegen.hls.engine_design import EngineDesign
from fastcar_compile.codegen.hls.engine_interface import engine_interface
from fastcar_compile.codegen.hls.interface import RECORD_CAPACITY, KernelInterface, drs_interface, mlp_interface

TEMPLATES = "hls_templates"
ZYNQ_PORTS = ("HP0", "HP1", "HP2", "HP3", "HPC0", "HPC1")
"""Memory tags of AMD's Zynq UltraScale+ base platforms: four HP and two HPC ports."""

MEMORY_TAGS = {
    "xczu": ZYNQ_PORTS,
    "xck26": ZYNQ_PORTS,
    "xcu280": tuple(f"HBM[{i}]" for i in range(32)),
}
"""Part prefix -> memory tags for the linker. For another part v++ picks the memory itself."""


BENCH_PATTERNS = 64
"""Values of the Index Register that the DRS test bench tries at most."""


def emit_hls(design: MlpDesign | EngineDesign, out_dir: Path) -> list[Path]:
    """Write the project into `out_dir` (made if needed); returns the files, sorted. Same design, same bytes.

    An EngineDesign gets the kernel `fastcar_engine` where an MlpDesign gets `fastcar_mlp`.
    """
    out_dir.mkdir(parents=True, exist_ok=True)
    engine = design if isinstance(design, EngineDesign) else None
    compute, drs = kernels = kernel_interfaces(design)
    design = design.mlp if isinstance(design, EngineDesign) else design
    benches = ["testbench", "drs_testbench"] if engine is None else ["testbench", "engine_testbench", "drs_testbench"]
    clock = f"{design.budget.clock_mhz:g}"
    texts = {
        "fastcar_config.hpp": _render("fastcar_config.hpp", design=design),
        **(_mlp_top(design, compute) if engine is None else _engine_top(engine, compute)),
        "fastcar_drs.cpp": _render("fastcar_drs.cpp", design=design, kernel=drs),
        "csim_entry.cpp": _render("csim_entry.cpp", design=design, drs=drs),
        "testbench.cpp": _render("testbench.cpp", design=design),
        "drs_testbench.cpp": _drs_testbench(design, drs),
        "Makefile": _render("Makefile", sources=[f"{k.name}.cpp" for k in kernels], benches=benches),
        "link.cfg": _render(
            "link.cfg",
            kernels=kernels,
            connections=_connections(design, kernels),
            hertz=round(design.budget.clock_mhz * 1e6),
        ),
    }
    for name, kernel, bench in (
        ("hls_config.cfg", compute, f"{benches[-2]}.cpp"),
        ("drs_hls_config.cfg", drs, "drs_testbench.cpp"),
    ):
        texts[name] = _render("hls_config.cfg", design=design, kernel=kernel, clock=clock, testbench=bench)
    headers = [path for path in files(TEMPLATES).iterdir() if path.name.endswith(".hpp")]
    texts |= {p.name: p.read_text() for p in headers if engine is not None or not p.name.startswith("fastcar_engine")}
    return [_write(out_dir / name, text) for name, text in sorted(texts.items())]


def kernel_interfaces(design: MlpDesign | EngineDesign) -> list[KernelInterface]:
    """Every kernel of the design: MLP or engine, then DRS controller."""
    spec = design.mlp.spec if isinstance(design, EngineDesign) else design.spec
    table_words = HEADER_WORDS + spec.layers * (1 + layer_words(spec.batch))
    compute = engine_interface(design) if isinstance(design, EngineDesign) else mlp_interface(design)
    return [compute, drs_interface(table_words)]


def _mlp_top(design: MlpDesign, kernel: KernelInterface) -> dict[str, str]:
    return {
        "fastcar_mlp.hpp": _render("fastcar_mlp.hpp", kernel=kernel),
        "fastcar_mlp.cpp": _render("fastcar_mlp.cpp", design=design, kernel=kernel),
    }


def _engine_top(engine: EngineDesign, kernel: KernelInterface) -> dict[str, str]:
    """The engine's top, and the MLP as a call of it under the name of the MLP's kernel."""
    values = {"engine": engine, "design": engine.mlp, "kernel": kernel, "mlp": mlp_interface(engine.mlp)}
    return {
        "fastcar_mlp.hpp": _render("engine_mlp.hpp", **values),
        **{
            name: _render(name, **values)
            for name in (
                "fastcar_engine_config.hpp",
                "fastcar_engine.hpp",
                "fastcar_engine.cpp",
                "engine_csim_entry.cpp",
                "engine_testbench.cpp",
            )
        },
    }


def _drs_testbench(design: MlpDesign, drs: KernelInterface) -> str:
    """The table has the sizes of the design, so that co-simulation maps all of it; its thresholds play no part."""
    spec = design.spec
    table = build_table(spec.layers, spec.batch, spec.cores, 1, [float("inf")] * spec.layers).to_bytes()
    layer, expected = spec.layers - 1, []
    for register in range(min(1 << spec.batch, BENCH_PATTERNS)):
        trace = simulate(table, layer, register, capacity=RECORD_CAPACITY)
        words = [int(trace.status), len(trace.records), *(r.word for r in trace.records)]
        expected.append([f"0x{word:08x}u" for word in words])
    return _render(
        "drs_testbench.cpp",
        kernel=drs,
        patterns=BENCH_PATTERNS,
        capacity=RECORD_CAPACITY,
        table=[f"0x{word:08x}u" for word in words_of(table)],
        layer=layer,
        expected=expected,
    )


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


def _render(name: str, **values: object) -> str:
    environment = Environment(undefined=StrictUndefined, keep_trailing_newline=True, autoescape=False)
    return environment.from_string((files(TEMPLATES) / f"{name}.j2").read_text()).render(**values)


def _write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path
