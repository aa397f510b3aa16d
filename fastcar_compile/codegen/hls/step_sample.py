"""A small step program of the sizes of a kernel, one layer of a decoder and its head (`step_golden.py`: what it gives)."""

from collections.abc import Iterator
from dataclasses import replace

from fastcar_compile.artifact.engine import EngineProduct
from fastcar_compile.codegen.hls.design.design import Design
from fastcar_compile.codegen.hls.step_program import instructions as step
from fastcar_compile.codegen.hls.step_program import replaying
from fastcar_compile.codegen.hls.step_program.instruction import Instruction, Place
from fastcar_compile.codegen.hls.step_program.program import StepProgram

TILES = 2
"""Tiles that a linear into the output has at most: of a large head the test bench computes the first channels."""

STORED_WORDS = 64
"""Memory words of a row that the test bench stores at most: of large hidden states the first values."""


def sample_program(program: StepProgram, design: Design) -> StepProgram:
    """Return the first layer with a gate and the last operations of a program, on a memory that holds no more.

    A slot comes around after `slots_of` forwards. Drafts are left out: rows that replay add what their slots hold.
    """
    return _Sample(program, design).program()


class _Sample:
    """Moves what the instructions read together; words are counted as they are met."""

    def __init__(self, program: StepProgram, design: Design) -> None:
        self._all, self._design = program, design
        self._weights, self._constants, self._replay = 0, 0, 0
        self._tables: dict[int, int] = {}
        self._slots = slots_of(program)

    def program(self) -> StepProgram:
        """Return the program."""
        chosen = self._chosen() if self._all.whole else self._short()
        instructions = tuple(i for one in chosen for i in self._moved(one))
        sizes = self._all.sizes
        heads = [i for i in instructions if isinstance(i, step.Attend)]
        layouts = [(sizes.videos * i.key_heads, sizes.layout(i.blocks)) for i in heads]
        return StepProgram(
            replace(
                sizes,
                constant_words=self._constants,
                weight_words=self._weights,
                key_words=max((count * layout.key_words for count, layout in layouts), default=0),
                value_words=max((count * layout.value_words for count, layout in layouts), default=0),
                replay_words=self._replay,
            ),
            instructions,
        )

    def _chosen(self) -> list[Instruction]:
        """Return the load, the first layer with a gate (else the first), and what stands behind all layers."""
        first, last = self._all.instructions[0], self._all.instructions[-1].layer
        layer = next((one.layer for one in self._all.every(replaying.Decide).values()), 0)
        behind = (i for i in self._all.instructions[1:] if not isinstance(i, replaying.OF_DRAFTS))
        return [first, *(one for one in behind if one.layer in (layer, last))]

    def _short(self) -> list[Instruction]:
        """Return the first decision and MLP, and a linear of every size."""
        found = [next(iter(self._all.every(kind).values()), None) for kind in (replaying.DecideRows, step.Mlp)]
        linears = {(i.inputs, i.channels, i.bias): i for i in self._all.every(step.Linear).values()}
        return [i for own in (*found, *linears.values()) if own is not None for i in (own, step.End(0))]

    def _moved(self, instruction: Instruction) -> Iterator[Instruction]:
        """Yield what stands for an instruction."""
        match instruction:
            case replaying.Decide() | replaying.DecideRows():
                yield self._decide(instruction)
            case replaying.Replay(layer, count):
                yield replaying.Replay(layer, count, self._slots, self._kept(count))
            case step.Append():
                yield replace(instruction, cache=0)
            case step.Attend():
                yield replace(instruction, keys=0, values=0)
            case step.Store():
                yield replace(instruction, count=min(instruction.count, STORED_WORDS))
            case step.Linear() as linear:
                own = _cut(linear, self._design.ports) if linear.target is Place.OUTPUT else linear
                yield replace(own, weights=self._weights)
                self._weights += product_of(own, self._design).section_words
            case step.Mlp() as mlp:
                yield replace(mlp, weights=self._weights)
                self._weights += self._design.section_words
            case step.Norm() as norm:
                yield replace(norm, weight=self._constant(norm, "weight"))
            case step.Rotate() as rotate:
                yield replace(rotate, table=self._table(rotate))
            case _:
                yield instruction

    def _decide(self, decide: replaying.Decide | replaying.DecideRows) -> Instruction:
        network = self._constant(decide, "network") if decide.units else 0
        if isinstance(decide, replaying.DecideRows):
            return replace(decide, network=network)
        inputs = self._kept(decide.count) if decide.count else 0
        return replace(decide, stride=self._slots, chain=self._kept(1), keys=0, inputs=inputs, network=network)

    def _kept(self, words: int) -> int:
        """Return where slots of so many words begin in the replay buffer."""
        first, sizes = self._replay, self._all.sizes
        self._replay += (self._slots * sizes.videos + sizes.staged) * words
        return first

    def _constant(self, instruction: Instruction, name: str) -> int:
        """Return where the constants begin of which a field of the whole program's instruction is the first."""
        own, first = instruction.extent(name, self._all.sizes), self._constants
        self._constants += own.stop - own.start
        return first

    def _table(self, rotate: step.Rotate) -> int:
        if rotate.table not in self._tables:
            self._tables[rotate.table] = self._constant(rotate, "table")
        return self._tables[rotate.table]


def slots_of(program: StepProgram) -> int:
    """Return the tokens of a frame in the sample: one more than a video has rows in a launch."""
    return program.sizes.rows // program.sizes.videos + 1


def _cut(linear: step.Linear, ports: int) -> step.Linear:
    """Return the first tiles of a linear; the last of them is one channel short, as that of the whole may be."""
    if linear.tiles <= TILES:
        return linear
    return replace(linear, tiles=TILES, channels=TILES * linear.tile * ports - 1)


def product_of(linear: step.Linear, design: Design) -> EngineProduct:
    """Return the product of a linear on the design."""
    sizes = (linear.inputs, linear.channels, design.ports, linear.tile, linear.tiles)
    return EngineProduct(*sizes, bits=design.mlp.weight_bits, bias=bool(linear.bias))
