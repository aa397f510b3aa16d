"""What a test bench draws for a sample program, and what the kernel has to give. step_testbench.cpp.j2 draws the same."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil, log2, sqrt
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fastcar_compile.artifact.engine import FLOATS_PER_WORD, EngineProduct, MlpSpec, float_words
from fastcar_compile.codegen.hls.control_table.simulator import LayerCall, LayerTrace, recomputes, run_layer
from fastcar_compile.codegen.hls.control_table.table import DrsTable, unpack_network
from fastcar_compile.codegen.hls.design.design import Design
from fastcar_compile.codegen.hls.design.spec import TABLED
from fastcar_compile.codegen.hls.step_program import instructions as step
from fastcar_compile.codegen.hls.step_program import replaying
from fastcar_compile.codegen.hls.step_program.cache_layout import Rows, Sizes
from fastcar_compile.codegen.hls.step_program.program import StepProgram
from fastcar_compile.codegen.hls.step_program.simulator import SimulatedMemory, StepSimulator
from fastcar_compile.codegen.hls.step_sample import product_of, slots_of
from fastcar_compile.gates.learned import unit_exponents
from fastcar_compile.ir.ops.linear import activation_factor, linear_w4a8, linear_w8a8, pack_int4

Bits = NDArray[np.uint32]
NumpyProduct = Callable[[NDArray[Any]], NDArray[Any]]

STEPS = 5
"""Decode forwards that the test bench launches behind one of a prompt: in the third one the gate may choose."""

CANDIDATES = 4
"""Thresholds that are tried at most: rows have to replay, to compute, and to compute because their chain ends."""

SMALL = 10
"""The prompt's input is drawn smaller by 2^SMALL: beside it the epsilon of a norm shows."""


@dataclass(frozen=True)
class Launch:
    """A launch of the test bench; its outputs are in `golden` from this place on, row after row.

    Args:
        draw: number of the input. small: it is drawn smaller by two to the power of this.
        position, step: of the first row of each video; the next rows are behind it. Odd videos are one forward late.
            A step of -1: of a prompt. active: bit b is 1: row b is there.
        decided: digest of the decision: Index Register, scores and chain counts.
        caches, replay: digests of a whole step: keys and values; slots.
    """

    entry: int
    draw: int
    small: int
    position: int
    step: int
    active: int
    input_words: int
    channels: int
    golden: int
    decided: int = 0
    caches: int = 0
    replay: int = 0


