"""The simulator of processes, FIFOs, blocks and memories against cases counted by hand, and clock by clock."""

from math import floor

import pytest
from cycle_model.kernel import simulate_network
from cycle_model.network import Action, Blocks, Claim, Fifo, Free, Network, Post, Run, Take
from cycle_model.state import water_fill
from hypothesis import given, settings
from hypothesis import strategies as st

from fastcar_compile.codegen.hls.model.engine import EngineMemory
from fastcar_compile.errors import InternalError


def pair(producer: Run, consumer: Run, depth: int) -> Network:
    """A producer, a FIFO and a consumer."""
    return Network({"a": [producer], "b": [consumer]}, {"f": Fifo(depth, "a", "b")})


@pytest.mark.parametrize(("copies", "clocks"), [(2, 10 * 12 + 9), (1, 10 * (12 + 9))])
def test_a_ping_pong_buffer_overlaps_its_writer_and_reader(copies: int, clocks: int) -> None:
    """Ten blocks, 12 clocks to write one and 9 to read it: the pace of the slower, or one after the other."""
    write: list[Action] = [Claim("x"), Run("write", 10, 1, 3), Post("x")] * 10
    read: list[Action] = [Take("x"), Run("read", 7, 1, 3), Free("x")] * 10
    network = Network({"a": write, "b": read}, blocks={"x": Blocks(copies, "a", "b")})
    result = simulate_network(network)
    assert result.clocks == clocks


def test_a_circle_of_processes_is_reported() -> None:
    """`a` fills f before it writes g; `b` wants g first. A FIFO that holds all of f's words ends it."""

    def network(depth: int) -> Network:
        a = [Run("first", 100, writes=("f",)), Run("second", 100, writes=("g",))]
        b = [Run("first", 100, reads=("g",)), Run("second", 100, reads=("f",))]
        return Network({"a": a, "b": b}, {"f": Fifo(depth, "a", "b"), "g": Fifo(16, "a", "b")})

    with pytest.raises(InternalError, match="deadlock at clock 17: a, b wait"):
        simulate_network(network(16))
    assert simulate_network(network(100)).clocks > 300


def reading(memory: EngineMemory, *trips: int) -> Network:
    """Ports that read one memory, each with a consumer."""
    processes: dict[str, list[Action]] = {}
    for n, words in enumerate(trips):
        processes[f"port {n}"] = [Run("read", words, 1, memory.latency, writes=(f"f{n}",), memory="dram")]
        processes[f"user {n}"] = [Run("use", words, 1, 1, reads=(f"f{n}",))]
    fifos = {f"f{n}": Fifo(64, f"port {n}", f"user {n}") for n in range(len(trips))}
    return Network(processes, fifos, memories={"dram": memory})


def test_a_memory_that_is_slower_than_its_port() -> None:
    """Half a word per clock: word 999 is asked for at 2 * 999, arrives 50 clocks later and is used in one."""
    result = simulate_network(reading(EngineMemory(0.5, 50, 1024), 1000))
    assert result.clocks == 2 * 999 + 50 + 1
    assert result.words == {"dram": pytest.approx(1000)}


def test_users_share_a_memory_and_one_that_is_done_leaves_it_to_the_other() -> None:
    memory = EngineMemory(1.0, 10, 1024)
    assert simulate_network(reading(memory, 1000, 1000)).clocks == pytest.approx(2 * 999 + 10 + 1, abs=2)
    assert simulate_network(reading(memory, 100, 1000)).clocks == pytest.approx(1100 + 10, abs=3)


def test_refresh_stops_everything_and_keeps_the_mean_rate() -> None:
    plain, refreshing = EngineMemory(0.5, 50, 1024), EngineMemory(0.5, 50, 1024, refresh_interval=1950, refresh=88)
    steady = simulate_network(reading(plain, 100_000)).clocks
    assert simulate_network(reading(refreshing, 100_000)).clocks == pytest.approx(steady, rel=2e-3)
    # Before the first refresh the memory is faster than its mean.
    assert simulate_network(reading(refreshing, 930)).clocks < simulate_network(reading(plain, 930)).clocks


def test_a_supply_is_shared_fairly() -> None:
    assert water_fill([1.0, 0.1, 1.0], 1.1) == pytest.approx([0.5, 0.1, 0.5])
    assert water_fill([0.2, 0.3], 1.0) == pytest.approx([0.2, 0.3])


def clock_by_clock(runs: list[Run], depths: list[int]) -> int:
    """The same chain, token by token: an iteration begins when its operand is there, and room for its result."""
    trips, begun = runs[0].trips, [[0] * runs[0].trips for _ in runs]
    room = [floor(depth + run.latency / run.ii + 1e-9) for depth, run in zip(depths, runs, strict=False)]
    for k in range(trips):
        for p, run in enumerate(runs):
            earliest = [0 if k == 0 else begun[p][k - 1] + int(run.ii)]
            earliest += [begun[p - 1][k] + runs[p - 1].latency] if p else []
            earliest += [begun[p + 1][k - room[p]]] if p + 1 < len(runs) and k >= room[p] else []
            begun[p][k] = max(earliest)
    return begun[-1][-1] + runs[-1].latency


@settings(deadline=None, max_examples=60)
@given(
    trips=st.integers(1, 300),
    stages=st.lists(st.tuples(st.integers(1, 5), st.integers(1, 20), st.integers(1, 40)), min_size=2, max_size=5),
)
def test_a_chain_takes_as_long_as_clock_by_clock(trips: int, stages: list[tuple[int, int, int]]) -> None:
    names = [f"p{i}" for i in range(len(stages))]
    fifos = {f"f{i}": Fifo(stages[i][2], names[i], names[i + 1]) for i in range(len(stages) - 1)}
    runs = [
        Run(
            name, trips, ii, latency,
            reads=(f"f{i - 1}",) if i else (), writes=(f"f{i}",) if i + 1 < len(stages) else (),
        )
        for i, (name, (ii, latency, _depth)) in enumerate(zip(names, stages, strict=True))
    ]  # fmt: skip
    result = simulate_network(Network({run.loop: [run] for run in runs}, fifos))
    expected = clock_by_clock(runs, [depth for _ii, _latency, depth in stages])
    assert result.clocks == pytest.approx(expected, abs=1)
