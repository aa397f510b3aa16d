"""Find every decoder layer's attention and MLP from the structure of the graph."""

from __future__ import annotations

import dataclasses

from torch import fx

from fastcar_compile.ir.layers import LAYER, ROLE, Role
from fastcar_compile.ir.pass_manager import Pass
from fastcar_compile.ir.program import DecoderProgram
from fastcar_compile.ir.query import shape_of
from fastcar_compile.passes.patterns.decoder_layer import mark_layers, match_layers


class FindSites(Pass):
    """Write layer and role of every node (`ir/layers.py`), in both graphs.

    A layer matches where
    1. `fastcar.attention` or `fastcar.window_attention` reads a cache that is written in the same step;
    2. an add joins its result to the residual stream: role `residual`. Where `fastcar.context_attention` follows, it is
       the add that joins that to the stream;
    3. a later add closes the MLP: one operand is that sum, the other follows from it: role `exit`;
    4. what is between is one region with a single entry and a single exit;
    5. the region holds two or three linears, of which all but the last share their input, and one nonlinearity.
    Names of classes and modules do not count. The configuration learns the number of layers and the hidden size.
    """

    name = "find-sites"
    reason = "Attention and MLP of every layer are recognised from the structure of the graph."

    def apply(self, program: DecoderProgram) -> bool:
        """Raise CompileError with every layer that cannot be matched: what was found and what was expected."""
        matches = [(module.graph, match_layers(module.graph)) for module in program.graphs()]
        # A second run writes what is there already, and must report that it modified nothing.
        before = [_marks(graph) for graph, _ in matches]
        for graph, layers in matches:
            mark_layers(graph, layers)
        _, layers = matches[0]
        hidden = shape_of(layers[0].roles[Role.RESIDUAL])[-1]
        config = dataclasses.replace(program.config, num_layers=len(layers), hidden_size=hidden)
        modified = config != program.config or before != [_marks(graph) for graph, _ in matches]
        program.config = config
        return modified


def _marks(graph: fx.Graph) -> list[tuple[object, ...]]:
    return [(LAYER in n.meta, n.meta.get(LAYER), n.meta.get(ROLE)) for n in graph.nodes]
