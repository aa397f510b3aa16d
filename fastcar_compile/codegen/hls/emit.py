"""Write the HLS project of a design: headers, tops, test bench, Makefile and Vitis configurations."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from jinja2 import Environment, StrictUndefined

from fastcar_compile.codegen.board.vitis import Bench, vitis_files
from fastcar_compile.codegen.drs.simulator import simulate
from fastcar_compile.codegen.drs.table import HEADER_WORDS, build_table, layer_words, words_of
from fastcar_compile.codegen.hls.design import MlpDesign
from fastcar_compile.codegen.hls.interface import RECORD_CAPACITY, KernelInterface, drs_interface, mlp_interface

TEMPLATES = "hls_templates"
BENCH_PATTERNS = 64
"""Values of the Index Register that the DRS test bench tries at most."""


def emit_hls(design: MlpDesign, out_dir: Path) -> list[Path]:
    """Write the project into `out_dir` (made if needed); returns the files, sorted. Same design, same bytes."""
    out_dir.mkdir(parents=True, exist_ok=True)
    mlp, drs = kernel_interfaces(design)
    texts = {
        "fastcar_config.hpp": _render("fastcar_config.hpp", design=design),
        "fastcar_mlp.hpp": _render("fastcar_mlp.hpp", kernel=mlp),
        "fastcar_mlp.cpp": _render("fastcar_mlp.cpp", design=design, kernel=mlp),
        "fastcar_drs.cpp": _render("fastcar_drs.cpp", design=design, kernel=drs),
        "csim_entry.cpp": _render("csim_entry.cpp", design=design, drs=drs),
        "testbench.cpp": _render("testbench.cpp", design=design),
        "drs_testbench.cpp": _drs_testbench(design, drs),
    }
    benches = [Bench(mlp, "testbench.cpp"), Bench(drs, "drs_testbench.cpp")]
    texts |= vitis_files(design.budget.part, design.budget.clock_mhz, benches)
    texts |= {path.name: path.read_text() for path in files(TEMPLATES).iterdir() if path.name.endswith(".hpp")}
    return [_write(out_dir / name, text) for name, text in sorted(texts.items())]


def kernel_interfaces(design: MlpDesign) -> list[KernelInterface]:
    """Every kernel of the design: MLP, then DRS controller."""
    table_words = HEADER_WORDS + design.spec.layers * (1 + layer_words(design.spec.batch))
    return [mlp_interface(design), drs_interface(table_words)]


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


def _render(name: str, **values: object) -> str:
    environment = Environment(undefined=StrictUndefined, keep_trailing_newline=True, autoescape=False)
    return environment.from_string((files(TEMPLATES) / f"{name}.j2").read_text()).render(**values)


def _write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path
