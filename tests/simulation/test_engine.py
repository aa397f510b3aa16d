"""The cycle model of the emitted engine, and the closed form beside it: one loop table, within 5 % of each other."""

import re
from dataclasses import replace
from itertools import product
from random import Random

import pytest
from cycle_model.call import engine_network, weight_words
from cycle_model.engine import CycleModel, bound_of, simulated
from cycle_model.kernel import simulate_network
from cycle_model.network import Network

from fastcar_compile.codegen.hls.design.control_loops import ControlOp, control_loops
from fastcar_compile.codegen.hls.design.loops import tile_loops
from fastcar_compile.codegen.hls.interface import weight_ports
from fastcar_compile.codegen.hls.model import DecoderShape, Workload, load_shape
from fastcar_compile.codegen.hls.model.question import ask
from fastcar_compile.codegen.hls.model.rows import draw_decisions
from fastcar_compile.codegen.hls.model.system import SystemRun
from fastcar_compile.config.targets import load_target
from fastcar_compile.errors import InternalError

EXAMPLE = DecoderShape(
    name="moving-shapes", layers=4, hidden=128, intermediate=352, heads=4, kv_heads=4, head_dim=32, vocab=17,
    source="examples/moving_shapes",
)  # fmt: skip
TINY = load_shape("tinyllama-1.1b").model_copy(update={"layers": 2, "vocab": 0})
LARGE = load_shape("vila-u-7b").model_copy(update={"layers": 1})
BOARDS = ("zcu102", "kv260", "zcu104", "u280")
POINTS = Random(17).sample(list(product(BOARDS, (EXAMPLE, TINY), ("w8a8", "w4a8"), (1, 4), (0.0, 0.5, 0.8))), 8)
WIDE = Random(18).sample(list(product(("zcu102", "u280"), (EXAMPLE,), ("w8a8", "w4a8"), (32,), (0.0, 0.5, 0.8))), 3)
SEVEN_BILLION = [("zcu102", LARGE, "w4a8", 1, 0.0), ("kv260", LARGE, "w8a8", 1, 0.0), ("u280", LARGE, "w4a8", 1, 0.5)]


@pytest.mark.parametrize(
    ("board", "shape", "quant", "batch", "replay"),
    [*POINTS, *WIDE, *SEVEN_BILLION],
    ids=lambda value: value.name if isinstance(value, DecoderShape) else str(value),
)
def test_the_closed_form_is_within_five_per_cent(
    board: str, shape: DecoderShape, quant: str, batch: int, replay: float
) -> None:
    work = Workload(shape, quant, 64, batch, replay=replay)
    decisions = draw_decisions((4, shape.layers, batch), replay)
    question = ask(work, load_target(board), decisions=decisions, recorded=False, what_if=True)
    runs = SystemRun.of(question.board(), question.decisions, question.attended), simulated(question)[0]
    closed, cycles = (run.streaming + run.busy.get("drs", 0.0) for run in runs)
    assert closed == pytest.approx(cycles, rel=0.05)


@pytest.fixture(scope="module")
def cycles() -> CycleModel:
    """TinyLlama's sizes in w4a8 on zcu102, eight rows."""
    engine = ask(Workload(TINY, "w4a8", 64, 8), load_target("zcu102")).board(CycleModel).engine
    assert isinstance(engine, CycleModel)
    return engine


def test_words_and_works_of_a_call_are_those_of_the_loop_table(cycles: CycleModel) -> None:
    """Nothing is lost on the way: every process works as long as its loops, whatever it waits for."""
    call = cycles.array_call(TINY.mlp_linears, cycles.load(3, 1))
    result = simulate_network(engine_network(call, cycles.memory))
    rows = 3 * 2 * TINY.hidden // 4
    decided = sum(loop.trips for loop in control_loops(call.control) if loop.moves)
    assert result.words["memory"] == pytest.approx(weight_words(call) * call.ports + rows + decided, rel=1e-4)
    for number, name in enumerate(("fetch_tile", "mac_tile", "scale_tile", "finish_tile")):
        loops = [tile_loops(p.product, call.load, inner=p.inner).stages[number] for p in call.products]
        works = sum(p.product.tiles * loop.cycles for p, loop in zip(call.products, loops, strict=True))
        assert result.processes[name].busy == pytest.approx(works, abs=1)
    assert all(s >= 0 for p in result.processes.values() for s in p.stalls.values())


def test_the_array_waits_for_the_controller(cycles: CycleModel) -> None:
    """The host gives the Index Register: placing the rows costs a fraction of a decision."""
    mlp = cycles.array_call(TINY.mlp_linears, cycles.load(1, 1))
    placed, decided = (cycles.parts_of(call)[0].seconds for call in (mlp, cycles.control_call(ControlOp.GATE)))
    assert placed < decided / 4
    result = cycles.results[mlp]
    assert result.processes["compute"].stalls["blocks empty: start of compute"] == result.processes["control"].end


def test_passes_are_work_of_the_array_and_not_of_the_ports(cycles: CycleModel) -> None:
    one, four = (cycles.array_call(TINY.mlp_linears, cycles.load(8, passes)) for passes in (1, 4))
    results = [simulate_network(engine_network(call, cycles.memory)) for call in (one, four)]
    assert results[1].words == pytest.approx(results[0].words)
    assert results[1].clocks > 2.5 * results[0].clocks
    assert bound_of(results[0]) != "compute"
    assert bound_of(results[1]) == "compute"


def test_a_slow_memory_bounds_a_call(cycles: CycleModel) -> None:
    call = cycles.array_call(TINY.attention_linears[:1], cycles.load(1, 1))
    slow = replace(cycles.memory, rate=cycles.memory.rate / 4)
    result = simulate_network(engine_network(call, slow))
    assert bound_of(result) == "memory"
    assert result.clocks == pytest.approx(weight_words(call) * call.ports / slow.rate, rel=0.05)


def test_copies_of_the_blocks_are_needed(cycles: CycleModel) -> None:
    """Heads skip the multiplication, so two copies cost time; without a block of sums, a circle is named."""
    call = cycles.array_call(TINY.attention_linears[:1], cycles.load(1, 1))

    def with_copies(**copies: int) -> Network:
        network = engine_network(call, cycles.memory)
        return replace(
            network, blocks={n: replace(b, copies=copies.get(n, b.copies)) for n, b in network.blocks.items()}
        )

    assert simulate_network(with_copies(head=2)).clocks > simulate_network(with_copies()).clocks
    with pytest.raises(
        InternalError, match=r"mac_tile \(blocks full: acc\) -> scale_tile \(blocks empty: acc\) -> mac"
    ):
        simulate_network(with_copies(acc=0))


def test_the_window_is_that_of_the_interface(cycles: CycleModel) -> None:
    weights = next(port for port in weight_ports(cycles.design) if port.name == "weights_0")
    beats, requests = re.findall(r"max_read_burst_length=(\d+) num_read_outstanding=(\d+)", weights.burst)[0]
    assert cycles.memory.window == int(beats) * int(requests) * cycles.design.axi_words
