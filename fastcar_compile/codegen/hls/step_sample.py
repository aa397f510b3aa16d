"""A small step program of the sizes of a kernel: one layer of a decoder and its head."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from fastcar_compile.codegen.hls.design.design import Design
from fastcar_compile.codegen.hls.design.product import Product
from fastcar_compile.codegen.hls.step_program import instructions as step
from fastcar_compile.codegen.hls.step_program.program import StepProgram


def sample_program(program: StepProgram, design: Design) -> StepProgram:
    """Return the first layer and the last operations of a program, without replay, on a memory that holds no more."""
    return _Sample(program, design).program()


class _Sample:
    """Moves what the instructions read together; words are counted as they are met."""

    def __init__(self, program: StepProgram, design: Design) -> None:
        self._all, self._design = program, design
        self._weights, self._constants = 0, 0
        self._tables: dict[int, int] = {}

    def program(self) -> StepProgram:
        """Return the program."""
        whole, last = self._all.whole, self._all.instructions[-1].layer
        chosen = [one for one in self._all.instructions if one.layer in (0, last)] if whole else self._short()
        instructions = tuple(i for one in chosen for i in self._moved(one))
        sizes = self._all.sizes
        heads = [i for i in instructions if isinstance(i, step.Attend)]
        layouts = [(sizes.rows * i.key_heads, step.layout_of(sizes, i.blocks)) for i in heads]
        return StepProgram(
            replace(
                sizes,
                constant_words=self._constants,
                weight_words=self._weights,
                key_words=max((count * layout.key_words for count, layout in layouts), default=0),
                value_words=max((count * layout.value_words for count, layout in layouts), default=0),
                replay_words=0,
            ),
            instructions,
        )

    def _short(self) -> list[step.Instruction]:
        """Return the MLP of the first layer, and a linear of every size; the test bench has no decisions."""
        found = {step.Mlp: self._all.instructions[self._all.entries(step.Mlp)[0]]}
        found |= {(i.inputs, i.channels, i.bias): i for i in self._all.instructions if isinstance(i, step.Linear)}
        return [i for own in found.values() for i in (own, step.End(0))]

    def _moved(self, instruction: step.Instruction) -> Iterator[step.Instruction]:
        """Yield what stands for an instruction: a layer that replays computes all of its rows."""
        match instruction:
            case step.Decide():
                return
            case step.Replay(layer, source, target, count):
                yield step.Add(layer, source, target, count)
            case step.Linear() as linear:
                yield replace(linear, weights=self._weights)
                self._weights += self._product(linear).section_words
            case step.Mlp() as mlp:
                yield replace(mlp, weights=self._weights)
                self._weights += self._design.section_words
            case step.Norm() as norm:
                yield replace(norm, weight=self._constants)
                self._constants += norm.count
            case step.Rotate() as rotate:
                yield replace(rotate, table=self._table(rotate))
            case _:
                yield instruction

    def _product(self, linear: step.Linear) -> Product:
        sizes = (linear.inputs, linear.channels, self._design.ports, linear.tile, linear.tiles)
        return Product(*sizes, bits=self._design.mlp.weight_bits, bias=bool(linear.bias))

    def _table(self, rotate: step.Rotate) -> int:
        if rotate.table not in self._tables:
            self._tables[rotate.table] = self._constants
            self._constants += rotate.table_rows * 2 * rotate.half_words
        return self._tables[rotate.table]
