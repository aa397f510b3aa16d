"""A simulation as a page: figures, processes, and DRS against the static mapping in pictures."""

from __future__ import annotations

from pathlib import Path

from jinja2 import Environment, PackageLoader, select_autoescape

from fastcar_compile.estimate.rows import Mapping, passes_of
from fastcar_compile.simulation.pictures import draw_active_rows, draw_cores, typical_forward
from fastcar_compile.simulation.simulate import Simulation

REPORT, ROWS, CORES = "report.html", "active_rows.svg", "cores.svg"


def write_report(simulation: Simulation, folder: Path) -> None:
    """Write report.html and its pictures into a folder, which is made if need be."""
    folder.mkdir(parents=True, exist_ok=True)
    decisions, cores = simulation.decisions, simulation.cores
    draw_active_rows({simulation.shape: decisions}, folder / ROWS)
    draw_cores(decisions, cores, typical_forward(decisions, cores), simulation.shape, folder / CORES)
    loader = PackageLoader("fastcar_compile.simulation")
    environment = Environment(loader=loader, autoescape=select_autoescape(["html.j2"]), trim_blocks=True)
    passes = {mapping.value: passes_of(decisions, cores, mapping).sum(-1).mean() for mapping in Mapping}
    page = environment.get_template("report.html.j2").render(
        simulation=simulation, passes=passes, pictures={"rows": ROWS, "cores": CORES}
    )
    (folder / REPORT).write_text(page + "\n")
