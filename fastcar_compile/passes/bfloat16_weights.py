"""bf16: weights of every linear in bfloat16, activations and sums in float32."""

from __future__ import annotations

import torch
from torch import Tensor

from fastcar_compile.config.formats import quant_format
from fastcar_compile.ir.pass_manager import Pass
from fastcar_compile.ir.program import DecoderProgram
from fastcar_compile.ir.rewrite import Edit
from fastcar_compile.passes.patterns.linear_calls import replace_linears

SUFFIX = quant_format("bf16").suffix


def to_bfloat16(weight: Tensor) -> tuple[Tensor]:
    """Return the weight rounded half to even; exact where the value was bfloat16 before."""
    return (weight.to(torch.bfloat16),)


class Bfloat16Weights(Pass):
    """Store the weights of linears as bfloat16, in all graphs.

    1. Matches `linear(x, w, bias)` whose w is a parameter.
    2. Makes `fastcar.linear_bf16(x, w as bfloat16, bias)`. Weights of a bfloat16 checkpoint keep their bits.
    A weight that the graph computes or transposes stays as it is.
    """

    name = "bfloat16-weights"
    reason = "Weights of linears are stored in bfloat16: half the bytes of float32."

    def apply(self, program: DecoderProgram) -> bool:
        """Return whether there was a linear to rewrite."""
        operator, edit = torch.ops.fastcar.linear_bf16.default, Edit(self.name, program.lazy)
        return replace_linears(program.all_graphs(), operator, (SUFFIX,), to_bfloat16, edit)
