"""Figures of the host CPUs that stand on publications."""

import pytest

from fastcar_compile.codegen.hls.model.step import host_of
from fastcar_compile.config.targets import available_targets, load_target

REPORTED = (45e-6, 100e-6)
"""Seconds to start a kernel through XRT and to wait for it: XRT issues 9018 (an empty kernel) and 8687 (U55C)."""


@pytest.mark.parametrize("name", [name for name in available_targets() if load_target(name).kind == "fpga"])
def test_a_kernel_call_costs_what_is_reported_for_xrt(name: str) -> None:
    host = host_of(load_target(name))
    assert REPORTED[0] <= host.call_seconds <= REPORTED[1]
    assert "XRT issue 8687" in host.source
    assert "XRT issue 9018" in host.source
