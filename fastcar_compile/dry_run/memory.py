"""Bytes of a decoder, and what every bank of the board's memory holds."""

from __future__ import annotations

from collections.abc import Iterator

from fastcar_compile.artifact.sections import StateRole
from fastcar_compile.codegen.hls.design.banks import bank_map
from fastcar_compile.codegen.hls.design.footprint import capacity, shares_memory
from fastcar_compile.codegen.hls.plan import AcceleratorPlan, footprint_of
from fastcar_compile.config import CompileConfig
from fastcar_compile.dry_run.report import Bank, Memory
from fastcar_compile.ir.program import DecoderProgram
from fastcar_compile.targets import Target


def memory_of(program: DecoderProgram, config: CompileConfig, board: Target, plan: AcceleratorPlan | None) -> Memory:
    """Return the bytes of weights and state, and where they are."""
    totals = {str(role): sum(s.nbytes for s in program.state if s.role is role) for role in StateRole}
    weights = program.params.nbytes()
    return Memory(
        weights=weights,
        state={role: size for role, size in totals.items() if size},
        banks=tuple(_banks(program, config, board, plan)),
    )


def _banks(
    program: DecoderProgram, config: CompileConfig, board: Target, plan: AcceleratorPlan | None
) -> Iterator[Bank]:
    whole = shares_memory(board) or config.offload == "all"
    own = program.params.nbytes() + sum(s.nbytes for s in program.state)
    if plan is None or not whole:
        yield Bank(memory="host", holds="parameters and state", used=own)
    if plan is None:
        return
    name, footprint = " + ".join(m.name for m in board.weight_memories), footprint_of(program, config, board)
    holds = "parameters and state" if whole else "weights"
    yield Bank(memory=name, holds=holds, used=footprint.total, capacity=capacity(board))
    ports = plan.design.axi_weight_ports
    banks = bank_map(board, ports)
    if banks is None or banks.bank_bytes is None:
        return
    section = -(-plan.design.weight_bytes // ports)
    for port, tag in enumerate(banks.weights):
        holds = f"weight streams of port {port}"
        yield Bank(memory=name, tag=tag, holds=holds, used=section, capacity=banks.bank_bytes)
