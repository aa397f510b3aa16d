"""One form for what models write in many: what means nothing in inference goes, and activations are one operator."""

from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, fx
from torch.nn import functional as F

from fastcar_compile.ir.dataflow import descendants, evaluate, in_order
from fastcar_compile.ir.pass_manager import Pass
from fastcar_compile.ir.program import DecoderProgram
from fastcar_compile.ir.query import is_op, is_same, node_arg, shape_of, value_of
from fastcar_compile.ir.rewrite import after, attribute, before, free_views, replace_call

aten = torch.ops.aten


# Rows taken by known numbers, `x[:, [-2]]`: slices, or lookups whose numbers are all within the axis.


def _rewrite_index(module: fx.GraphModule, node: fx.Node) -> fx.Node | None:
    """Return what takes the same rows; None where the node is no index along one axis by known numbers.

    Numbers from the end of an axis are legal in PyTorch. A lookup of another library reads outside of the tensor.
    """
    found = _axis(module, node)
    if found is None:
        return None
    axis, rows = found
    x, first = node_arg(node, 0), int(rows[0])
    with before(node, Canonicalize.name) as emit:
        # Consecutive rows are a slice. Other rows need a lookup, and their numbers become a buffer of the module.
        if torch.equal(rows, torch.arange(first, first + len(rows))):
            return emit(aten.slice.Tensor, x, axis, first, first + len(rows))
        taken = {name for name, _ in module.named_buffers()}
        name = next(name for i in range(len(taken) + 1) if (name := f"rows_{i}") not in taken)
        return emit(aten.index_select.default, x, axis, attribute(module, name, rows, node, Canonicalize.name))


def _axis(module: fx.GraphModule, node: fx.Node) -> tuple[int, Tensor] | None:
    """The axis and the rows, counted from the front."""
    if not is_op(node, aten.index):
        return None
    # torch.export writes `x[:, rows]` as `index(x, [None, rows])`: None stands for an axis that stays whole.
    indices = cast("list[fx.Node | None]", node.args[1])
    axis = len(indices) - 1
    given = indices[axis] if not any(indices[:axis]) else None
    # No input is known here, so the evaluation succeeds only for constants.
    rows = None if given is None else evaluate(module, given, {})
    if rows is None or rows.dim() != 1 or not rows.numel() or rows.dtype not in (torch.int64, torch.int32):
        return None
    return axis, torch.where(rows < 0, rows + shape_of(node_arg(node, 0))[axis], rows).long()


_ASSERTS = (aten._assert_tensor_metadata, aten._assert_async, aten._assert_scalar)
_IDENTITIES = (aten.lift_fresh_copy, aten.detach_)


class Canonicalize(Pass):
    """Remove operators that change nothing, in all graphs.

    1. Asserts go.
    2. `alias`, `detach`, dropout in inference, and casts and copies to the dtype that is there: their argument stays.
       A `view` of a copy that went becomes a `reshape`, as the layout is now another.
    3. Rows of one axis that are taken by known numbers, `x[:, [-2]]`, become a slice or an `index_select` by numbers
       from the front.
    4. `repeat_interleave` by one number becomes a view: backends lack the operator.
    5. What nothing reads any more goes.
    It runs after normalize-state: before that, an alias may be a second name of a mutated buffer.
    """

    name = "canonicalize"
    reason = "What means nothing in inference is removed: asserts, casts to the same type, aliases, dropout."

    def apply(self, program: DecoderProgram) -> bool:
        """Return whether anything was removed."""
        return any([_clean(module) for module in program.all_graphs()])


def _clean(module: fx.GraphModule) -> bool:
    graph, modified = module.graph, False
    before = len(graph.nodes)
    for node in list(graph.nodes):
        if taken := _rewrite_index(module, node) or _repeated(node):
            # Nothing reads the node any more, so it goes as dead code below.
            node.replace_all_uses_with(taken)
            modified = True
        if is_op(node, *_ASSERTS):
            graph.erase_node(node)
        elif _is_identity(node):
            source = node_arg(node, 0)
            # Views behind the copy were recorded for its layout. They now stand on the source, whose layout is another.
            if is_op(node, aten.contiguous) and value_of(node).stride() != value_of(source).stride():
                free_views(node)
            node.replace_all_uses_with(source)
            graph.erase_node(node)
    graph.eliminate_dead_code()
    return modified or len(graph.nodes) != before


