"""Instructions of a step program by the cycle model, and the closed form beside it."""

import re
from dataclasses import replace
from importlib.resources import files

import pytest
from conftest import first_often
from cycle_model import attend
from cycle_model.attend import attend_network
from cycle_model.engine import simulated
from cycle_model.kernel import simulate_network
from cycle_model.network import Fifo, Network, Run

from fastcar_compile.codegen.hls.design.step_loops import AttendWork
from fastcar_compile.codegen.hls.design.step_usage import VALUE_FIFO_WORDS
from fastcar_compile.codegen.hls.model import Workload, load_shape
from fastcar_compile.codegen.hls.model.engine import EngineCall, EngineMemory, attend_clocks
from fastcar_compile.codegen.hls.model.question import ask
from fastcar_compile.codegen.hls.model.system import estimate_question
from fastcar_compile.codegen.hls.model.workload import GateModel
from fastcar_compile.config.targets import load_target

TINY = load_shape("tinyllama-1.1b").model_copy(update={"layers": 2, "vocab": 0})
LARGE = load_shape("vila-u-7b").model_copy(update={"layers": 1})
MEMORY = EngineMemory(rate=3.2, latency=75, window=1024, refresh_interval=1950, refresh=87)
FAST = EngineMemory(rate=3.72, latency=90, window=1024, refresh_interval=2340, refresh=105)
ATTENTIONS = (
    AttendWork(1, 4, 1, 1, 4, 4, 512),
    AttendWork(2, 4, 4, 2, 2, 4, 96),
    AttendWork(1, 4, 8, 8, 1, 4, 32),
    AttendWork(1, 8, 1, 1, 4, 16, 512),
    AttendWork(8, 4, 1, 1, 4, 4, 512, share=4),
    AttendWork(3, 2, 2, 2, 2, 4, 96, share=3),
)


@pytest.mark.parametrize(
    ("board", "shape", "quant", "batch", "replay", "context", "share"),
    first_often(
        [
            ("kv260", LARGE, "w4a8", 1, 0.5, 256, 0.156),
            ("zcu102", TINY, "w8a8", 2, 0.5, 128, 0.2),
            ("u280", TINY, "w4a8", 1, 0.0, 64, 0.0),
            ("zcu102", LARGE, "w4a8", 1, 0.0, 512, 0.0),
        ],
        3,
    ),
)
def test_the_closed_form_is_within_five_per_cent(
    board: str, shape: object, quant: str, batch: int, replay: float, context: int, share: float
) -> None:
    plain = Workload(shape, quant, context, batch, "all", replay=replay)  # pyright: ignore[reportArgumentType]
    work = replace(plain.with_drafts(share), gate=GateModel.named("learned" if share else "tas"))
    target = load_target(board)
    question = ask(work, target, what_if=True)
    run, cycles = simulated(question)
    assert estimate_question(question).seconds_per_step == pytest.approx(run.seconds, rel=0.05)
    assert run.busy["attend"] > 0
    assert run.busy["vector"] > 0
    processes = {name for result in cycles.results.values() for name in result.processes}
    assert {"read_cache", "multiply_keys", "vector", "mac_tile"} <= processes
    drafts = [call for call in cycles.results if isinstance(call, EngineCall) and call.last_load is not None]
    assert {call.load.rows for call in drafts} == ({2 * n for n in range(1, batch + 1)} if share else set())
    for call in drafts:
        (own,) = set(cycles.design.drafts.values())
        words = cycles.results[call].words["memory"]
        assert words == pytest.approx(own.port_words * cycles.design.ports, rel=1e-3)
        assert sum(map(call.product_bytes, range(2))) == own.port_words * cycles.design.ports * 16


@pytest.mark.parametrize("work", ATTENTIONS)
def test_attention_reads_every_word_once(work: AttendWork) -> None:
    result = simulate_network(attend_network(work, MEMORY))
    assert work.passes * result.words["memory"] == pytest.approx(work.words * work.ports)
    assert attend_clocks(work, MEMORY) == pytest.approx(work.passes * result.clocks, rel=0.1)
    ends = {name: process.end for name, process in result.processes.items()}
    assert max(ends, key=lambda name: ends[name]) == "add_values"


def test_the_model_has_the_fifos_of_the_kernel() -> None:
    """Entries of a FIFO in the source of the top: a number, or one that follows from the design."""
    text = (files("hls_templates") / "fastcar_step.cpp.j2").read_text()
    region = text[text.index("static void fastcar_attend(") : text.index("fastcar::attention::read_cache")]
    entries = dict(re.findall(r'^    \(".+", "(\w+)", ".*", (.+)\),$', region, re.MULTILINE))
    assert {entries[name] for name in ("ports", "keys", "value_exponents")} == {str(attend.SMALL_FIFO)}
    assert entries["values"] == str(VALUE_FIFO_WORDS)
    assert (entries["key_sums"], entries["value_sums"]) == (str(attend.KEY_SUMS), str(attend.VALUE_SUMS))
    assert (entries["logits"], entries["scaled"]) == (str(attend.LOGITS), str(attend.WEIGHTS))
    assert entries["limbs"] == str(attend.LIMBS)
    assert entries["numerators"] == f"step.positions // 4 + {attend.SMALL_FIFO}"


def test_a_longer_value_fifo_hides_the_weights() -> None:
    """A tile's weights are known after its exponents have passed: until then its words wait."""
    clocks = []
    for depth in (4, 64, 256):
        network = attend_network(ATTENTIONS[0], FAST)
        fifos = dict(network.fifos) | {"values": Fifo(depth, "route_cache", "multiply_values")}
        clocks.append(simulate_network(replace(network, fifos=fifos)).clocks)
    assert clocks[0] > 1.1 * clocks[1]
    assert clocks[1] == pytest.approx(clocks[2])


def test_a_flat_loop_goes_on_without_a_drain() -> None:
    def chain(flat: bool) -> float:
        runs = [Run("work", 10, 1, 20, flat=flat)] * 3
        return simulate_network(Network({"one": runs})).clocks

    assert chain(flat=False) == 3 * (9 + 20)
    assert chain(flat=True) == 3 * 10
