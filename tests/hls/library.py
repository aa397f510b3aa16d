"""Designs, random layers and linears, and a numpy reference that the HLS and DRS tests share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fastcar_compile.artifact.engine import BoardBudget, EngineProduct, MlpSpec
from fastcar_compile.codegen.hls.design.design import Design
from fastcar_compile.codegen.hls.design.exploration import budget_of, designs
from fastcar_compile.codegen.hls.design.spec import DraftSpec, LinearSpec
from fastcar_compile.codegen.hls.packing import LinearWeights, pack_linear
from fastcar_compile.codegen.hls.step_golden import activated
from fastcar_compile.config.targets import load_target
from fastcar_compile.ir.ops.linear import linear_w4a8, linear_w8a8, pack_int4

Array = NDArray[Any]


def zcu102(ports: int = 6, axi_bits: int = 128) -> BoardBudget:
    """The ZCU102's budget, with another number or width of AXI ports on request."""
    return replace(budget_of(load_target("zcu102")), axi_ports=ports, axi_bits=axi_bits)


def best(found: Iterable[Design]) -> Design:
    """Of the designs that fit, the one with the most ports and the fewest clocks."""
    return min((d for d in found if not d.excess()), key=lambda d: (-d.ports, d.step_cycles()))


def design(
    hidden: int,
    intermediate: int,
    batch: int,
    cores: int,
    ports: int = 6,
    layers: int = 4,
    axi_bits: int = 128,
    linears: Sequence[tuple[str, int, int, bool]] = (),
    drafts: Sequence[DraftSpec] = (),
    **kind: Any,
) -> Design:
    """A design for these sizes; `linears` are (name, inputs, channels, biased), `kind` further fields of MlpSpec."""
    spec = MlpSpec(hidden=hidden, intermediate=intermediate, batch=batch, layers=layers, cores=cores, **kind)
    return best(designs(spec, zcu102(ports, axi_bits), [LinearSpec(*linear) for linear in linears], drafts))


EXAMPLE = (
    *(item for i in range(4) for item in ((f"layer_{i}.qkv", 128, 384, False), (f"layer_{i}.o", 128, 128, False))),
    ("head", 128, 17, False),
)
PLAIN_INT4 = {"activation": "gelu", "gated": False, "quant": "w4a8", "up_bias": True, "down_bias": True}
DESIGNS = {
    "example": design(128, 352, 2, 2),
    "one_port_many_tiles": design(300, 201, 3, 2, ports=3),
    "two_ports_four_cores": design(37, 53, 4, 4, ports=4, quant="w4a8"),
    "eight_ports_one_row": design(21, 70, 1, 1, ports=10),
    "three_ports_in_pairs": design(300, 77, 6, 4, ports=5, axi_bits=256, quant="w4a8"),
    "tails": design(72, 200, 2, 1, activation="gelu_tanh", gated=False, up_bias=True, down_bias=True),
    "eight_rows_eight_cores": design(20, 24, 8, 8, ports=3),
    "int4": design(300, 201, 5, 1, ports=4, quant="w4a8", activation="gelu", up_bias=True, down_bias=True),
    "linears": design(37, 53, 5, 3, ports=4, linears=(("qkv", 300, 70, True), ("o", 21, 1000, False))),
    "linears_int4": design(20, 140, 2, 1, ports=3, linears=(("qkv", 600, 33, False), ("o", 5, 9, True)), **PLAIN_INT4),
}
"""Sizes that are no multiples of words, groups or tiles; one to eight weight ports, also two on an AXI port; one to
eight rows, in one pass and in several; both quantisations; gated and plain; MLPs alone and with linears."""

OFTEN = ("example", "linears_int4", "tails", "three_ports_in_pairs")
"""Designs of a default run: both quantisations, gated and plain, ports in pairs, one pass and several, with linears."""

LINEARS = [name for name, made in DESIGNS.items() if made.linears]


def random_layer(spec: MlpSpec, rng: np.random.Generator) -> list[LinearWeights]:
    """Uniform weights; scales over several orders of magnitude; in the order of pack_mlp."""
    up = (spec.intermediate, spec.hidden, spec.up_bias)
    first = [random_linear(spec, *up, rng) for _ in range(2 if spec.gated else 1)]
    return [*first, random_linear(spec, spec.hidden, spec.intermediate, spec.down_bias, rng)]


def random_linear(spec: MlpSpec, channels: int, inputs: int, bias: bool, rng: np.random.Generator) -> LinearWeights:
    """One linear in the quantisation of `spec`."""
    biases = rng.normal(size=channels).astype(np.float32) if bias else None
    if spec.weight_bits == 8:
        values = rng.integers(-127, 128, (channels, inputs)).astype(np.int8)
        return LinearWeights(values, (10.0 ** rng.uniform(-5, -2, channels)).astype(np.float32), biases)
    groups = -(-inputs // 128)
    values = np.zeros((channels, 128 * groups), np.int8)
    values[:, :inputs] = rng.integers(-7, 8, (channels, inputs))
    scales = np.exp2(rng.uniform(-14, -1, (channels, groups))).astype(np.float16)
    return LinearWeights(values, scales, biases)


def reference(x: Array, layer: Sequence[LinearWeights], spec: MlpSpec) -> Array:
    """The MLP of docs/reference/numerics.md; x float32 [B, H]."""
    *first, down = layer
    values = [linear(x, weights, spec) for weights in first]
    a = activated(torch.tensor(values[0]), spec).numpy()
    return linear(a * values[1] if spec.gated else a, down, spec)


def linear(x: Array, weights: LinearWeights, spec: MlpSpec) -> Array:
    """One linear, by the operators that define it."""
    values, scales = torch.tensor(weights.values), torch.tensor(weights.scales)
    if spec.weight_bits == 8:
        y = linear_w8a8(torch.tensor(x), values, scales, None)
    else:
        y = linear_w4a8(torch.tensor(x), values if values.dtype == torch.uint8 else pack_int4(values), scales, None)
    return (y if weights.bias is None else y + torch.tensor(weights.bias)).numpy()


@dataclass(frozen=True)
class Linear:
    """Random weights of one call, and its product on an engine."""

    product: EngineProduct
    spec: MlpSpec
    weights: LinearWeights
    axi_words: int

    @classmethod
    def random(cls, made: Design, product: EngineProduct, rng: np.random.Generator) -> Linear:
        """Uniform weights; scales over several orders of magnitude."""
        weights = random_linear(made.mlp, product.channels, product.inputs, product.bias, rng)
        return cls(product, made.mlp, weights, made.axi_words)

    @property
    def stream(self) -> Array:
        """The packed weight stream."""
        return pack_linear([self.weights], self.product, self.axi_words)

    def reference(self, x: Array) -> Array:
        """docs/reference/numerics.md, "bit for bit", in numpy; x float32 [B, K]."""
        return linear(x, self.weights, self.spec)


def assert_same_bits(got: Array, want: Array) -> None:
    """Equal as bit patterns, so -0.0 differs from 0.0."""
    assert got.dtype == want.dtype
    np.testing.assert_array_equal(got.view(np.uint32), want.view(np.uint32))
