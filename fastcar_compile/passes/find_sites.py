"""Every decoder layer, found by the structure of the graph: attention, residual add, MLP, closing add."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import fx

from fastcar_compile.errors import CompileError, attempt
from fastcar_compile.ir.dataflow import ancestors, between
from fastcar_compile.ir.layers import LAYER, PROJECTIONS, ROLE, Role, assign_layers, mark
from fastcar_compile.ir.pass_manager import Pass
from fastcar_compile.ir.program import DecoderProgram
from fastcar_compile.ir.provenance import error_at
from fastcar_compile.ir.query import activation_of, is_op, node_arg, output_nodes, shape_of, value_of
from fastcar_compile.ir.sites import LINEARS, mlp_start

aten, fastcar = torch.ops.aten, torch.ops.fastcar


@dataclass(frozen=True)
class ParallelSum:
    """A sum of entry, attention and MLP, in whatever order and association the model adds them.

    `attention` and `mlp` are the summands that follow from the attention `origin` and from the entry alone. Most layers
    have one of each.
    """

    origin: fx.Node
    root: fx.Node
    entry: fx.Node
    attention: tuple[fx.Node, ...]
    mlp: tuple[fx.Node, ...]

    def is_canonical(self) -> bool:
        """Return whether the sum is (entry + attention) + MLP already, with one summand of each kind."""
        operands = self.root.all_input_nodes
        sums = [n for n in operands if is_sum(n) and set(n.all_input_nodes) == {self.entry, *self.attention}]
        return len(self.mlp) == 1 and set(operands) == {*sums, *self.mlp}


def parallel_windows(graph: fx.Graph) -> list[list[fx.Node]]:
    """Return the nodes from each attention to the one in front of the next.

    A layer's window holds this layer's adds, and at its end the next layer's norm and projections.
    """
    order = list(graph.nodes)
    starts = [i for i, n in enumerate(order) if is_op(n, fastcar.attention, fastcar.window_attention)]
    return [order[start:end] for start, end in pairwise([*starts, len(order)])]


def is_sum(node: fx.Node) -> bool:
    """Return whether the node adds two values of one shape [B, T, H], neither of them a parameter, without a factor."""
    if not is_op(node, aten.add) or node.kwargs or len(node.all_input_nodes) != 2 or len(node.args) != 2:
        return False
    shapes = {value_of(n).shape for n in (node, *node.all_input_nodes)}
    return len(shapes) == 1 and value_of(node).dim() == 3 and all(n.op != "get_attr" for n in node.all_input_nodes)


def reached_from(start: fx.Node, window: Sequence[fx.Node]) -> set[fx.Node]:
    """Return the nodes of the window that depend on `start`, itself included."""
    reached = {start}
    for node in window:
        if any(a in reached for a in node.all_input_nodes):
            reached.add(node)
    return reached


def parallel_sum(window: Sequence[fx.Node]) -> ParallelSum | None:
    """The sum that the attention at the start of the window joins, where an MLP joins it beside the attention."""
    origin = window[0]
    reached = reached_from(origin, window)
    # The first sum that adds to attention what does not follow from it.
    joins = (n for n in window if n in reached and is_sum(n) and any(a not in reached for a in n.all_input_nodes))
    join = next(joins, None)
    if join is None:
        return None
    root = _root(join)
    summands = _summands(root)
    attention = tuple(n for n in summands if n in reached)
    others = [n for n in summands if n not in reached]
    entry = _entry(others, origin)
    # A sequential block adds nothing but the entry to its attention; there is no MLP in the same sum.
    if entry is None or len(others) < 2:
        return None
    return ParallelSum(origin, root, entry, attention, tuple(n for n in others if n is not entry))


def _root(join: fx.Node) -> fx.Node:
    """The whole sum. What is read by anything besides the next add is the residual stream."""
    while len(join.users) == 1 and is_sum(user := next(iter(join.users))):
        join = user
    return join


def _summands(node: fx.Node) -> list[fx.Node]:
    found: list[fx.Node] = []
    for operand in node.all_input_nodes:
        # A sum with a second reader is a value of its own, such as the residual stream of a sequential block.
        inner = is_sum(operand) and len(operand.users) == 1
        found += _summands(operand) if inner else [operand]
    return found


def _entry(others: Sequence[fx.Node], attention: fx.Node) -> fx.Node | None:
    """The summand that attention and all other summands depend on."""
    for node in others:
        if all(node in ancestors(other, until={node}) for other in (*others, attention)):
            return node
    return None


_LINEAR = (aten.mul, aten.div, aten.add, aten.sub, aten.neg, aten.rsub, aten.to, aten._to_copy, aten.clone, aten.alias)
"""Elementwise operators that are linear in one value; `mul` and `div` of two values are not."""

_EXPECTED = "linear -> nonlinearity (one, elementwise) (-> product) -> linear, closed by a residual add"


@dataclass(frozen=True)
class LayerMatch:
    """The nodes of one layer: what its first add joins to attention (`entry`), and the nodes that get a role."""

    entry: fx.Node
    roles: dict[Role, fx.Node]


def match_layers(graph: fx.Graph) -> list[LayerMatch]:
    """Return the layers of a graph, in order.

    Raises:
        CompileError: every layer that cannot be matched, with what was found and what was expected.
    """
    windows = parallel_windows(graph)
    if not windows:
        hint = "write keys and values into caches and attend to them, as docs/reference/step_protocol.md has it"
        raise CompileError("no attention over a written cache was found", hint=hint)
    problems: list[CompileError] = []
    matches = [attempt(problems, _Matcher(layer, window).match) for layer, window in enumerate(windows)]
    CompileError.raise_all(problems)
    return [match for match in matches if match is not None]


def mark_layers(graph: fx.Graph, matches: Sequence[LayerMatch]) -> None:
    """Write layer and role of every node."""
    assign_layers(graph, matches[0].entry, [m.roles[Role.EXIT] for m in matches])
    for layer, match in enumerate(matches):
        for role, node in match.roles.items():
            mark(node, layer, role)


class _Matcher:
    """Matches one layer. Its adds stand between its attention and the next one; its MLP may stand before them."""

    def __init__(self, layer: int, window: Sequence[fx.Node]) -> None:
        self.layer, self.window, self.attention = layer, window, window[0]

    def match(self) -> LayerMatch:
        residual, entry = self._residual_add()
        # `h = h + attention; h = h + cross_attention(norm(h))`: the
        # MLP reads the second sum, so that one is the residual.
        residual = self._after_context(residual)
        exit_add, output = self._closing_add(residual, entry)
        region = self._region(self._start(residual, entry, output), output)
        linears = [n for n in region if is_op(n, aten.linear)]
        self._check_shape(region, linears, output)
        # Where the product is not that of a gated MLP, the order in the graph stands in for the roles.
        ordered = _by_role(linears) or linears
        found = {Role.ATTENTION: self.attention, Role.RESIDUAL: residual, Role.EXIT: exit_add}
        found[Role.ACTIVATION] = _nonlinearities(region, linears)[0]
        return LayerMatch(entry, found | dict(zip(PROJECTIONS[-len(linears) :], ordered, strict=True)))

    def _residual_add(self) -> tuple[fx.Node, fx.Node]:
        """The add that joins attention to the residual stream, and the stream before it."""
        reached = reached_from(self.attention, self.window)
        for node in self.window:
            if node not in reached or not is_op(node, aten.add):
                continue
            # `stream + o_proj(attention)`: exactly one operand does not follow from attention. A parameter there would
            # be the bias of the output projection, and a number would be a shift.
            operands = [a for a in node.args if isinstance(a, fx.Node)]
            outside = [a for a in operands if a not in reached]
            if len(operands) != len(node.args) or len(outside) != 1:
                continue
            if value_of(outside[0]).dim() == 3 and outside[0].op != "get_attr":
                return node, outside[0]
        raise self._error(self.attention, "its output joins no residual add", "a residual add after attention")

    def _after_context(self, residual: fx.Node) -> fx.Node:
        """The last add that joins cross-attention to the stream; the residual where there is none."""
        for node in self.window:
            other = _added(node, residual)
            if other is not None and any(is_op(n, fastcar.context_attention) for n in between(residual, other)):
                residual = node
        return residual

    def _closing_add(self, residual: fx.Node, entry: fx.Node) -> tuple[fx.Node, fx.Node]:
        """The add whose one operand is the residual, and whose other is an MLP of it or of the layer's entry."""
        reached = reached_from(residual, self.window)
        for node in self.window:
            other = _added(node, residual)
            # In a sequential block the MLP follows from the residual. In a parallel block it follows from the entry,
            # and the residual does not reach it.
            if other is not None and (other in reached or entry in ancestors(other, until={entry})):
                return node, other
        # No MLP was found. Where norms alone read the sum, and an
        # add reads such a norm, the block is `h = norm(h + f(h))`.
        norms = list(residual.users)
        normed = all(is_op(n, aten.layer_norm, aten.rms_norm) for n in norms)
        if normed and any(is_op(user, aten.add) for norm in norms for user in norm.users):
            what = "the norm stands behind the residual add, so that the stream itself is normalised (post-norm)"
            hint = "compile a decoder whose norms stand in front of attention and MLP (pre-norm), h = h + mlp(norm(h))"
            raise error_at(residual, f"layer {self.layer}: {what}", hint)
        users = ", ".join(str(n.target) for n in sorted(residual.users))
        raise self._error(residual, f"the residual stream is used by [{users}], none of which closes an MLP", _EXPECTED)

    def _start(self, residual: fx.Node, entry: fx.Node, output: fx.Node) -> fx.Node:
        linears = [n for n in between(entry, output) if is_op(n, aten.linear)]
        x = node_arg(linears[0], 0) if linears else entry
        return mlp_start(residual=residual, entry=entry, x=x, output=output)

    def _region(self, start: fx.Node, output: fx.Node) -> list[fx.Node]:
        """The MLP: single entry, single exit."""
        region = [n for n in between(start, output) if n is not start]
        inside = set(region)
        for node in region:
            # When all rows replay, the region does not run. So nothing outside may read a value from its inside.
            escaping = [u for u in node.users if u not in inside]
            if node is not output and escaping:
                raise self._error(node, f"{node.name} inside the MLP is also used by {escaping[0].name}", "one exit")
            # Parameters, and what is computed of them alone, may enter anywhere; activations enter at the start only.
            outside = [a for a in node.all_input_nodes if a not in inside and a is not start]
            free = [a for a in outside if any(n.op != "get_attr" for n in ancestors(a) if not n.all_input_nodes)]
            if free:
                raise self._error(node, f"{node.name} inside the MLP also reads {free[0].name}", "one entry")
        return region

    def _check_shape(self, region: list[fx.Node], linears: list[fx.Node], output: fx.Node) -> None:
        found = [getattr(n.target, "overloadpacket", n.target) for n in region if n.op == "call_function"]
        # All linears but the last one are gate and up, which read the same normed rows.
        shared = len({node_arg(n, 0) for n in linears[:-1]}) == 1
        # Two of these are rather two MLPs, or experts, than one nonlinearity.
        usual = sum(activation_of(n) in ("silu", "gelu", "gelu_tanh", "relu", "sigmoid", "tanh") for n in region)
        if len(linears) not in (2, 3) or usual > 1 or not shared or not _nonlinearities(region, linears):
            names = " -> ".join(getattr(t, "__name__", str(t)) for t in found)
            raise self._error(output, f"between residual and closing add: {names}", _EXPECTED)

    def _error(self, node: fx.Node, found: str, expected: str) -> CompileError:
        what = f"layer {self.layer}: the MLP cannot be matched: {found}; expected {expected}"
        hint = "write the block as h = h + attention(norm(h)); h = h + mlp(norm(h)), or register the shape as an issue"
        return error_at(node, what, hint)