@dataclass(frozen=True)
class DrawnProduct:
    """A product of a test bench, whose weights are drawn. `number`: of the product. `first`: word of its weights."""

    number: int
    first: int
    product: EngineProduct

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
        program: of `sample_program`, on the same design. table: the control table of the design.
    """

    def __init__(self, program: StepProgram, design: Design, table: DrsTable) -> None:
        self._program, self._design = program, design
        self._outputs = list[Bits]()
        self.launches = list[Launch]()
        self.free = list[tuple[float, bool, bool]]()
        """Of each row of the launches that the gate may let replay: its score; it replays; its slot replayed before."""
        self.products = list[DrawnProduct]()
        by_word = {i.weights: self._numpy(i) for i in program.instructions if isinstance(i, (step.Linear, step.Mlp))}
        # Three draws belong to each product: weights, scales, biases. Then come the constants, and the inputs.
        self._constants_draw = 3 * len(self.products)
        self.decide = next(
            (i for i in program.instructions if isinstance(i, replaying.Decide | replaying.DecideRows)), None
        )
        self.network_exponent = 0
        self.table = table
        if program.whole:
            self._run_step({at: _remembered(product) for at, product in by_word.items()})
        else:
            self._run_short(by_word)

    @property
    def outputs(self) -> list[int]:
        """The bits of all outputs, launch after launch."""
        return np.concatenate(self._outputs).tolist()

    def _draw(self, first: int, product: EngineProduct) -> DrawnProduct:
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

    def _constants(self) -> NDArray[np.float32]:
        """Return the constants as they are drawn, with the gate's network in the form of `pack_network`."""
        bits = _drawn_floats(self._constants_draw, FLOATS_PER_WORD * self._program.sizes.constant_words).view(np.uint32)
        own = self.decide
        if own is not None and own.units:
            words = bits.reshape(-1, FLOATS_PER_WORD)[own.extent("network", self._program.sizes)]
            words[0] = own.units, 0, 0, 0
            units = words[1:].reshape(own.units, -1, FLOATS_PER_WORD)
            # Two bfloat16 of magnitude 2^-7 to 2^-3 to a lane; what is drawn of a unit's head are its bias and weight.
            units[:, 1:] = units[:, 1:] & 0x81FF81FF | 0x3C003C00
            weights = unpack_network(words, FLOATS_PER_WORD * own.count)[0]
            self.network_exponent = int(unit_exponents(weights).max())
            units[:, 0, 2:] = self.network_exponent & 0xFFFFFFFF, 0
        return bits.view(np.float32)

    def _run_step(self, products: dict[int, NumpyProduct]) -> None:
        """Run a prompt and decode forwards, by a threshold by which some rows replay and others compute."""
        sizes, constants = self._program.sizes, self._constants()

        def run(threshold: float) -> None:
            keys, values = np.split(self._sections(), [sizes.key_words], 1)
            replay = np.zeros((sizes.replay_words, FLOATS_PER_WORD), np.uint32)
            self.table = self._bench_table(threshold)
            memory = SimulatedMemory(constants, products, keys, values, replay, self.table.to_bytes())
            self._run_launches(StepSimulator(self._program, memory))

        # Scores may depend on what was replayed before: so candidates from the middle on are tried, and the best one stays.
        run(np.inf)
        scores = sorted(score for score, *_ in self.free)
        found = list[tuple[int, float]]()
        for threshold in sorted(scores, key=lambda score: abs(scores.index(score) - len(scores) // 2))[:CANDIDATES]:
            run(threshold)
            limited = any(score >= threshold and chained and not replays for score, replays, chained in self.free)
            found.append((len({replays for _, replays, _ in self.free}) + limited, threshold))
            if found[-1][0] == (3 if self.table.max_chain else 2):
                return
        if found:
            run(max(found)[1])

    def _bench_table(self, threshold: float) -> DrsTable:
        """Return a table of the same sizes for the few forwards of the test bench."""
        slots, own = slots_of(self._program), self.table
        return replace(
            own.with_thresholds([threshold] * own.layers),
            tokens_per_frame=slots,
            refresh_period=2 * slots if own.refresh_period else 0,
            max_chain=1 if own.max_chain else None,
        )

    def _sections(self) -> NDArray[np.int8]:
        """Return small keys and values of every position, int8 [ports, key_words + value_words, 16]."""
        sizes, axi_words = self._program.sizes, self._design.axi_words
        beats = (sizes.ports // axi_words, sizes.key_words + sizes.value_words, axi_words, 16)
        lanes = np.arange(np.prod(beats) // 4, dtype=np.uint32)
        drawn = (_drawn(self._constants_draw, np.uint32(1), lanes) | 0xF8F8F8F8).view(np.int8).reshape(beats)
        # Ports that share an AXI port are interleaved word by word.
        return drawn.swapaxes(1, 2).reshape(sizes.ports, -1, 16)

    def _run_launches(self, simulator: StepSimulator) -> None:
        """Run all launches."""
        self.launches, self._outputs, self.free, self._replayed = [], [], [], set[tuple[int, int]]()
        sizes, load = self._program.sizes, self._program.instructions[0]
        assert isinstance(load, step.Load)
        own = sizes.rows // sizes.videos
        ends = [i.sinks + i.ring for i in self._program.instructions if isinstance(i, step.Attend)]
        # A video's only row goes around the end of the ring; several rows reach the last position.
        first = max(own, ends[0] - STEPS // 2 if own == 1 else sizes.positions - STEPS * own)
        staged = np.zeros(sizes.rows, np.int64)
        for number in range(1 + STEPS):
            position, forward = (first + (number - 1) * own, (number - 1) * own) if number else (0, -1)
            active = (1 << sizes.rows) - 1 >> (number == 1 and sizes.rows > 1)
            rows = replace(_rows(sizes, position, forward, active), before=staged)
            staged = np.where(rows.deciding, rows.step + 1, 0) if sizes.staged else staged
            launch = Launch(0, number, 0 if number else SMALL, position, forward, active, load.count, 0, 0)
            self._keep(launch, lambda x, rows=rows: simulator.run(x, rows))
            self._keep_memory(simulator, rows)

    def _keep_memory(self, simulator: StepSimulator, rows: Rows) -> None:
        """Keep the digests behind a launch, and what the gate was free to decide."""
        memory, axi_words, decided = simulator.memory, self._design.axi_words, list[int]()
        slots = slots_of(self._program)
        for trace in simulator.traces.values() if rows.deciding.any() else ():
            decided += _words_of(trace, rows)
            free = np.flatnonzero(rows.deciding & ~recomputes(self.table, rows.step)).tolist()
            for b in free:
                slot, replays = (int(rows.video[b]), rows.step[b] % slots), not trace.index_register >> b & 1
                self.free.append((trace.scores[b], replays, slot in self._replayed))
                self._replayed ^= {slot} if replays != (slot in self._replayed) else set()
        sections = np.concatenate([memory.keys, memory.values], 1)
        beats = sections.reshape(-1, axi_words, *sections.shape[1:]).swapaxes(1, 2)
        register = digest(np.array(decided, np.uint32))
        made = {"decided": register, "caches": digest(beats), "replay": digest(memory.replay)}
        self.launches[-1] = replace(self.launches[-1], **made)

    def _run_short(self, products: dict[int, NumpyProduct]) -> None:
        """Run every short program, for patterns of the rows that compute."""
        rows = self._program.sizes.rows
        for entry, one in enumerate(self._program.instructions):
            if isinstance(one, replaying.DecideRows):
                self._run_decision(entry, one)
            if isinstance(one, (step.Linear, step.Mlp)):
                inputs = one.inputs if isinstance(one, step.Linear) else self._design.mlp.hidden
                launch = Launch(entry, len(self._outputs), 0, 0, -1, (1 << rows) - 1, float_words(inputs), 0, 0)
                self._keep(launch, products[one.weights])
                others = (0x55555555, 1 << rows - 1, 0)
                self.launches += [replace(self.launches[-1], active=active) for active in others]

    def _run_decision(self, entry: int, decide: replaying.DecideRows) -> None:
        """Decide about drawn operands, by the middle one of their scores."""
        sizes, forward = self._program.sizes, 2 * slots_of(self._program) - 1
        words, rows = decide.query_words + decide.key_words, _rows(sizes, 0, forward, (1 << sizes.rows) - 1)
        constants = self._constants().reshape(-1, FLOATS_PER_WORD)
        operands = _drawn_floats(self._constants_draw + 1, words * FLOATS_PER_WORD).reshape(-1, FLOATS_PER_WORD)
        network = constants[decide.extent("network", sizes)] if decide.units else None
        query, key = np.split(operands, [decide.query_words])
        call = LayerCall(decide.layer, rows.step, query, key, rows.before, network)
        scores = run_layer(self._bench_table(np.inf), call).scores
        self.table = self._bench_table(sorted(scores)[len(scores) // 2])
        decided = digest(np.array(_words_of(run_layer(self.table, call), rows), np.uint32))
        all_rows, row_words = (1 << sizes.rows) - 1, words // sizes.rows
        self.launches.append(Launch(entry, 0, 0, 0, forward, all_rows, row_words, 0, 0, decided))

    def _keep(self, launch: Launch, run: NumpyProduct) -> None:
        rows, draw = self._program.sizes.rows, self._constants_draw + 1 + launch.draw
        x = _drawn_floats(draw, rows * launch.input_words * FLOATS_PER_WORD) * np.float32(2.0**-launch.small)
        y = run(x.reshape(rows, -1))
        self.launches.append(replace(launch, channels=y.shape[1], golden=sum(map(len, self._outputs))))
        self._outputs.append(np.ascontiguousarray(y).view(np.uint32).reshape(-1))


def _rows(sizes: Sizes, position: int, forward: int, active: int) -> Rows:
    """Return the rows of a launch, as `Launch` says."""
    own, rows = sizes.rows // sizes.videos, np.arange(sizes.rows)
    steps = np.maximum(forward + rows % own - rows // own % 2, -1) if forward >= 0 else np.full(len(rows), -1)
    return replace(Rows.at(sizes, position, active=active, count=own), step=steps)


def _words_of(trace: LayerTrace, rows: Rows) -> list[int]:
    """Return the Index Register of a decision, then score and chain count of each row that is decided."""
    scores, chain = np.array(trace.scores, np.float32), np.array(trace.chain, np.uint32)
    own = np.stack([scores.view(np.uint32), chain], 1)[rows.deciding]
    return [trace.index_register, *own.reshape(-1).tolist()]


def _remembered(product: NumpyProduct) -> NumpyProduct:
    """Return the same product, which multiplies equal rows once."""
    known: dict[bytes, NDArray[Any]] = {}

    def remembered(x: NDArray[Any]) -> NDArray[Any]:
        key = x.tobytes()
        if key not in known:
            known[key] = product(x)
        return known[key]

    return remembered


def digest(memory: NDArray[Any]) -> int:
    """Return 32 bits that stand for the words of a memory: a sum over those that are not zero."""
    words = np.ascontiguousarray(memory).view(np.uint32).reshape(-1)
    places = np.flatnonzero(words).astype(np.uint32)
    return int(_drawn(0, words[places], places).sum(dtype=np.uint32))


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
