"""A small decoder whole by its step program: C simulation, the simulator bit for bit, and plain floats."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from fastcar_compile.codegen.hls.controller_project import limits_of
from fastcar_compile.codegen.hls.render import render
from fastcar_compile.drs.table import Status as TableStatus
from fastcar_compile.step.instructions import Attend, Instruction, Linear, Mlp
from fastcar_compile.step.program import Status, StepProgram
from fastcar_compile.step.simulator import NO_STEP, StepSimulator
from step.conftest import Build, Cores
from step.decoder import HIDDEN, LAYERS, NORMED, ROTATED, ROWS, VOCAB, Decoder, cached, decoder
from step.values import Array, assert_same

DECODERS = {
    "w8a8": decoder(ROTATED, "w8a8", (True, True), max_chain=None),
    "w4a8": decoder(NORMED, "w4a8", (True, False), max_chain=2),
}
PROMPT = 4


@pytest.fixture
def engine(csim_tools: None, build_cores: Build, quant: str) -> Cores:
    """The engine of a decoder's design."""
    made = DECODERS[quant]
    config = render("fastcar_config.hpp", design=made.made)
    control = render("fastcar_drs_config.hpp", limits=limits_of(made.table))
    return build_cores("engine", (("fastcar_config.hpp", config), ("fastcar_drs_config.hpp", control)))


def loaded(engine: Cores, name: str, data: bytes) -> int:
    """What the engine answers to a program or a control table."""
    words = np.frombuffer(data + bytes(-len(data) % 16), np.uint8)
    return int(engine(name, words, len(data))[-1])


