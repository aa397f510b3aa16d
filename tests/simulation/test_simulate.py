"""`fc.simulate` and `fastcar simulate` on an artifact: figures, time line, stalls, report."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from decoders import llama
from typer.testing import CliRunner, Result

import fastcar_compile as fc
from fastcar_compile.artifact.reader import read_manifest
from fastcar_compile.cli import app
from fastcar_compile.codegen.hls.design.exploration import explore
from fastcar_compile.errors import InputError, InternalError
from fastcar_compile.estimate import Workload, load_shape
from fastcar_compile.estimate.question import ask
from fastcar_compile.estimate.rows import Mapping, coupled
from fastcar_compile.inspection.speed import speed_page
from fastcar_compile.simulation import time_line
from fastcar_compile.simulation.simulate import Simulation, check_dispatch, simulate_question
from fastcar_compile.simulation.trace import ENGINE, chrome_trace
from fastcar_compile.targets import load_target

ROWS = 16


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small decoder for zcu102, all linears in the fabric, TAS in every layer."""
    replay = fc.ReplayConfig(gate="tas", threshold=0.0)
    made = fc.compile(
        llama(), target="zcu102", tokens_per_frame=8, batch_size=ROWS, offload="linears", quant="w8a8", replay=replay,
        prefill_chunk=1, output=tmp_path_factory.mktemp("simulate") / "a",
    )  # fmt: skip
    return made.path


@pytest.fixture
def command(artifact: Path) -> Callable[..., Result]:
    """Run `fastcar simulate` on it."""
    return lambda *words: CliRunner().invoke(app, ["simulate", str(artifact), *map(str, words)])


def test_a_step_of_an_artifact(artifact: Path) -> None:
    dense, replayed = fc.simulate(artifact), fc.simulate(artifact, replay=0.8, seed=3)
    assert dense.replay_ratio == 0
    assert replayed.replay_ratio == pytest.approx(0.8)
    # A core per row: a tile takes one pass however many rows compute. The gate adds its calls.
    assert (dense.cores, dense.passes) == (ROWS, 1)
    assert 0 < _without_gate(replayed) < 1.01 * _without_gate(dense)
    assert replayed.seconds["drs"] > 2 * dense.seconds["drs"] > 0
    assert replayed.seconds["launch"] > dense.seconds["launch"]
    assert dense.speedup_over_dense == 1
    assert replayed.comparison["dense"] == pytest.approx(dense.tokens_per_second)
    assert replayed.comparison["nothing_replays"] < dense.tokens_per_second
    assert 0 < dense.table_load_seconds == replayed.table_load_seconds
    assert dense.clocks_per_step == pytest.approx(dense.seconds_per_step * dense.clock_hz)
    assert sum(dense.seconds.values()) == pytest.approx(dense.seconds_per_step)
    assert replayed.to_json() == fc.simulate(artifact, replay=0.8, seed=3).to_json()
    assert replayed.to_json() != fc.simulate(artifact, replay=0.8, seed=4).to_json()
    assert dense.processes["mac_tile"].busy > 0
    # Every process is busy or waits for as long as the engine's calls take.
    calls = sum(dense.calls[call].clocks for _start, call in dense.typical.calls)
    for process in dense.processes.values():
        assert process.busy + sum(process.stalls.values()) == pytest.approx(calls)


def _without_gate(simulation: Simulation) -> float:
    return sum(seconds for unit, seconds in simulation.seconds.items() if unit not in ("drs", "launch"))


