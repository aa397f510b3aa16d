"""Root-mean-square norms get the one spelling that backends, exact numerics and the accelerator are tested with."""

from collections import Counter

import torch
from torch import fx

from fastcar_compile.ir.dataflow import between, evaluate
from fastcar_compile.ir.pass_manager import Pass
from fastcar_compile.ir.program import DecoderProgram
from fastcar_compile.ir.query import shape_of
from fastcar_compile.ir.rewrite import attribute, before, replace, rewrite_each
from fastcar_compile.passes.patterns.norms import rms_norm

aten = torch.ops.aten

_SPELLING = Counter((aten.pow, aten.mean, aten.add, aten.rsqrt, aten.mul, aten.mul))


class LegalizeNorms(Pass):
    """Write every root-mean-square norm with the same operators, in all graphs.

    1. Matches `aten.rms_norm`, and the product of float32 x, (mean(x^2, last axis) + epsilon)^-1/2 and a weight, if
       there is one, in any order, by mul, div, sqrt, rsqrt, reciprocal and pow. The mean may be a sum over K.
    2. Makes `x * rsqrt(mean(x^2) + epsilon) * weight`, with a weight [K], of ones where there is none.
    The order of operations may differ from the model's, so results differ by float32 rounding. A norm with a cast to
    another type inside stays as it is.
    """

    name = "legalize-norms"
    reason = "A root-mean-square norm is written with the same operators in every model, so that later passes know it."

    def apply(self, program: DecoderProgram) -> bool:
        """Return whether a norm had other operators."""
        return rewrite_each(program.all_graphs(), _is_other, _rewrite)


def _is_other(node: fx.Node) -> bool:
    """Return whether the node is a norm with other operators between x and itself than `_SPELLING`."""
    if (norm := rms_norm(node)) is None:
        return False
    if norm[1] is None or len(shape_of(norm[1])) > 1:
        return True
    return Counter(getattr(n.target, "overloadpacket", None) for n in between(norm[0], node)[1:]) != _SPELLING


def _rewrite(module: fx.GraphModule, node: fx.Node) -> None:
    norm = rms_norm(node)
    assert norm is not None
    x, weight, epsilon = norm
    with before(node, LegalizeNorms.name) as emit:
        width = shape_of(x)[-1]
        if weight is None:
            weight = attribute(module, f"no_weight_{width}", torch.ones(width), node, LegalizeNorms.name)
        elif len(shape_of(weight)) > 1:
            # It follows from parameters alone. Later passes read the weight of a norm as a parameter.
            value = evaluate(module, weight, {})
            assert value is not None
            weight = attribute(module, f"{weight.name}_row", value.reshape(width), node, LegalizeNorms.name)
        mean = emit(aten.mean.dim, emit(aten.pow.Tensor_Scalar, x, 2), [-1], True)
        inverse = emit(aten.rsqrt.default, emit(aten.add.Tensor, mean, epsilon))
        new = emit(aten.mul.Tensor, emit(aten.mul.Tensor, x, inverse), weight)
    replace(node, new)
