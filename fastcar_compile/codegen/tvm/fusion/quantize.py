"""fuse-quantize: the quantisation of rows joins the norm, or the product of a gated MLP, that makes them."""

from __future__ import annotations

import torch
from torch import fx

from fastcar_compile.codegen.tvm.fusion.rewrite import replace
from fastcar_compile.ir.schema import bound
from fastcar_compile.passes.patterns.algebra import arguments, factors, shape

fastcar = torch.ops.fastcar
NAME = "fuse-quantize"
_QUANTIZED_NORMS = {
    fastcar.rms_norm.default: fastcar.rms_norm_quantize.default,
    fastcar.exact_norm.default: fastcar.exact_norm_quantize.default,
    fastcar.layer_norm.default: fastcar.layer_norm_quantize.default,
}


def fuse_quantize(graph: fx.Graph) -> None:
    """Replace every `quantize_rows` whose rows one kernel can make and quantise.

    The rows stay where another operator reads them too.
    """
    for node in list(graph.nodes):
        quantize = arguments(node, fastcar.quantize_rows)
        if quantize is None:
            continue
        x = quantize["x"]
        # fuse-norms ran before, so a norm is one node by now.
        if x.target in _QUANTIZED_NORMS:
            replace(node, _QUANTIZED_NORMS[x.target], tuple(bound(x).values()), NAME)
        elif (found := gated_product(x)) is not None:
            replace(node, fastcar.gated_quantize.default, found, NAME)


def gated_product(node: fx.Node) -> tuple[fx.Node, fx.Node, str] | None:
    """Return (gate, up, activation) where node is activation(gate) * up by a table's factor, all of one shape."""
    for product, up in factors(node):
        for gate, factor in factors(product):
            # `(gate * activation_factor(gate)) * up`, with both products in either order.
            activation = arguments(factor, fastcar.activation_factor)
            if activation is None or activation["x"] is not gate:
                continue
            if shape(node) == shape(gate) == shape(up):
                return gate, up, str(activation["activation"])
    return None
