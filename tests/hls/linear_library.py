"""Engines and random linears that the tests of the linears share."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fastcar_compile.codegen.hls.engine_design import EngineDesign, LinearStage, choose_engine
from fastcar_compile.codegen.hls.linear_spec import EngineSpec, LinearSpec
from fastcar_compile.codegen.hls.linear_weights import pack_linear
from fastcar_compile.codegen.hls.spec import MlpSpec
from hls.library import Array, accumulate, dequantize, quantize, zcu102


def engine(mlp: MlpSpec, *linears: tuple[str, int, int, bool], ports: int = 6) -> EngineDesign:
    """The engine for an MLP and (name, inputs, channels, biased) each."""
    return choose_engine(EngineSpec(mlp, tuple(LinearSpec(*linear) for linear in linears)), zcu102(ports))


EXAMPLE = (
    *(item for i in range(4) for item in ((f"layer_{i}.qkv", 128, 384, False), (f"layer_{i}.o", 128, 128, False))),
    ("head", 128, 17, False),
)
ENGINES = {
    "example": engine(MlpSpec(hidden=128, intermediate=352, batch=2, layers=4, cores=2), *EXAMPLE),
    "two_rows_per_core": engine(
        MlpSpec(hidden=37, intermediate=53, batch=5, layers=1, cores=3),
        ("qkv", 300, 70, True), ("o", 21, 1000, False), ports=4,
    ),
    "one_port": engine(
        MlpSpec(hidden=20, intermediate=24, batch=2, layers=1, cores=1), ("qkv", 600, 33, False), ("o", 5, 9, True),
        ports=3,
    ),
}  # fmt: skip
"""Four, two and one weight ports; one and two rows per core; sizes that are no multiples of words or tiles."""


@dataclass(frozen=True)
class Linear:
    """int8 weights, float32 scales and bias of one call, and its product on an engine."""

    stage: LinearStage
    weight: Array
    scale: Array
    bias: Array | None

    @classmethod
    def random(cls, stage: LinearStage, rng: np.random.Generator) -> Linear:
        """Uniform int8 weights; scales over several orders of magnitude."""
        weight = rng.integers(-127, 128, (stage.channels, stage.inputs)).astype(np.int8)
        scale = (10.0 ** rng.uniform(-5, -2, stage.channels)).astype(np.float32)
        bias = rng.normal(size=stage.channels).astype(np.float32) if stage.biased else None
        return cls(stage, weight, scale, bias)

    @property
    def stream(self) -> Array:
        """The packed weight stream."""
        return pack_linear([(self.weight, self.scale, self.bias)], self.stage)

    def sums(self, x: Array) -> Array:
        """Exact int32 sums [B, N]."""
        return accumulate(quantize(x)[0], self.weight)

    def reference(self, x: Array) -> Array:
        """docs/architecture.md, "w8a8, bit for bit", in numpy; x float32 [B, K]."""
        y = dequantize(self.sums(x), quantize(x)[1], self.scale)
        return y if self.bias is None else y + self.bias
