"""Activations that a model writes out in elementary operators become the one operator that they compute."""

import operator
from functools import partial
from typing import Any

import torch
from torch import fx
from torch.nn import functional as F

from fastcar_compile.ir.dataflow import descendants, evaluate, in_order
from fastcar_compile.ir.pass_manager import Pass
from fastcar_compile.ir.program import DecoderProgram
from fastcar_compile.ir.query import bound, is_op, node_arg, shape_of
from fastcar_compile.ir.rewrite import after, before, replace, replace_call

aten = torch.ops.aten

_SEEDS = (aten.tanh, aten.erf, aten.sigmoid, aten.exp)
_POINTWISE = (*_SEEDS, aten.mul, aten.add, aten.sub, aten.div, aten.pow, aten.neg, aten.square, aten.reciprocal)
_TOLERANCE = 1e-5
"""The two GELUs are 4e-4 apart; two ways to write one of them differ by a few float32 roundings."""


_KNOWN: tuple[tuple[Any, Any, dict[str, Any]], ...] = (
    (F.silu, aten.silu.default, {}),
    (F.gelu, aten.gelu.default, {}),
    (partial(F.gelu, approximate="tanh"), aten.gelu.default, {"approximate": "tanh"}),
)
"""(function, operator, keyword arguments)."""


class FuseActivations(Pass):
    """Write activations as the one operator that they compute, in both graphs.

    1. Matches the elementwise operators around a tanh, erf, sigmoid or exp that depend on one value x alone.
    2. Their values at 4,002 points between -12 and 12 must be those of SiLU, GELU or tanh-GELU within 1e-5. So
       `0.5 * x * (1 + tanh(0.797885 * (x + 0.044715 * x ** 3)))` (GPT-2, Phi) and `x * sigmoid(x)` are found however
       they are written.
    3. Makes `silu(x)`, `gelu(x)` or `gelu(x, approximate="tanh")`.
    4. Writes the square of a ReLU as a product, `r * r`: one rounding, the same on every backend. `glu(x)` becomes
       `a * sigmoid(b)` of its halves, and PReLU of one weight a choice between x and x times the weight.
    """

    name = "fuse-activations"
    reason = "An activation that the model writes out in elementary operators becomes one operator."

    def apply(self, program: DecoderProgram) -> bool:
        """Return whether there was an activation to rewrite; what computes no known one stays as it is."""
        return any([_open(m.graph) | _fuse(m) | _multiply_out(m.graph) for m in program.graphs()])


def _fuse(module: fx.GraphModule) -> bool:
    modified = False
    for seed in [n for n in module.graph.nodes if is_op(n, *_SEEDS)]:
        # An earlier match may have contained this seed, which dead-code elimination then took.
        match = _match(module, seed) if seed.graph is module.graph and seed.users else None
        if match is None:
            continue
        source, result, target, options = match
        with after(result, FuseActivations.name) as emit:
            new = emit(target, source, **options)
        result.replace_all_uses_with(new, delete_user_cb=lambda user, new=new: user is not new)
        module.graph.eliminate_dead_code()
        modified = True
    return modified


def _multiply_out(graph: fx.Graph) -> bool:
    squares = [n for n in graph.nodes if is_op(n, aten.square) or (is_op(n, aten.pow) and n.args[1] == 2)]
    found = [(n, node_arg(n, 0)) for n in squares if is_op(n.args[0], aten.relu)]
    for node, relu in found:
        replace_call(node, FuseActivations.name, aten.mul.Tensor, relu, relu)
    return bool(found)


def _open(graph: fx.Graph) -> bool:
    found = [n for n in graph.nodes if is_op(n, aten.glu) or (is_op(n, aten.prelu) and shape_of(n.args[1]) == (1,))]
    for node in found:
        x = node_arg(node, 0)
        with before(node, FuseActivations.name) as emit:
            if is_op(node, aten.glu):
                halves = emit(aten.chunk.default, x, 2, bound(node)["dim"])
                a, b = emit(operator.getitem, halves, 0), emit(operator.getitem, halves, 1)
                replace(node, emit(aten.mul.Tensor, a, emit(aten.sigmoid.default, b)))
            else:
                below = emit(aten.mul.Tensor, x, node_arg(node, 1))
                replace(node, emit(aten.where.self, emit(aten.gt.Scalar, x, 0), x, below))
    return bool(found)


def _match(module: fx.GraphModule, seed: fx.Node) -> tuple[fx.Node, fx.Node, Any, dict[str, Any]] | None:
    """(x, y, target, options) of the largest activation around the seed."""
    points = torch.cat([torch.linspace(-12, 12, 4001), torch.tensor([0.0])])
    # The nearest source and the furthest result are tried first, so that `x * sigmoid(x)` is one SiLU.
    for source in _sources(seed):
        inside = _functions_of(source)
        for result in reversed(in_order(module.graph, inside & descendants(seed))):
            value = evaluate(module, result, {source: points})
            if value is None or value.shape != points.shape:
                continue
            for function, target, options in _KNOWN:
                if (value - function(points)).abs().max() < _TOLERANCE:
                    return source, result, target, options
    return None


def _sources(seed: fx.Node) -> list[fx.Node]:
    """Nodes that the seed is an elementwise function of, nearest first."""
    found: list[fx.Node] = []
    queue = [seed]
    while queue:
        for node in queue.pop(0).all_input_nodes:
            # The search goes on through pointwise operators only: what another operator makes can just be a source.
            if node.op != "get_attr" and node not in found:
                found.append(node)
                queue += [node] if is_op(node, *_POINTWISE) else []
    return found


def _functions_of(source: fx.Node) -> set[fx.Node]:
    """Nodes that are elementwise functions of the source alone."""
    inside = {source}
    for node in in_order(source.graph, descendants(source) - {source}):
        # A node with an input from elsewhere, such as `silu(gate) * up`, is no function of the source alone.
        inputs = [n for n in node.all_input_nodes if n.op != "get_attr"]
        scalars = all(n.meta["val"].numel() == 1 for n in node.all_input_nodes if n.op == "get_attr")
        if is_op(node, *_POINTWISE) and inputs and set(inputs) <= inside and scalars:
            inside.add(node)
    return inside - {source}
