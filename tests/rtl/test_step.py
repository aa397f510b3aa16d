"""Whole decode steps: the controller in C++, linears and MLPs in RTL, at the two ends of their streams."""

from dataclasses import replace

import pytest
from step import test_step
from step.conftest import BuildKernel, build_kernel, csim_tools
from step.decoder import Decoder

from fastcar_compile.codegen.hls.control_table.table import TableStatus
from fastcar_compile.codegen.hls.model.engine import EngineMemory
from rtl.simulation import Builder, step_kernel

__all__ = ["build_kernel", "csim_tools"]

MEMORIES = {
    "tas": (EngineMemory(100.0, 40, 0), 0),
    "tas, normed": (EngineMemory(0.4, 3, 0, refresh_interval=97, refresh=20), 300),
    "learned": (EngineMemory(1.3, 75, 0, refresh_interval=500, refresh=80), 300),
    "tas, 2 of 2": (EngineMemory(4.0, 75, 0), 0),
}
"""By decoder the memory, and the clocks of a thousand in which the other end of a stream is not ready."""


def in_rtl(name: str) -> Decoder:
    """A decoder whose engine is a kernel of its own."""
    made = test_step.DECODERS[name]
    return replace(made, made=replace(made.made, engine="rtl"))


@pytest.mark.thorough
@pytest.mark.parametrize("name", MEMORIES)
def test_a_decoder_decodes_alike(rtl_tools: None, builder: Builder, name: str) -> None:
    """Bit for bit as the simulator, launch after launch: both quantisations, two weight ports on an AXI port, layer
    norms, no head, two rows of a video."""
    made, (memory, held) = in_rtl(name), MEMORIES[name]
    kernel = step_kernel(made, builder, f"step_{name}".replace(", ", "_").replace(" ", "_"), memory, held)
    assert kernel.load(made.program.to_bytes(made.table)) == TableStatus.OK
    test_step.test_a_decoder_decodes_alike(kernel, name)


@pytest.mark.thorough
def test_so_does_its_c_simulation(csim_tools: None, build_kernel: BuildKernel) -> None:
    made = in_rtl("tas, normed")
    kernel = build_kernel(made, group=2)
    assert kernel.load(made.program.to_bytes(made.table)) == TableStatus.OK
    test_step.test_a_decoder_decodes_alike(kernel, "tas, normed")
