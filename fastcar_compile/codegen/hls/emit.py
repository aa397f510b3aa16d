"""Write the HLS project of a design: headers, tops, test bench, Makefile and Vitis configurations."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from fastcar_compile.codegen.hls.board.vitis import Bench, vitis_files
from fastcar_compile.codegen.hls.design import MlpDesign
from fastcar_compile.codegen.hls.emit_drs import drs_kernel, emit_drs, limits_of, table_of_sizes
from fastcar_compile.codegen.hls.engine_design import EngineDesign
from fastcar_compile.codegen.hls.engine_interface import engine_interface
from fastcar_compile.codegen.hls.interface import KernelInterface, mlp_interface
from fastcar_compile.codegen.hls.render import TEMPLATES
from fastcar_compile.codegen.hls.render import render as _render
from fastcar_compile.drs.table import DrsTable, Limits


def emit_hls(
    design: MlpDesign | EngineDesign, out_dir: Path, table: DrsTable | None = None, limits: Limits | None = None
) -> list[Path]:
    """Write the project into `out_dir` (made if needed); returns the files, sorted. Same arguments, same bytes.

    An EngineDesign gets the kernel `fastcar_engine` where an MlpDesign gets `fastcar_mlp`.

    Args:
        table: the DRS control table that the controller has to hold; None: one of the design's sizes.
        limits: what the controller can hold; None: what the table needs.
    """
    out_dir.mkdir(parents=True, exist_ok=True)
    engine = design if isinstance(design, EngineDesign) else None
    mlp = design.mlp if isinstance(design, EngineDesign) else design
    table = table or table_of_sizes(mlp)
    compute, drs = kernel_interfaces(design, table)
    texts = {
        "fastcar_config.hpp": _render("fastcar_config.hpp", design=mlp),
        **(_mlp_top(mlp, compute) if engine is None else _engine_top(engine, compute)),
        "csim_entry.cpp": _render("csim_entry.cpp", design=mlp),
        "testbench.cpp": _render("testbench.cpp", design=mlp),
        **emit_drs(table, limits or limits_of(table)).texts,
    }
    benches = [Bench(compute, "testbench.cpp"), Bench(drs, "drs_testbench.cpp")]
    if engine is not None:
        benches.insert(1, Bench(compute, "engine_testbench.cpp"))
    texts |= vitis_files(mlp.budget.part, mlp.budget.clock_mhz, benches)
    headers = [path for path in files(TEMPLATES).iterdir() if path.name.endswith(".hpp")]
    texts |= {p.name: p.read_text() for p in headers if engine is not None or not p.name.startswith("fastcar_engine")}
    return [_write(out_dir / name, text) for name, text in sorted(texts.items())]


def kernel_interfaces(design: MlpDesign | EngineDesign, table: DrsTable) -> list[KernelInterface]:
    """Every kernel of the design: MLP or engine, then TAS unit and DRS controller for tables of this size."""
    compute = engine_interface(design) if isinstance(design, EngineDesign) else mlp_interface(design)
    return [compute, drs_kernel(table)]


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


def _write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path
