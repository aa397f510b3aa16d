"""Engines and random linears that the tests of the linears share."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fastcar_compile.codegen.hls.engine_design import EngineDesign, LinearStage, choose_engine
from fastcar_compile.codegen.hls.linear_spec import EngineSpec, LinearSpec
from fastcar_compile.codegen.hls.linear_weights import pack_linear
from fastcar_compile.codegen.hls.spec import MlpSpec
from fastcar_compile.codegen.hls.weights import LinearWeights
from hls.library import Array, linear, random_linear, zcu102


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
    "int4_one_port": engine(
        MlpSpec(
            hidden=20, intermediate=140, batch=2, layers=1, cores=1, activation="gelu", gated=False, quant="w4a8",
            up_bias=True, down_bias=True,
        ),
        ("qkv", 600, 33, False), ("o", 5, 9, True), ports=3,
    ),
}  # fmt: skip
"""Four, two and one weight ports; one and two rows per core; both quantisations; sizes that are no multiples of words,
groups or tiles."""


@dataclass(frozen=True)
class Linear:
    """Random weights of one call, and its product on an engine."""

    stage: LinearStage
    spec: MlpSpec
    weights: LinearWeights

    @classmethod
    def random(cls, design: EngineDesign, stage: LinearStage, rng: np.random.Generator) -> Linear:
        """Uniform weights; scales over several orders of magnitude."""
        spec = design.mlp.spec
        return cls(stage, spec, random_linear(spec, stage.channels, stage.inputs, stage.bias, rng))

    @property
    def stream(self) -> Array:
        """The packed weight stream."""
        return pack_linear([self.weights], self.stage)

    def sums(self, x: Array) -> Array:
        """Exact int32 sums [B, N], for w4a8 [B, N, groups]."""
        return linear(x, self.weights, self.spec)[0]

    def reference(self, x: Array) -> Array:
        """docs/reference/numerics.md, in numpy; x float32 [B, K]."""
        return linear(x, self.weights, self.spec)[1]
