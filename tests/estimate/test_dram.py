"""The DRAM model: laws it must obey, and what it says of the sequential bursts that the kernels make."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastcar_compile.codegen.hls.design.dram import memory_rate, timing_of
from fastcar_compile.targets import load_target

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
    u280 = load_target("u280")
    one = memory_rate(u280, 1)
    assert memory_rate(u280, 8) == pytest.approx(8 * one)
    assert memory_rate(u280, 32) < 460e9
    assert memory_rate(load_target("zcu102"), 4) < 17.064e9
    assert memory_rate(load_target("zcu104-sodimm"), 8) == pytest.approx(2 * memory_rate(load_target("kv260"), 4))