def _repeated(node: fx.Node) -> fx.Node | None:
    """What repeats each row of an axis, as a view of one more axis; None where the node does something else."""
    if node.target is not aten.repeat_interleave.self_int or len(node.args) != 3:
        return None
    x, count, axis = node_arg(node, 0), node.args[1], node.args[2]
    if not isinstance(count, int) or not isinstance(axis, int):
        return None
    axis %= len(shape_of(x))
    # `reshape(expand(unsqueeze(x)))`: the new axis behind `axis` repeats each row `count` times in a row.
    wide = [*shape_of(x)[: axis + 1], count, *shape_of(x)[axis + 1 :]]
    with before(node, Canonicalize.name) as emit:
        expanded = emit(aten.expand.default, emit(aten.unsqueeze.default, x, axis + 1), wide)
        return emit(aten.reshape.default, expanded, list(shape_of(node)))


def _is_identity(node: fx.Node) -> bool:
    # The third argument of `dropout` is `train`: off, it returns its input.
    if is_op(node, *_IDENTITIES, aten.contiguous) or (is_op(node, aten.dropout) and node.args[2] is False):
        return True
    return is_same(node)


# Activations that a model writes out in elementary operators become the one operator they compute.


_SEEDS = (aten.tanh, aten.erf, aten.sigmoid)
_POINTWISE = (*_SEEDS, aten.mul, aten.add, aten.sub, aten.div, aten.pow, aten.neg, aten.exp, aten.square)
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

    1. Matches the elementwise operators around a tanh, erf or sigmoid that depend on one value x alone.
    2. Their values at 4,002 points between -12 and 12 must be those of SiLU, GELU or tanh-GELU within 1e-5. So
       `0.5 * x * (1 + tanh(0.797885 * (x + 0.044715 * x ** 3)))` (GPT-2, Phi) and `x * sigmoid(x)` are found however
       they are written.
    3. Makes `silu(x)`, `gelu(x)` or `gelu(x, approximate="tanh")`.
    4. Writes the square of a ReLU as a product, `r * r`: one rounding, the same on every backend.
    """

    name = "fuse-activations"
    reason = "An activation that the model writes out in elementary operators becomes one operator."

    def apply(self, program: DecoderProgram) -> bool:
        """Return whether there was an activation to rewrite; what computes no known one stays as it is."""
        return any([_fuse(module) | _multiply_out(module.graph) for module in program.graphs()])


def _fuse(module: fx.GraphModule) -> bool:
    modified = False
    for seed in [n for n in module.graph.nodes if is_op(n, *_SEEDS)]:
        # An earlier match may have contained this seed, which dead-code elimination then took.
        match = _match(module, seed) if seed.graph is module.graph and seed.users else None
        if match is None:
            continue
        source, result, operator, options = match
        with after(result, FuseActivations.name) as emit:
            new = emit(operator, source, **options)
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


def _match(module: fx.GraphModule, seed: fx.Node) -> tuple[fx.Node, fx.Node, Any, dict[str, Any]] | None:
    """(x, y, operator, options) of the largest activation around the seed."""
    points = torch.cat([torch.linspace(-12, 12, 4001), torch.tensor([0.0])])
    # The nearest source and the furthest result are tried first, so that `x * sigmoid(x)` is one SiLU.
    for source in _sources(seed):
        inside = _functions_of(source)
        for result in reversed(in_order(module.graph, inside & descendants(seed))):
            value = evaluate(module, result, {source: points})
            if value is None or value.shape != points.shape:
                continue
            for function, operator, options in _KNOWN:
                if (value - function(points)).abs().max() < _TOLERANCE:
                    return source, result, operator, options
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
