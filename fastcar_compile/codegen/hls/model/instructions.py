"""One decode step of a kernel of whole steps: one launch, then instruction after instruction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fastcar_compile.codegen.hls.design.step_loops import AttendWork, VectorWork, vector_loops
from fastcar_compile.codegen.hls.model.call import AttendCall, Call, LoopCall
from fastcar_compile.codegen.hls.model.engine import RowLoad
from fastcar_compile.codegen.hls.model.shapes import LinearShape
from fastcar_compile.codegen.hls.model.step import Board, Step, StepKernel
from fastcar_compile.codegen.hls.step_program import instructions as step
from fastcar_compile.codegen.hls.step_program.cache_layout import BLOCK
from fastcar_compile.codegen.hls.step_program.instructions import Instruction, Opcode, Place

SAMPLE_BYTES = 16
"""What sampling loads and stores per logit: the largest is found, powers are stored, the sum is searched. Estimate."""

NAMES = {
    Opcode.LOAD: "load",
    Opcode.NORM: "norm",
    Opcode.ROTATE: "rotate",
    Opcode.ADD: "add",
    Opcode.APPEND_KEYS: "append keys",
    Opcode.APPEND_VALUES: "append values",
    Opcode.DECIDE: "decide",
    Opcode.REPLAY: "replay",
}
"""Spans of the vector instructions."""

SAMPLE_FLOPS = 16
"""Operations of sampling per logit, most of them a power. Estimate."""


def run_program(board: Board, kernel: StepKernel, loads: Sequence[RowLoad], attended: float) -> Step:
    """Return the time line of one forward: the host embeds, launches once and samples.

    Args:
        loads: per layer the rows that compute in the MLP. attended: rows of the cache that are filled.
    """
    run, host, shape = Step(), board.host, board.shape
    moved = 2 * 4 * shape.hidden * board.batch
    run.add("embed", 0, "host", host.seconds(bytes_read=moved), moved)
    run.add("start step", 0, "launch", host.call_seconds)
    calls = _Calls(board, max(1, round(attended)))
    program = kernel.program if board.gate is not None else kernel.dense
    decided = False
    for instruction in program.instructions:
        decided = decided or isinstance(instruction, step.Decide)
        load = loads[instruction.layer] if decided or isinstance(instruction, step.Mlp) else calls.every
        decided = decided and not isinstance(instruction, step.Replay)
        call = calls.of(instruction, load)
        if call is not None:
            run.instruction(instruction.layer, board, call)
    if shape.vocab:
        logits = shape.vocab * board.batch
        seconds = host.row_seconds(SAMPLE_BYTES * logits) + host.seconds(flops=SAMPLE_FLOPS * logits)
        run.add("sample", shape.layers, "host", seconds)
    return run


@dataclass(frozen=True)
class _Calls:
    """What the engine does for an instruction. positions: rows of the cache that are filled."""

    board: Board
    positions: int

    @property
    def every(self) -> RowLoad:
        """Every row."""
        batch = self.board.batch
        return RowLoad(batch, -(-batch // self.board.engine.cores))

    def of(self, instruction: Instruction, load: RowLoad) -> Call | None:
        """Return the call of an instruction, with the rows that compute in its layer; None: it takes no time."""
        match instruction:
            case step.End():
                return None
            case step.Linear():
                stays = instruction.target is not Place.OUTPUT
                return self.board.engine.instruction_call([self._linear(instruction)], self.every, stays=stays)
            case step.Mlp():
                linears = self.board.shape.mlp_linears
                return self.board.engine.instruction_call(linears, load) if load.rows else None
            case step.Attend():
                return AttendCall(self._attend(instruction))
            case _:
                return self._vector(instruction, load)

    def _linear(self, instruction: step.Linear) -> LinearShape:
        shape = self.board.shape
        names = {(x.inputs, x.outputs): x.name for x in shape.attention_linears}
        size = instruction.inputs, instruction.channels
        name = "head" if instruction.target is Place.OUTPUT else names.get(size, "linear")
        return LinearShape(name, *size)

    def _attend(self, instruction: step.Attend) -> AttendWork:
        queries = instruction.heads // instruction.key_heads
        group = min(self.board.engine.design.group, queries)
        rows, ports = self.board.batch, self.board.engine.design.ports
        whole = -(-self.positions // BLOCK) * BLOCK  # tiles of values; so few forwards differ
        positions = min(whole, instruction.sinks + instruction.ring)
        return AttendWork(rows, instruction.key_heads, queries, group, instruction.blocks, ports, positions)

    def _vector(self, instruction: Instruction, load: RowLoad) -> LoopCall | None:
        engine = self.board.engine
        work = VectorWork(self.board.batch, load.rows, engine.design.ports, engine.design.axi_words, engine.control)
        parts = vector_loops(instruction, work)
        return LoopCall(NAMES[instruction.opcode], parts) if parts else None
