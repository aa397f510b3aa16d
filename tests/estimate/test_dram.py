"""The DRAM model: laws it must obey, and what it says of the sequential bursts that the kernels make."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastcar_compile.codegen.hls.design.exploration import explore
from fastcar_compile.codegen.hls.design.memory import bank_excess, measured_cap, memory_rate, timing_of
from fastcar_compile.codegen.hls.model import Workload, load_shape
from fastcar_compile.config.targets import load_target

DDR4 = timing_of(load_target("kv260").memories[0])
RATE = 19.2e9


@given(burst=st.integers(64, 1 << 16), streams=st.integers(1, 32))
def test_efficiency_is_a_share_and_longer_bursts_of_fewer_streams_are_no_worse(burst: int, streams: int) -> None:
    efficiency = DDR4.efficiency(burst, streams, RATE)
    assert 0 < efficiency < 1
    assert DDR4.efficiency(2 * burst, streams, RATE) >= efficiency * (1 - 1e-9)
    assert DDR4.efficiency(burst, streams + 1, RATE) <= efficiency


def test_one_endless_stream_loses_refresh_only() -> None:
    assert DDR4.efficiency(1 << 20, 1, RATE) == pytest.approx(1 - 350 / 7800)


def test_short_bursts_are_bound_by_the_activate_window() -> None:
    """64 bytes take 3.3 ns, an activation 7.5 ns of the four-activate window."""
    assert DDR4.efficiency(64, 1, RATE) == pytest.approx((1 - 350 / 7800) * (64 / 19.2) / 7.5)


def test_more_ports_than_channels_share_them() -> None:
    """Four streams of 128 bits are one port of a pseudo channel."""
    u280 = load_target("u280")
    one = memory_rate(u280, 4)
    assert memory_rate(u280, 1) == one
    assert memory_rate(u280, 16) == pytest.approx(4 * one)
    assert memory_rate(u280, 128) == pytest.approx(measured_cap(u280))
    both, one = (memory_rate(load_target(name), ports) for name, ports in (("zcu104-sodimm", 8), ("zcu104", 4)))
    assert both == pytest.approx(2 * one, rel=0.02)


@pytest.mark.parametrize(("name", "ports"), [("zcu102", 4), ("kv260", 4), ("zcu104", 4), ("u280", 120)])
def test_the_model_stays_below_what_was_measured_and_near_it(name: str, ports: int) -> None:
    target = load_target(name)
    streams = target.weight_memories[0].channels
    used = min(1.0, ports * 128 / target.weight_memories[0].width_bits / streams)
    assert 0.98 * measured_cap(target) * used <= memory_rate(target, ports) <= measured_cap(target) * used


def test_a_controller_that_serves_in_order_loses_more() -> None:
    """256-byte bursts of four streams, row by row, without the reordering of UG1087's read store."""
    target = load_target("kv260")
    memory = target.memories[0]
    in_order = target.model_copy(update={"memories": (memory.model_copy(update={"reorder_bytes": 0}),)})
    assert memory_rate(in_order, 4) == pytest.approx(RATE * DDR4.efficiency(256, 4, RATE))
    assert memory_rate(in_order, 4) < 0.95 * measured_cap(target)


def test_a_board_without_a_measurement_has_its_model_alone() -> None:
    target = load_target("zcu102")
    memory = target.memories[0].model_copy(update={"measured": None})
    free = target.model_copy(update={"memories": (memory,)})
    assert measured_cap(free) == memory.peak_bandwidth
    assert measured_cap(target) < memory_rate(free, 4) < memory.peak_bandwidth


@pytest.mark.parametrize("quant", ["w8a8", "w4a8"])
@pytest.mark.parametrize(("board", "share"), [("u280", 0.6), ("zcu102", 0.95), ("kv260", 0.95)])
def test_a_7b_engine_streams_its_share_of_what_was_measured(board: str, share: float, quant: str) -> None:
    """Ports times clock, and what the memory gives them; and every bank holds its part."""
    target, work = load_target(board), Workload(load_shape("vila-u-7b"), quant, 512)
    design = explore(work.kernel_spec(), target).design
    ports = design.ports * 16 * design.budget.clock_mhz * 1e6
    rate = min(ports, memory_rate(target, design.ports))
    assert share * measured_cap(target) <= rate <= measured_cap(target)
    assert bank_excess(target, ports=design.axi_weight_ports, stream_bytes=design.weight_bytes) is None
