"""A small step program of the sizes of a kernel, one layer of a decoder and its head; and what the kernel has to give."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil, log2, sqrt
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fastcar_compile.codegen.hls.design.design import Design
from fastcar_compile.codegen.hls.design.product import FLOATS_PER_WORD, Product, float_words
from fastcar_compile.codegen.hls.design.spec import TABLED, MlpSpec
from fastcar_compile.codegen.hls.step_program import instructions as step
from fastcar_compile.codegen.hls.step_program.program import StepProgram
from fastcar_compile.codegen.hls.step_program.rows import Rows
from fastcar_compile.codegen.hls.step_program.simulator import Memory, StepSimulator
from fastcar_compile.ir.ops.linear import activation_factor, linear_w4a8, linear_w8a8, pack_int4

Bits = NDArray[np.uint32]
NumpyProduct = Callable[[NDArray[Any]], NDArray[Any]]

POSITIONS = 3
"""Whole steps that the test bench launches at most."""

TILES = 2
"""Tiles that a linear into the output has at most: of a large head the test bench computes the first channels."""


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
        layouts = [(sizes.rows * i.key_heads, sizes.layout(i.blocks)) for i in heads]
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
            case step.Decide() | step.Recall() | step.DraftRows():
                return
            case step.Replay(layer, source, target, count):
                yield step.Add(layer, source, target, count)
            case step.Linear() as linear:
                own = _cut(linear, self._design.ports) if linear.target is step.Place.OUTPUT else linear
                yield replace(own, weights=self._weights)
                self._weights += product_of(own, self._design).section_words
            case step.Mlp() as mlp:
                yield replace(mlp, weights=self._weights)
                self._weights += self._design.section_words
            case step.Norm() as norm:
                yield replace(norm, weight=self._constants)
                self._constants += norm.count * (2 if isinstance(norm, step.LayerNorm) else 1)
            case step.Rotate() as rotate:
                yield replace(rotate, table=self._table(rotate))
            case _:
                yield instruction

    def _table(self, rotate: step.Rotate) -> int:
        if rotate.table not in self._tables:
            self._tables[rotate.table] = self._constants
            self._constants += rotate.table_rows * 2 * rotate.half_words
        return self._tables[rotate.table]


def _cut(linear: step.Linear, ports: int) -> step.Linear:
    """Return the first tiles of a linear; the last of them is one channel short, as that of the whole may be."""
    if linear.tiles <= TILES:
        return linear
    return replace(linear, tiles=TILES, channels=TILES * linear.tile * ports - 1)


def product_of(linear: step.Linear, design: Design) -> Product:
    """Return the product of a linear on the design."""
    sizes = (linear.inputs, linear.channels, design.ports, linear.tile, linear.tiles)
    return Product(*sizes, bits=design.mlp.weight_bits, bias=bool(linear.bias))


# What the test bench draws, and what the kernel gives for it. step_testbench.cpp.j2 draws the same.


@dataclass(frozen=True)
class Launch:
    """A launch of the test bench; its outputs are in `golden` from this place on, row after row.

    Row b is at `position` and as many behind as it is behind the first row of its video.
    """

    entry: int
    position: int
    input_words: int
    channels: int
    golden: int


@dataclass(frozen=True)
class DrawnProduct:
    """A product of a test bench, whose weights are drawn. `number`: of the product. `first`: word of its weights."""

    number: int
    first: int
    product: Product

    @property
    def row(self) -> tuple[int | str, ...]:
        """The product as the test bench lists it."""
        own = self.product
        return (self.first, own.inputs, own.channels, own.tile, own.tiles, int(own.bias), f"0x{self.scale:x}u")

    @property
    def scale(self) -> int:
        """The bits of the least scale, float32 or float16, which keeps outputs at the size of the inputs."""
        int8 = self.product.bits == 8
        exponent = -ceil(log2((73 if int8 else 4.6) * sqrt(self.product.inputs)))
        return (127 + exponent) << 23 if int8 else (15 + exponent) << 10

    @cached_property
    def _matrix(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Weights, scales and biases, as a linear takes them."""
        own, draw = self.product, 3 * self.number
        channels = np.arange(own.channels, dtype=np.uint32)[:, None]

        def drawn(draw: int, places: int) -> Bits:
            return _drawn(draw, channels, np.arange(places, dtype=np.uint32))

        lanes = (drawn(draw, FLOATS_PER_WORD * own.channel_words) | 0x11111111).view(np.uint8)
        bias = torch.from_numpy(_drawn_floats(draw + 2, own.channels)) if own.bias else None
        scales = drawn(draw + 1, own.sums)
        if own.bits == 8:
            scale = (scales[:, 0] & 0x7FFFFF | self.scale).view(np.float32)
            return torch.from_numpy(lanes.view(np.int8)[:, : own.inputs]), torch.from_numpy(scale), bias
        # Of the 32 values of a word, 0 to 15 are the low nibbles of the bytes.
        words = lanes.reshape(own.channels, -1, 1, 16)
        nibbles = np.concatenate([words & 15, words >> 4], 2).reshape(own.channels, -1)
        values = ((nibbles ^ 8) - 8).view(np.int8)
        values[:, own.inputs :] = 0
        half = (scales & 0x3FF | self.scale).astype(np.uint16).view(np.float16)
        return pack_int4(torch.from_numpy(values)), torch.from_numpy(half), bias

    def __call__(self, x: Tensor) -> Tensor:
        """Return float32 [B, channels] of the rows, which may be longer than the inputs."""
        weight, scale, bias = self._matrix
        linear, rows = linear_w8a8 if self.product.bits == 8 else linear_w4a8, x[:, : self.product.inputs]
        # The weights are widened to floats: of so many channels at once.
        parts = zip(weight.split(4096), scale.split(4096), strict=True)
        y = torch.cat([linear(rows, *part, None) for part in parts], -1)
        return y if bias is None else y + bias