def test_recorded_decisions(artifact: Path) -> None:
    decisions = np.ones((4, len(llama().model.layers), ROWS), bool)
    decisions[..., [0, 8]] = False
    simulation = fc.simulate(artifact, decisions=decisions)
    assert simulation.passes == -(-2 // simulation.cores)
    assert simulation.replay_ratio == 14 / 16
    with pytest.raises(InputError, match="the decisions are bool"):
        fc.simulate(artifact, decisions=decisions[:, :, :2])


def test_pairs_of_a_trace_are_coupled(command: Callable[..., Result], tmp_path: Path) -> None:
    """Of pair 0 one row replays, of pair 1 both do: with --pairs, only pair 1 replays."""
    decisions = np.zeros((2, len(llama().model.layers), ROWS), bool)
    decisions[..., [0, 1, 1 + ROWS // 2]] = True
    np.save(tmp_path / "trace.npy", decisions)
    found = json.loads(command("--trace", tmp_path / "trace.npy", "--pairs", "--json").stdout)
    assert found["replay_ratio"] == 2 / ROWS
    assert found["passes_by_mapping"]["drs"] <= found["passes_by_mapping"]["static"]
    refused = command("--replay", 0.5, "--correlated", "--pairs")
    assert refused.exit_code == 2
    assert "--correlated and --pairs cannot be given together" in " ".join(refused.stderr.split())


def test_a_workload_of_pairs_draws_them() -> None:
    shape = load_shape("tinyllama-1.1b").model_copy(update={"layers": 2})
    work, board = Workload(shape, "w8a8", 8, ROWS, replay=0.5, couple_cfg=True), load_target("zcu102")
    question = ask(work, board)
    assert (coupled(question.decisions) == question.decisions).all()
    assert work.control_table(4).couple_cfg
    alone = np.zeros((1, 2, ROWS), bool)
    alone[..., 0] = True
    with pytest.raises(InputError, match="not those of guidance pairs"):
        ask(work, board, decisions=alone)
    with pytest.raises(InputError, match="guidance pairs of batch = 3"):
        ask(dataclasses.replace(work, batch=3), board)


def test_drs_halves_what_the_static_mapping_stacks_on_one_core() -> None:
    """Rows 0 and 4 of 16 compute; of four cores, both are core 0's."""
    work = Workload(load_shape("tinyllama-1.1b").model_copy(update={"layers": 2}), "w8a8", 8, ROWS)
    decisions = np.ones((1, 2, ROWS), bool)
    decisions[..., [0, 4]] = False
    board = load_target("zcu102")
    four = explore(work.kernel_spec(), board, cores=[4]).design
    question = ask(work, board, decisions=decisions, design=four)
    drs, static = (simulate_question(question, mapping=mapping) for mapping in Mapping)
    assert (drs.cores, drs.passes, static.passes) == (4, 1, 2)
    assert static.processes["mac_tile"].busy > drs.processes["mac_tile"].busy
    assert static.seconds_per_step > 1.1 * drs.seconds_per_step


def test_the_control_table_has_the_last_word(artifact: Path) -> None:
    """A table of other cores maps to other passes than the design's array makes."""
    work = Workload(load_shape("tinyllama-1.1b").model_copy(update={"layers": 2}), "w8a8", 8, 8)
    question = ask(work, load_target("zcu102"))
    cores = question.design.mlp.cores
    check_dispatch(work.control_table(cores), question.decisions, cores)
    with pytest.raises(InternalError, match=r"layer 0: the control table maps RowLoad\(rows=8, passes=8\)"):
        simulate_question(question, work.control_table(1))


def test_chrome_trace(artifact: Path) -> None:
    simulation = fc.simulate(artifact, replay=0.5)
    trace = chrome_trace(simulation)
    events = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    names = {event["args"]["name"] for event in trace["traceEvents"] if event["ph"] == "M"}
    assert {"launch", "attention", "mac_tile", "read_weights"} <= names
    end = max(event["ts"] + event["dur"] for event in events)
    assert end == pytest.approx(1e6 * simulation.typical.seconds, rel=1e-3)
    lanes = {(event["pid"], event["tid"]) for event in events}
    for lane in lanes:
        spans = sorted((e["ts"], e["ts"] + e["dur"]) for e in events if (e["pid"], e["tid"]) == lane)
        assert all(later[0] >= before[1] - 1e-3 for before, later in pairwise(spans))


def test_text_json_and_files(command: Callable[..., Result], tmp_path: Path) -> None:
    line, report = tmp_path / "line.json", tmp_path / "report"
    text = command("--replay", 0.8, "--time-line", line, "--report", report)
    assert text.exit_code == 0, text.stderr
    for part in ("clocks", "multipliers wait", "deadlock", "none: ", "mac_tile", "mapping drs", "static over DRS"):
        assert part in text.stdout
    assert json.loads(line.read_text())["otherData"]["what_if"] == []
    page = (report / "report.html").read_text()
    assert {p.name for p in report.iterdir()} == {"report.html", "active_rows.svg", "cores.svg"}
    assert 'src="active_rows.svg"' in page
    assert "Deadlock: none" in page
    found = json.loads(command("--replay", 0.8, "--correlated", "--static", "--json").stdout)
    assert (found["mapping"], found["time_line_file"]) == ("static", None)
    assert found["passes"] == ROWS / found["cores"]


def test_refusals(command: Callable[..., Result], tmp_path: Path) -> None:
    for words, text in (
        (("--replay", 0.5, "--trace", "t.npy"), "--replay and --trace cannot be given together"),
        (("--replay", 1.5), "replay = 1.5 (0 to 1)"),
        (("--trace", tmp_path / "no.npy"), "the trace does not exist"),
    ):
        result = command(*words)
        assert result.exit_code == 2
        assert text in " ".join(result.stderr.split())


def test_the_page_has_the_events_of_the_trace(artifact: Path) -> None:
    """Every process of every call that stands in detail in the trace has the same spans on the page, in clocks."""
    simulation = fc.simulate(artifact)
    page = speed_page(read_manifest(artifact), None)
    assert [step.title for step in page.steps] == ["dense"], "without recorded decisions nothing replays"
    events = chrome_trace(simulation)["traceEvents"]
    lanes = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name" and e["pid"] == ENGINE}
    traced = [
        (lanes[e["tid"]], e["name"], round(e["ts"] * 1e-6 * simulation.clock_hz), e["dur"])
        for e in events
        if e["ph"] == "X" and e["pid"] == ENGINE and e["name"] != "as before"
    ]
    step, seen, found = page.steps[0], set[int](), list[tuple[str, str, int]]()
    for call in step.calls:
        if call.kind is None or call.kind in seen:
            continue
        seen.add(call.kind)
        for process in page.calls[call.kind].processes:
            now = round(call.start * page.clock_hz)
            for gap, length, state in zip(*[iter(process.spans)] * 3, strict=True):
                found.append((process.name, page.states[state], now + gap))
                now += gap + length
    long = [(name, state, clock) for name, state, clock, microseconds in traced if microseconds > 0.1]
    starts = {(name, state, clock + near) for name, state, clock in found for near in (-2, -1, 0, 1, 2)}
    assert len(long) > 50
    assert [event for event in long if event not in starts] == []
    assert step.seconds == pytest.approx(simulation.seconds_per_step)


def test_calls_beyond_the_bound_are_in_closed_form(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time_line, "MOST_TILES", 60)
    work = Workload(load_shape("tinyllama-1.1b"), "w8a8", 512, offload="linears", replay=0.5)
    lines = time_line.time_lines(ask(work, load_target("u280")))
    assert [line.replay for line in lines] == [0.0, pytest.approx(0.5)]
    simulated = [call.result is not None for line in lines for call in line.calls]
    assert any(simulated)
    assert not all(simulated)
    for line in lines:
        assert sum(s.seconds for s in line.step.segments) == pytest.approx(line.step.seconds)
        for call in line.calls:
            clocks = call.seconds * line.clock_hz
            assert call.result is None or clocks == pytest.approx(call.result.clocks)