def _added(node: fx.Node, residual: fx.Node) -> fx.Node | None:
    """Return what the node adds to the residual stream; None where it is no such add."""
    others = [a for a in node.all_input_nodes if a is not residual]
    joins = is_op(node, aten.add) and residual in node.all_input_nodes and len(others) == 1
    return others[0] if joins else None


def _nonlinearities(region: Sequence[fx.Node], linears: Sequence[fx.Node]) -> list[fx.Node]:
    """Return what is not linear between the first linears of an MLP and its last one, known activations first."""
    reached = {node for linear in linears[:-1] for node in reached_from(linear, region)}
    inner = [n for n in region if n in reached and n not in linears and n < linears[-1]]

    def is_linear(node: fx.Node) -> bool:
        pointwise = torch.Tag.pointwise in getattr(node.target, "tags", ())
        return not pointwise or (is_op(node, *_LINEAR) and sum(a in reached for a in node.args[:2]) < 2)

    return sorted((n for n in inner if activation_of(n) or not is_linear(n)), key=lambda n: activation_of(n) is None)


def _by_role(linears: list[fx.Node]) -> list[fx.Node] | None:
    """[gate, up, down] or [up, down] when the MLP is down(act(gate(x)) * up(x)) or down(act(up(x))), else None."""
    *first, down = linears
    inner = node_arg(down, 0)
    factors = inner.all_input_nodes if is_op(inner, aten.mul) else [inner]
    plain = [n for n in factors if n in first]
    activated = [n for n in first if n not in plain]
    return [*activated, *plain, down] if len(activated) == 1 and len(factors) == len(first) else None