class Golden:
    """What the test bench of a sample program draws, launches and expects.

    Args:
        program: of `sample_program`, on the same design.
    """

    def __init__(self, program: StepProgram, design: Design) -> None:
        self._program, self._design = program, design
        self._outputs = list[Bits]()
        self.launches = list[Launch]()
        self.products = list[DrawnProduct]()
        by_word = {i.weights: self._numpy(i) for i in program.instructions if isinstance(i, (step.Linear, step.Mlp))}
        # Three draws belong to each product: weights, scales, biases. Then come the constants, and the inputs.
        self._constants_draw = 3 * len(self.products)
        if program.whole:
            self._run_step(by_word)
        else:
            self._run_short(by_word)

    @property
    def outputs(self) -> list[int]:
        """The bits of all outputs, launch after launch."""
        return np.concatenate(self._outputs).tolist()

    def _draw(self, first: int, product: Product) -> DrawnProduct:
        self.products.append(DrawnProduct(len(self.products), first, product))
        return self.products[-1]

    def _numpy(self, one: step.Linear | step.Mlp) -> NumpyProduct:
        """Return what a linear or the MLP computes."""
        if isinstance(one, step.Linear):
            linear = self._draw(one.weights, product_of(one, self._design))
            return lambda x: linear(torch.from_numpy(x)).numpy()
        spec = self._design.mlp
        up = self._draw(one.weights, self._design.gate_up)
        down = self._draw(one.weights + self._design.gate_up.port_words, self._design.down)

        def mlp(x: NDArray[Any]) -> NDArray[Any]:
            a = up(torch.from_numpy(x))
            return down(activated(a[:, ::2], spec) * a[:, 1::2] if spec.gated else activated(a, spec)).numpy()

        return mlp

    def _run_step(self, products: dict[int, NumpyProduct]) -> None:
        """Run the first positions of a whole step."""
        sizes, load = self._program.sizes, self._program.instructions[0]
        keys, values = (np.zeros((sizes.ports, n, 16), np.int8) for n in (sizes.key_words, sizes.value_words))
        constants = _drawn_floats(self._constants_draw, FLOATS_PER_WORD * sizes.constant_words)
        memory = Memory(constants, products, keys, values, np.zeros((0, FLOATS_PER_WORD), np.uint32))
        simulator = StepSimulator(self._program, memory)
        assert isinstance(load, step.Load)
        own = sizes.rows // sizes.videos
        for position in range(0, min(POSITIONS * own, sizes.positions - own + 1), own):
            rows = Rows.at(sizes, position, count=own)
            self._keep(0, position, load.count, lambda x, rows=rows: simulator.run(x, rows))

    def _run_short(self, products: dict[int, NumpyProduct]) -> None:
        """Run every short program."""
        for entry, one in enumerate(self._program.instructions):
            if isinstance(one, (step.Linear, step.Mlp)):
                inputs = one.inputs if isinstance(one, step.Linear) else self._design.mlp.hidden
                self._keep(entry, 0, float_words(inputs), products[one.weights])

    def _keep(self, entry: int, position: int, words: int, run: NumpyProduct) -> None:
        rows, draw = self._program.sizes.rows, self._constants_draw + 1 + len(self.launches)
        y = run(_drawn_floats(draw, rows * words * FLOATS_PER_WORD).reshape(rows, -1))
        self.launches.append(Launch(entry, position, words, y.shape[1], sum(map(len, self._outputs))))
        self._outputs.append(np.ascontiguousarray(y).view(np.uint32).reshape(-1))


def activated(x: Tensor, spec: MlpSpec) -> Tensor:
    """Return the activation of an MLP, as the operators define it."""
    if spec.activation in TABLED:
        return x * activation_factor(x, spec.activation)
    positive = torch.relu(x)
    return positive * positive if spec.activation == "relu2" else positive


def _drawn(draw: int, row: Bits | np.uint32, place: Bits) -> Bits:
    """Return pseudo-random bits, a function of a place in a row of a draw."""
    bits: Bits = place * np.uint32(0xC2B2AE3D) + row * np.uint32(0x85EBCA77) + np.uint32(draw * 0x9E3779B1 % (1 << 32))
    bits = (bits ^ bits >> np.uint32(15)) * np.uint32(0x2C1B3C6D)
    bits = (bits ^ bits >> np.uint32(12)) * np.uint32(0x297A2D39)
    return bits ^ bits >> np.uint32(15)


def _drawn_floats(draw: int, count: int) -> NDArray[np.float32]:
    """Return float32 values of magnitude 1/8 to 2."""
    bits = _drawn(draw, np.uint32(0), np.arange(count, dtype=np.uint32))
    return (bits & 0x81FFFFFF | 0x3E000000).view(np.float32)
