"""What means nothing in inference goes, and rows by known numbers are slices or lookups."""

from typing import Any, cast

import torch
from torch import Tensor, fx

from fastcar_compile.ir.dataflow import ancestors, descendants, evaluate
from fastcar_compile.ir.pass_manager import Pass
from fastcar_compile.ir.program import DecoderProgram
from fastcar_compile.ir.query import is_op, is_same, node_arg, shape_of, value_of
from fastcar_compile.ir.rewrite import attribute, before, free_views

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
    4. Other casts become `to(dtype)`, such as `type_as` and `to(device, dtype)`, and `repeat_interleave` by one number
       becomes a view: backends lack the operators.
    5. Weights that are norms, sums or products of parameters, as weight normalisation has them, become parameters.
    6. What nothing reads any more goes.
    It runs after normalize-state: before that, an alias may be a second name of a mutated buffer.
    """

    name = "canonicalize"
    reason = "What means nothing in inference is removed: asserts, casts to the same type, aliases, dropout."

    def apply(self, program: DecoderProgram) -> bool:
        """Return whether anything was removed or computed."""
        return any([*map(_clean, program.all_graphs()), fold_weights(program, self.name)])


def _clean(module: fx.GraphModule) -> bool:
    graph, modified = module.graph, False
    before = len(graph.nodes)
    for node in list(graph.nodes):
        if taken := _rewrite_index(module, node) or _repeated(node) or _cast(node):
            # Nothing reads the node any more, so it goes as dead code below.
            node.replace_all_uses_with(taken)
            modified = True
        if is_op(node, *_ASSERTS):
            graph.erase_node(node)
        # The third argument of `dropout` is `train`: off, it returns its input.
        elif (
            is_op(node, *_IDENTITIES, aten.contiguous)
            or (is_op(node, aten.dropout) and node.args[2] is False)
            or is_same(node)
        ):
            source = node_arg(node, 0)
            # Views behind the copy were recorded for its layout. They now stand on the source, whose layout is another.
            if is_op(node, aten.contiguous) and value_of(node).stride() != value_of(source).stride():
                free_views(node)
            node.replace_all_uses_with(source)
            graph.erase_node(node)
    graph.eliminate_dead_code()
    return modified or len(graph.nodes) != before


def _cast(node: fx.Node) -> fx.Node | None:
    """What casts to the node's type, for a cast that is written in another way; None where the node is no such cast."""
    if node.target is aten.to.dtype or is_same(node) or not is_op(node, aten.to, aten.type_as):
        return None
    with before(node, Canonicalize.name) as emit:
        return emit(aten.to.dtype, node_arg(node, 0), value_of(node).dtype)


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


FOLDED = "_folded_"
"""In the name of a weight that was computed."""


def fold_weights(program: DecoderProgram, made_by: str) -> bool:
    """Make parameters of computed weights and biases that follow from parameters alone, the same for both graphs.

    Sums, norms and products of parameters are computed. Views stay, as other passes know them, and so do elementwise
    operators, and what follows from parameters that are not in memory.

    Returns:
        whether there was a weight to compute.
    """
    modified, made = False, dict[str, list[Tensor]]()
    for module in program.graphs():
        varying = descendants(*module.graph.find_nodes(op="placeholder"))
        readers = [n for n in module.graph.nodes if is_op(n, aten.linear, aten.matmul, aten.addmm, aten.embedding)]
        found = [(n, w) for n in readers for w in n.all_input_nodes if n in varying and w not in varying]
        modified |= any([_fold(module, node, weight, made, made_by) for node, weight in found if _computes(weight)])
        module.graph.eliminate_dead_code()
    return modified


def _computes(node: fx.Node) -> bool:
    parts = ancestors(node)
    operators: list[Any] = [n.target for n in parts if n.op == "call_function" and hasattr(n.target, "_schema")]
    # What an operator returns has an alias where it is a view.
    found = any(op._schema.returns[0].alias_info is None and torch.Tag.pointwise not in op.tags for op in operators)
    return found and any(n.op == "get_attr" for n in parts)


def _fold(module: fx.GraphModule, reader: fx.Node, node: fx.Node, made: dict[str, list[Tensor]], made_by: str) -> bool:
    value = evaluate(module, node, {})
    if value is None:
        return False
    # Named after a parameter that it follows from. The second graph and other readers find an equal value.
    base = min(str(n.target) for n in ancestors(node) if n.op == "get_attr")
    known = made.setdefault(base, [])
    number = next((i for i, other in enumerate(known) if torch.equal(other, value)), len(known))
    known += [value.detach().contiguous()] * (number == len(known))
    with module.graph.inserting_before(reader):
        new = attribute(module, f"{base}{FOLDED}{number}", known[number], reader, made_by)
    reader.replace_input_with(node, new)
    return True