class FindSites(Pass):
    """Write layer and role of every node (`ir/layers.py`), in both graphs.

    A layer matches where
    1. `fastcar.attention` or `fastcar.window_attention` reads a cache that is written in the same step;
    2. an add joins its result to the residual stream: role `residual`. Where `fastcar.context_attention` follows, it is
       the add that joins that to the stream;
    3. a later add closes the MLP: one operand is that sum, the other follows from it: role `exit`;
    4. what is between is one region with a single entry and a single exit;
    5. the region holds two or three linears, of which all but the last share their input, and in front of the last one
       something elementwise that is not linear, of one operator or of several.
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
        config = replace(program.config, num_layers=len(layers), hidden_size=hidden)
        if config.takes_embeddings:
            # Hidden states come out of a norm, logits out of a linear.
            headed = is_op(output_nodes(program.graph_module.graph)[0], *LINEARS)
            input_size = None if config.input_size == hidden else config.input_size
            config = replace(config, input_size=input_size, vocab_size=config.vocab_size if headed else None)
        modified = config != program.config or before != [_marks(graph) for graph, _ in matches]
        program.config = config
        return modified


def _marks(graph: fx.Graph) -> list[tuple[object, ...]]:
    return [(LAYER in n.meta, n.meta.get(LAYER), n.meta.get(ROLE)) for n in graph.nodes]
