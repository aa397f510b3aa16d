"""Cross-attention to a context: what follows from the context alone is computed once per video, in its own graph."""

from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from fastcar_compile.ir.dataflow import ancestors, descendants, evaluate, in_order
from fastcar_compile.ir.layers import mark
from fastcar_compile.ir.program import StateSpec
from fastcar_compile.ir.provenance import error_at
from fastcar_compile.ir.query import graph_module, is_op, node_arg, shape_of, tensor_attribute, value_of
from fastcar_compile.ir.rewrite import add_placeholder, before
from fastcar_compile.ir.types import StateRole
from fastcar_compile.passes.patterns.eager_attention import AttentionCall, Mask

aten, fastcar = torch.ops.aten, torch.ops.fastcar
CONTEXT_INPUTS = ("context", "context_mask")
"""Names of the inputs that are the same for a whole video."""

_HIDDEN = torch.finfo(torch.float32).min
"""Added to a logit, it hides a token. TVM cannot fill a tensor with infinities."""

HEAD_VIEWS = (
    *(aten.unsqueeze, aten.expand, aten.reshape, aten.view, aten._unsafe_view, aten.clone, aten.contiguous),
    *(aten.repeat, aten.repeat_interleave, aten.transpose, aten.permute, aten.slice),
)
"""What may stand between keys or values and attention to share their heads among query heads."""


class ContextStates:
    """Lifts keys, values and masks of the context from one graph: they become states that the graph only reads.

    Attributes:
        states: of the cross-attentions so far, in order.
    """

    def __init__(self, module: fx.GraphModule, made_by: str) -> None:
        self._module, self._graph, self._made_by = module, module.graph, made_by
        placeholders = self._graph.find_nodes(op="placeholder")
        self._inputs = [n for n in placeholders if n.target in CONTEXT_INPUTS]
        # What follows from tokens or position changes with every step. `_fixed` holds what follows from the context
        # alone; a node that follows from parameters alone is in neither set.
        varying = descendants(*(n for n in placeholders if n not in self._inputs))
        self._fixed = descendants(*self._inputs) - varying
        self._lifted: dict[StateSpec, fx.Node] = {}
        """The states, and the nodes that make them."""

    @property
    def states(self) -> list[StateSpec]:
        """What the graph reads."""
        return list(self._lifted)

    def reads(self, site: AttentionCall) -> bool:
        """Whether the attention is to the context."""
        return site.key in self._fixed and site.value in self._fixed

    def rewrite(self, site: AttentionCall, layer: int) -> None:
        """Make the attention a `fastcar.context_attention` over states.

        Raises:
            CompileError: it stands before the layer's self-attention, or has a mask that is none of the context.
        """
        # States of the context are named after the layer of the self-attention in front of them.
        if layer < 0:
            raise error_at(site.node, "cross-attention before the first self-attention", "put it behind self-attention")
        if site.problem:
            raise error_at(site.node, f"layer {layer}: {site.problem}", "leave it out of the decode step")
        mask = None if site.mask is None else self._mask(site, site.mask, layer)
        heads = shape_of(site.query)[1]
        keys = self._lift(self._unshared(site.key, heads), StateRole.CONTEXT_KEY, layer)
        values = self._lift(self._unshared(site.value, heads), StateRole.CONTEXT_VALUE, layer)
        arguments: tuple[Any, ...] = (site.query, keys, values, site.scale)
        # Both trailing arguments have defaults in the schema, and stay out of a call that needs neither.
        if mask is not None or site.softcap is not None:
            arguments += (None if mask is None else self._lift(mask, StateRole.CONTEXT_MASK, layer), site.softcap)
        site.replace(self._made_by, fastcar.context_attention.default, *arguments)

    def finish(self) -> fx.GraphModule | None:
        """Take the context's inputs out of the graph, and return the graph from them to the states; None: it has none.

        Raises:
            CompileError: the graph reads the context elsewhere.
        """
        if not self._inputs:
            return None
        made = self._context_graph() if self._lifted else None
        # The cross-attentions read states by now. A node that the output needs, and that still follows from the
        # context, reads the context in another way.
        rest = in_order(self._graph, descendants(*self._inputs))
        needed = ancestors(self._graph.output_node())
        if elsewhere := [n for n in rest if n in needed and n.op == "call_function"]:
            what = "the context is read by more than the keys, values and masks of cross-attention"
            raise error_at(elsewhere[0], what, "give what else depends on it as a part of the prompt")
        # Readers come before what they read: fx erases only nodes without users.
        for node in reversed(rest):
            self._graph.erase_node(node)
        return made

    def _context_graph(self) -> fx.GraphModule:
        # No ancestor follows from tokens or position: `reads` and `_mask` have made sure of it.
        graph, copies, attributes = fx.Graph(), dict[fx.Node, fx.Node](), dict[str, Any]()
        for node in in_order(self._graph, ancestors(*self._lifted.values())):
            copies[node] = graph.node_copy(node, lambda n: copies[n])
            if node.op == "get_attr":
                attributes[str(node.target)] = tensor_attribute(self._module, str(node.target))
        graph.output(tuple(copies[node] for node in self._lifted.values()))
        return graph_module(attributes, graph)

    def _unshared(self, node: fx.Node, query_heads: int) -> fx.Node:
        """Return keys or values before they are repeated for the query heads that share them."""
        # Sharing is written as `reshape(expand(unsqueeze(k)))` or `repeat_interleave(k)`. The walk goes back through
        # views, and `best` keeps the node with the fewest heads that `is_shared` proves.
        best = current = node
        while is_op(current, *HEAD_VIEWS) and node_arg(current, 0) in self._fixed:
            current = node_arg(current, 0)
            heads = shape_of(current)[1] if value_of(current).dim() == 4 else 0
            if heads and heads < shape_of(best)[1] and is_shared(self._module, node, current, query_heads):
                best = current
        return best

    def _mask(self, site: AttentionCall, mask: Mask, layer: int) -> fx.Node:
        """Return the mask as float32 [1 or B, 1, 1, L] to add to the logits."""
        node = mask.node
        # The operator broadcasts the mask, so an expansion over heads and query rows would only enlarge the state.
        while is_op(node, aten.expand) and node in self._fixed:
            node = node_arg(node, 0)
        shape = (*(1,) * (4 - value_of(node).dim()), *shape_of(node))
        if node not in self._fixed or shape[1:3] != (1, 1):
            what = f"layer {layer}: the mask of cross-attention is not one of the context alone, [B, 1, 1, L]"
            raise error_at(mask.node, what, "take context_mask bool [B, L] as an input, and nothing else for it")
        with before(site.node, self._made_by, origin=node) as emit:
            # A mask of flags becomes what is added to logits.
            if value_of(node).dtype == torch.bool:
                seen, unseen = (emit(aten.full.default, [1], value) for value in (0.0, _HIDDEN))
                node = emit(aten.where.self, node, *((unseen, seen) if mask.hidden else (seen, unseen)))
            return node if shape_of(node) == shape else emit(aten.reshape.default, node, list(shape))

    def _lift(self, node: fx.Node, role: StateRole, layer: int) -> fx.Node:
        # A second cross-attention of one layer has a second state: its name ends in `_1`.
        number = sum(s.role is role and s.layer == layer for s in self.states)
        name = f"{role}_{layer}" if not number else f"{role}_{layer}_{number}"
        val = value_of(node)
        self._lifted[StateSpec(name, shape_of(node), val.dtype, role, layer)] = node
        state = add_placeholder(self._graph, name, val.shape, val.dtype, self._made_by)
        mark(state, layer, role)
        return state


