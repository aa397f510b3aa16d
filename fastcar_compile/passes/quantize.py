"""w8a8 and w4a8: every linear becomes an integer one, activations go through tables (docs/reference/numerics.md)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, fx

from fastcar_compile.config.formats import quant_format
from fastcar_compile.ir.ops.linear import FACTORS, quantize_weight, quantize_weight_int4
from fastcar_compile.ir.pass_manager import Pass
from fastcar_compile.ir.program import DecoderProgram
from fastcar_compile.ir.query import activation_of, node_arg
from fastcar_compile.ir.rewrite import Edit, before, replace_call, rewrite_each
from fastcar_compile.passes.patterns.linear_calls import replace_linears

aten, fastcar = torch.ops.aten, torch.ops.fastcar


class _Quantize(Pass):
    """Quantise the linears of both graphs, by the format that `name` ends in.

    1. `linear(x, w, bias)` whose w is a parameter becomes the integer linear of the format.
    2. `act(x)` becomes `x * activation_factor(x, act)`, for the activations that have a table.
    A weight that the graph computes or transposes stays as it is.

    Attributes:
        quantize: float32 [N, K] -> (integers, scales).
        linear: the operator (x, integers, scales, bias) -> y.
    """

    quantize: ClassVar[Callable[[Tensor], tuple[Tensor, Tensor]]]
    linear: ClassVar[Any]

    def apply(self, program: DecoderProgram) -> bool:
        """Return whether there was a linear or an activation to rewrite."""
        kind = quant_format(self.name.removeprefix("quantize-"))
        edit, parts = Edit(self.name, program.lazy), (kind.suffix, "scale")
        linears = replace_linears(program.graphs(), self.linear, parts, type(self).quantize, edit)
        return rewrite_each(program.graphs(), _has_table, self._through_table) | linears

    def _through_table(self, _module: fx.GraphModule, node: fx.Node) -> None:
        x = node_arg(node, 0)
        with before(node, self.name) as emit:
            factor = emit(fastcar.activation_factor.default, x, activation_of(node))
        replace_call(node, self.name, aten.mul.Tensor, x, factor)


def _has_table(node: fx.Node) -> bool:
    # ReLU has no table: it rounds nothing.
    return activation_of(node) in FACTORS


class QuantizeW8A8(_Quantize):
    """Quantise to symmetric int8 weights per output channel, with dynamic int8 activations per row."""

    name = "quantize-w8a8"
    reason = "Weights become int8 with one scale per output channel, inputs int8 with one scale per row."
    quantize = staticmethod(quantize_weight)
    linear = fastcar.linear_w8a8.default


class QuantizeW4A8(_Quantize):
    """Quantise to symmetric int4 weights in groups of 128 inputs, with dynamic int8 activations per row."""

    name = "quantize-w4a8"
    reason = "Weights become int4 with one scale per group, inputs int8 with one scale per row."
    quantize = staticmethod(quantize_weight_int4)
    linear = fastcar.linear_w4a8.default
