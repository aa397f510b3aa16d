"""The time line of a decode step: instruction by instruction over the program, and its events in Chrome's format."""

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from exact.conftest import artifact
from typer.testing import CliRunner

import fastcar_compile as fc
from fastcar_compile.artifact.reader import StoredArtifact
from fastcar_compile.cli import app
from fastcar_compile.codegen.hls.design.exploration import explore
from fastcar_compile.codegen.hls.model import Estimate, Workload, estimate, load_shape
from fastcar_compile.codegen.hls.model.question import program_of_shape
from fastcar_compile.codegen.hls.model.system import trace_events, write_time_line
from fastcar_compile.codegen.hls.model.workload import design_of, program_of, workload_of
from fastcar_compile.codegen.hls.step_program.instructions import End, Norm
from fastcar_compile.codegen.hls.step_program.replaying import Decide
from fastcar_compile.config.targets import load_target
from fastcar_compile.report.page.tables import speed_page

__all__ = ["artifact"]

TINY = load_shape("tinyllama-1.1b").model_copy(update={"layers": 2})
ZCU102 = load_target("zcu102")
WHOLE = Workload(TINY, "w8a8", 64, 2, "all", replay=0.5)


def spans_by_lane(result: Estimate) -> dict[str, list[dict[str, Any]]]:
    """The complete events of a step by the name of their lane, in order of time."""
    events = trace_events(result.step)
    lanes = {e["tid"]: e["args"]["name"] for e in events if e["ph"] == "M"}
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in lanes.values()}
    for event in sorted((e for e in events if e["ph"] == "X"), key=lambda e: e["ts"]):
        found[lanes[event["tid"]]].append(event)
    return found


@pytest.mark.parametrize(
    ("work", "lanes"),
    [
        (WHOLE, {"host", "call", "controller", "array", "rows in and out", "attention", "vector"}),
        (replace(WHOLE, offload="linears"), {"host", "call", "controller", "array", "rows in and out"}),
    ],
)
def test_spans_of_a_lane_follow_each_other_and_calls_enclose_their_parts(work: Workload, lanes: set[str]) -> None:
    result = estimate(work, ZCU102, what_if=True)
    found = spans_by_lane(result)
    assert set(found) == lanes
    for spans in found.values():
        assert all(before["ts"] + before["dur"] <= after["ts"] + 1e-3 for before, after in pairwise(spans))
    inside = [e for name, spans in found.items() if name not in ("host", "call") for e in spans]
    assert sum(e["dur"] for e in found["call"]) == pytest.approx(sum(e["dur"] for e in inside), rel=1e-4)
    assert sum(e["args"]["bytes"] for e in found["call"]) == pytest.approx(sum(e["args"]["bytes"] for e in inside))
    end = max(e["ts"] + e["dur"] for spans in found.values() for e in spans)
    assert end == pytest.approx(1e6 * result.step.seconds)


def test_the_calls_are_the_instructions_of_the_program_that_is_given() -> None:
    """Every instruction that takes time is one call, in order; a program without a norm has one call less."""
    design = explore(WHOLE.kernel_spec(), ZCU102).design
    program = program_of_shape(WHOLE, design)
    whole = estimate(replace(WHOLE, replay=0.0), ZCU102, design=design, program=program)
    decided = [i for i in program.instructions if not isinstance(i, Decide | End)]
    assert len(whole.step.calls) == len(decided)
    assert [call.layer for call in whole.step.calls] == [i.layer for i in decided]
    norm = next(i for i in program.instructions if isinstance(i, Norm))
    shorter = replace(program, instructions=tuple(i for i in program.instructions if i is not norm))
    less = estimate(replace(WHOLE, replay=0.0), ZCU102, design=design, program=shorter)
    assert len(less.step.calls) == len(whole.step.calls) - 1
    assert less.seconds_per_step < whole.seconds_per_step


def test_an_artifact_is_estimated_with_its_own_design(artifact: fc.Artifact) -> None:
    section = artifact.manifest.accelerator
    assert section is not None
    assert section.exploration.tried > 5
    result = CliRunner().invoke(app, ["estimate", str(artifact.path), "--replay", "0.5", "--json"])
    assert result.exit_code == 0, result.stderr
    report = json.loads(result.stdout)
    assert report["offload"] == "all"
    assert report["design"] == section.design.model_dump(mode="json", exclude_none=True)
    assert {s["name"] for s in report["time_line"]} >= {"gate_up", "qkv", "attention"}
    state = sum(s.nbytes for s in artifact.state)
    assert report["memory"]["total"] == artifact.manifest.decoder.weight_bytes + state


def test_the_file_is_what_the_page_shows(artifact: fc.Artifact, tmp_path: Path) -> None:
    """Of an artifact of whole steps: both are of the program that was emitted."""
    stored = StoredArtifact(artifact.path)
    manifest, program = stored.manifest, program_of(stored)
    assert program is not None
    result = estimate(workload_of(manifest), ZCU102, design=design_of(manifest, ZCU102), program=program)
    write_time_line(result, tmp_path / "line.json")
    written = json.loads((tmp_path / "line.json").read_text())
    assert "predicted, 0.0% replay" in written["otherData"]["estimate"]
    (line,) = speed_page(stored, None)["steps"]
    assert line["events"] == written["traceEvents"]
    calls = {e["name"] for e in line["events"] if e.get("cat") == "call"}
    assert calls >= {"norm", "qkv, 2 rows", "MLP, 2 rows", "add"}