@pytest.mark.parametrize("quant", DECODERS)
def test_a_decoder_decodes_alike(engine: Cores, quant: str) -> None:
    """Outputs, caches and decisions of a prompt and 42 forwards, past the end of the RoPE table and around the ring."""
    made, rng = DECODERS[quant], np.random.default_rng(5)
    program = made.program
    simulator = StepSimulator(program, made.memory())
    assert loaded(engine, "load", program.to_bytes()) == Status.OK
    assert loaded(engine, "load_table", made.table.to_bytes()) == TableStatus.OK
    memory, decisions = made.memory(), list[bool]()
    keys, values, replay = memory.keys, memory.values, memory.replay
    for position in range(46):
        x = (rng.normal(size=(ROWS, HIDDEN)) * 10.0 ** rng.uniform(-1, 1)).astype(np.float32)
        decode_step = position - PROMPT if position >= PROMPT else NO_STEP
        want = simulator.run(x, position, decode_step)
        output = np.zeros((ROWS, -(-VOCAB // 4) * 4), np.float32)
        given = (made.constants, made.stream, keys, values, x, output, replay)
        _, _, keys, values, _, got, replay, done = engine("run", *given, position, decode_step)
        assert done == 1
        assert_same(got[:, :VOCAB], want)
        np.testing.assert_array_equal(keys, simulator.memory.keys)
        np.testing.assert_array_equal(values, simulator.memory.values)
        np.testing.assert_array_equal(replay, simulator.memory.replay)
        decisions += [bool(row) for rows in simulator.decided.values() for row in rows]
    assert 0.2 < np.mean(decisions) < 0.9


def test_the_simulator_follows_plain_floats() -> None:
    """Float64 with the same weights and no rounding of activations, keys and values."""
    made, rng = DECODERS["w8a8"], np.random.default_rng(6)
    simulator, plain = StepSimulator(made.program, made.memory()), PlainDecoder(made)
    for position in range(12):
        x = rng.normal(size=(ROWS, HIDDEN)).astype(np.float32)
        got, want = simulator.run(x, position), plain.run(x, position)
        assert np.abs(got - want).max() < 0.05 * np.abs(want).max(), position
    keys, values = cached(simulator.memory, made.program, ROTATED.head_dim, number=3)
    for rows in (keys, values):
        assert rows[:12].any(1).all()
        assert not rows[12:].any()


class PlainDecoder:
    """The decoder of ROTATED in float64, written without its step program; the constants lie as the builder says."""

    def __init__(self, made: Decoder) -> None:
        places = [i for i in made.program.instructions if isinstance(i, Linear | Mlp)]
        self._weights = [
            [p.values * p.scales[:, None].astype(np.float64) for p in made.weights[i.weights]] for i in places
        ]
        biases = [made.weights[i.weights][0].bias for i in places]
        self._bias = [np.zeros(1) if bias is None else bias.astype(np.float64) for bias in biases]
        self._norms = made.constants[: (2 * LAYERS + 1) * HIDDEN].astype(np.float64).reshape(-1, HIDDEN)
        self._table = made.constants[(2 * LAYERS + 1) * HIDDEN :].astype(np.float64).reshape(-1, ROTATED.rotary)
        self._cache: list[list[tuple[Array, Array]]] = [[] for _ in range(LAYERS)]

    def run(self, x: Array, position: int) -> Array:
        """Return the logits of one step."""
        x = x.astype(np.float64)
        for layer in range(LAYERS):
            (qkv,), (o,), (gate, up, down) = self._weights[3 * layer : 3 * layer + 3]
            x = (
                x
                + self._attention(layer, self._normed(x, 2 * layer) @ qkv.T, position) @ o.T
                + self._bias[3 * layer + 1]
            )
            y = self._normed(x, 2 * layer + 1)
            g = y @ gate.T
            x = x + (g / (1 + np.exp(-g)) * (y @ up.T)) @ down.T
        return self._normed(x, 2 * LAYERS) @ self._weights[-1][0].T

    def _normed(self, x: Array, number: int) -> Array:
        return x / np.sqrt((x * x).mean(1, keepdims=True) + 1e-5) * self._norms[number]

    def _turned(self, heads: Array, position: int) -> Array:
        half = ROTATED.rotary // 2
        cosine, sine = np.split(self._table[position], 2)
        low, high = heads[..., :half], heads[..., half:]
        return np.concatenate([low * cosine - high * sine, high * cosine + low * sine], -1)

    def _attention(self, layer: int, qkv: Array, position: int) -> Array:
        heads = qkv.reshape(ROWS, -1, ROTATED.head_dim)
        query, key, value = np.split(heads, [4, 6], 1)
        self._cache[layer].append((self._turned(key, position), value))
        keys, values = (np.stack(part, 2).repeat(2, 1) for part in zip(*self._cache[layer], strict=True))
        logits = np.einsum("bhd,bhsd->bhs", self._turned(query, position), keys) / 8
        weights = np.exp(logits - logits.max(-1, keepdims=True))
        return np.einsum("bhs,bhsd->bhd", weights / weights.sum(-1, keepdims=True), values).reshape(ROWS, -1)


@pytest.mark.parametrize("quant", ["w8a8"])
def test_what_the_engine_does_not_hold_is_refused(engine: Cores, quant: str) -> None:
    """Sizes beyond its own; blocks of a head, and weights that end behind their section."""
    made = DECODERS[quant]
    program, memory = made.program, made.memory()

    def load(changed: StepProgram) -> int:
        return loaded(engine, "load", changed.to_bytes())

    for sizes in ({"ports": 3}, {"row_words": 161}):
        assert load(replace(program, sizes=replace(program.sizes, **sizes))) == Status.BAD_HEADER
    x, output = np.zeros((ROWS, HIDDEN), np.float32), np.zeros((ROWS, 20), np.float32)
    given = (made.constants, made.stream, memory.keys, memory.values, x, output, memory.replay)
    assert engine("run", *given, 0, NO_STEP)[-1] == 0
    kind: type[Instruction]
    last = program.sizes.weight_words - 1
    for kind, changes in (
        (Linear, {"weights": last}),
        (Mlp, {"weights": last}),
        (Attend, {"heads": 2, "key_heads": 2}),
    ):
        listed = tuple(replace(i, **changes) if isinstance(i, kind) else i for i in program.instructions)
        assert load(replace(program, instructions=listed)) == Status.OK
        assert engine("run", *given, 0, NO_STEP)[-1] == 0
    assert load(program) == Status.OK
    assert engine("run", *given, 0, NO_STEP)[-1] == 1
    assert loaded(engine, "load_table", b"no table") == TableStatus.TOO_SHORT
    assert engine("run", *given, 1, 0)[-1] == 0
