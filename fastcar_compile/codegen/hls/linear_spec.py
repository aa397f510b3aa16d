"""What the engine computes besides the MLPs: the linears of the decode step."""

from __future__ import annotations

from dataclasses import dataclass

from fastcar_compile.codegen.hls.spec import MlpSpec
from fastcar_compile.errors import CompileError

MOST_INPUTS = 1 << 16
"""127 * 127 * 65536 < 2^31: the sums stay int32."""
MOST_CHANNELS = 1 << 18
"""MOST_CHANNELS of fastcar_engine_core.hpp: word counts of a call stay int32."""


@dataclass(frozen=True)
class LinearSpec:
    """One call: y[B, channels] = linear(x[B, inputs]) of int8 weights.

    Args:
        name: of the call and of its weight stream, such as `layer_0.qkv`.
        inputs: K. channels: N, of all linears of the call together.
        biased: whether there is a bias.
    """

    name: str
    inputs: int
    channels: int
    biased: bool = False


@dataclass(frozen=True)
class EngineSpec:
    """Everything that one engine has to compute.

    Args:
        mlp: the decoder's MLPs; also batch and cores.
        linears: the other matrix products of a forward, in call order.
    """

    mlp: MlpSpec
    linears: tuple[LinearSpec, ...]

    def check(self) -> None:
        """Raises CompileError naming every linear that the engine cannot compute."""
        self.mlp.check()
        wrong = [
            f"{linear.name} is {linear.inputs} -> {linear.channels}"
            for linear in self.linears
            if not (1 <= linear.inputs <= MOST_INPUTS and 1 <= linear.channels <= MOST_CHANNELS)
        ]
        if wrong:
            raise CompileError(
                f"the engine has at most {MOST_INPUTS} inputs and {MOST_CHANNELS} channels: {'; '.join(wrong)}",
                hint="compile with offload='mlp'",
            )
