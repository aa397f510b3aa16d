"""Designs, random layers and a numpy reference that the HLS and DRS tests share."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastcar_compile.codegen.hls.design import MlpDesign, choose_design
from fastcar_compile.codegen.hls.spec import BoardBudget, MlpSpec

Array = NDArray[Any]


def zcu102(ports: int = 6) -> BoardBudget:
    """The ZCU102's budget, with fewer AXI ports on request."""
    return BoardBudget.of_device(
        "xczu9eg-ffvb1156-2-e",
        250.0,
        lut=274_080,
        ff=548_160,
        dsp=2_520,
        bram36=912,
        uram=0,
        ports=ports,
        bits=128,
    )


def design(hidden: int, intermediate: int, batch: int, cores: int, ports: int = 6, layers: int = 4) -> MlpDesign:
    """A design for these sizes."""
    spec = MlpSpec(hidden=hidden, intermediate=intermediate, batch=batch, layers=layers, cores=cores)
    return choose_design(spec, zcu102(ports))


DESIGNS = {
    "example": design(128, 352, 2, 2),
    "one_port_many_tiles": design(300, 201, 3, 2, ports=3),
    "two_ports_four_cores": design(37, 53, 4, 4, ports=4),
    "eight_ports_one_row": design(21, 70, 1, 1, ports=10),
    "tails": design(72, 200, 2, 1),
    "eight_rows_eight_cores": design(20, 24, 8, 8, ports=3),
}
"""Sizes that are no multiples of words or tiles, one, two, four and eight weight ports, one to eight rows."""


@dataclass(frozen=True)
class Layer:
    """int8 weights and float32 scales of one MLP."""

    gate_q: Array
    gate_s: Array
    up_q: Array
    up_s: Array
    down_q: Array
    down_s: Array

    @classmethod
    def random(cls, hidden: int, intermediate: int, rng: np.random.Generator) -> Layer:
        """Uniform int8 weights; scales over several orders of magnitude."""

        def scales(count: int) -> Array:
            return (10.0 ** rng.uniform(-5, -2, count)).astype(np.float32)

        def weights(rows: int, columns: int) -> Array:
            return rng.integers(-127, 128, (rows, columns)).astype(np.int8)

        return cls(
            weights(intermediate, hidden),
            scales(intermediate),
            weights(intermediate, hidden),
            scales(intermediate),
            weights(hidden, intermediate),
            scales(hidden),
        )

    @cached_property
    def arguments(self) -> tuple[Array, ...]:
        """In the order of pack_mlp."""
        return (self.gate_q, self.gate_s, self.up_q, self.up_s, self.down_q, self.down_s)


@dataclass(frozen=True)
class Result:
    """Outputs and exact sums of one MLP over rows."""

    y: Array
    gate: Array
    up: Array
    down: Array


def reference(x: Array, layer: Layer) -> Result:
    """docs/architecture.md, "w8a8, bit for bit", in numpy; x float32 [B, H]."""
    q, scale = quantize(x)
    gate, up = accumulate(q, layer.gate_q), accumulate(q, layer.up_q)
    g, u = dequantize(gate, scale, layer.gate_s), dequantize(up, scale, layer.up_s)
    a = (g * sigmoid(g)) * u
    q, scale = quantize(a)
    down = accumulate(q, layer.down_q)
    return Result(dequantize(down, scale, layer.down_s), gate, up, down)


def quantize(x: Array) -> tuple[Array, Array]:
    """Steps 1: int8 rows and float32 scale of each."""
    amax = np.maximum(np.abs(x).max(1), np.float32(1e-30))
    inverse = np.float32(127) / amax
    q = np.clip(np.rint(x * inverse[:, None]), -127, 127).astype(np.int8)
    return q, amax * (np.float32(1) / np.float32(127))


def accumulate(q: Array, weights: Array) -> Array:
    """Step 2: exact int32 sums [B, N]."""
    return (q.astype(np.int64) @ weights.astype(np.int64).T).astype(np.int32)


def dequantize(acc: Array, row_scale: Array, channel_scale: Array) -> Array:
    """Step 3."""
    return acc.astype(np.float32) * (row_scale[:, None] * channel_scale)


def sigmoid_table() -> Array:
    """int64 [513]."""
    return np.rint(2.0**24 / (1.0 + np.exp(16.0 - np.arange(513) / 16.0))).astype(np.int64)


def sigmoid(x: Array) -> Array:
    """Table sigmoid of float32 values."""
    fixed = np.rint(np.clip(x, np.float32(-16), np.float32(16)) * np.float32(1024)).astype(np.int64) + 16384
    index = np.minimum(fixed >> 6, 511)
    fraction = fixed - (index << 6)
    table = sigmoid_table()
    knots = (table[index] * (64 - fraction) + table[index + 1] * fraction + 32) >> 6
    return knots.astype(np.float32) * np.float32(2.0**-24)


def assert_same_bits(got: Array, want: Array) -> None:
    """Equal as bit patterns, so -0.0 differs from 0.0."""
    assert got.dtype == want.dtype
    np.testing.assert_array_equal(got.view(np.uint32), want.view(np.uint32))
