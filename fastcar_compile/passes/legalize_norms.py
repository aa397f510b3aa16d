"""Norms get the one spelling that backends, exact numerics and the accelerator are tested with."""

from collections import Counter

import torch
from torch import fx

from fastcar_compile.ir.dataflow import between, evaluate
from fastcar_compile.ir.pass_manager import Pass
from fastcar_compile.ir.program import DecoderProgram
from fastcar_compile.ir.query import shape_of
from fastcar_compile.ir.rewrite import Inserter, attribute, before, replace, rewrite_each
from fastcar_compile.passes.patterns.norms import rms_norm, written_layer_norm

aten = torch.ops.aten

_SPELLING = Counter((aten.pow, aten.mean, aten.add, aten.rsqrt, aten.mul, aten.mul))


class LegalizeNorms(Pass):
    """Write every root-mean-square norm, and every layer norm, with the same operators, in all graphs.

    1. Matches `aten.rms_norm`, and the product of float32 x, (mean(x^2, last axis) + epsilon)^-1/2 and a weight, if
       there is one, in any order, by mul, div, sqrt, rsqrt, reciprocal and pow. The mean may be a sum over K, and the
       whole may be written by the norm of x, as `sqrt(K) * normalize(x)`.
    2. Makes `x * rsqrt(mean(x^2) + epsilon) * weight`, with a weight [K], of ones where there is none.
    3. Matches a layer norm that is written by mean and variance (`mean`, `var`, `var_mean`), and makes
       `aten.layer_norm`.
    The order of operations may differ from the model's, so results differ by float32 rounding. A norm with a cast to
    another type inside stays as it is.
    """

    name = "legalize-norms"
    reason = "A norm is written with the same operators in every model, so that later passes know it."

    def apply(self, program: DecoderProgram) -> bool:
        """Return whether a norm had other operators."""
        return rewrite_each(program.all_graphs(), _is_other, _rewrite)


def _is_other(node: fx.Node) -> bool:
    """Return whether the node is a norm with other operators between x and itself than `_SPELLING`."""
    if written_layer_norm(node) is not None:
        return True
    if (norm := rms_norm(node)) is None:
        return False
    if norm[1] is None or len(shape_of(norm[1])) > 1:
        return True
    return Counter(getattr(n.target, "overloadpacket", None) for n in between(norm[0], node)[1:]) != _SPELLING


def _rewrite(module: fx.GraphModule, node: fx.Node) -> None:
    layer_norm, norm = written_layer_norm(node), rms_norm(node)
    with before(node, LegalizeNorms.name) as emit:
        if layer_norm is not None:
            x, *scales, epsilon = layer_norm
            rows = [None if v is None else _row(module, v, node) for v in scales]
            new = emit(aten.layer_norm.default, x, [shape_of(x)[-1]], *rows, epsilon)
        else:
            assert norm is not None
            new = _write_rms_norm(emit, module, node, *norm)
    replace(node, new)


def _write_rms_norm(
    emit: Inserter, module: fx.GraphModule, node: fx.Node, x: fx.Node, weight: fx.Node | None, epsilon: float
) -> fx.Node:
    width = shape_of(x)[-1]
    if weight is None:
        weight = attribute(module, f"no_weight_{width}", torch.ones(width), node, LegalizeNorms.name)
    mean = emit(aten.mean.dim, emit(aten.pow.Tensor_Scalar, x, 2), [-1], True)
    inverse = emit(aten.rsqrt.default, emit(aten.add.Tensor, mean, epsilon))
    return emit(aten.mul.Tensor, emit(aten.mul.Tensor, x, inverse), _row(module, weight, node))


def _row(module: fx.GraphModule, value: fx.Node, node: fx.Node) -> fx.Node:
    """Return a weight or bias [..., K] as [K]. Later passes read that of a norm as a parameter."""
    if len(shape_of(value)) == 1:
        return value
    known = evaluate(module, value, {})  # it follows from parameters alone
    assert known is not None
    return attribute(module, f"{value.name}_row", known.reshape(-1), node, LegalizeNorms.name)