def is_shared(module: fx.GraphModule, node: fx.Node, source: fx.Node, query_heads: int) -> bool:
    """Return whether a node is `source` [B, Hkv, S, D] with every head repeated for the query heads that share it."""
    batch, heads, rows, dim = shape_of(source)
    if query_heads % heads:
        return False
    # Every element gets a label of its own. The labels that arrive tell which element each query head reads.
    count = batch * heads * rows * dim  # of a long cache: narrow labels, and no second copy of what is seen
    label = torch.arange(count, dtype=torch.int32 if count < 2**31 else torch.int64).view(batch, heads, rows, dim)
    seen = evaluate(module, node, {source: label})
    if seen is None or seen.shape != (batch, query_heads, rows, dim):
        return False
    shape = (batch, heads, query_heads // heads, rows, dim)
    return torch.equal(seen.reshape(shape), label[:, :, None].expand(shape))


def same_graph(first: fx.GraphModule | None, second: fx.GraphModule | None) -> bool:
    """Return whether two context graphs compute the same."""
    if first is None or second is None:
        return first is second
    return _lines(first.graph) == _lines(second.graph)


def _lines(graph: fx.Graph) -> list[tuple[object, ...]]:
    """Return a line per node; nodes are named by position."""
    # Names of nodes differ between the two graphs. Names of parameters, which are targets, must not.
    number: dict[fx.Node, int] = {n: i for i, n in enumerate(graph.nodes)}
    return [(n.op, n.target, str(map_arg((n.args, dict(n.kwargs)), lambda a: number[a]))) for n in graph.nodes]
