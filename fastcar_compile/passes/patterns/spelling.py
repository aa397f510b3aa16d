"""Products and softmaxes of attention that a model writes out, in the spelling that `eager_attention` reads."""

import operator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import fx

from fastcar_compile.ir.query import is_op, shape_of
from fastcar_compile.ir.rewrite import Inserter, before, replace_layout
from fastcar_compile.passes.patterns.norms import arguments, is_last

aten = torch.ops.aten


def spell_out(graph: fx.Graph, made_by: str) -> bool:
    """Write every einsum of one product per row and head as a matmul, and every softmax by hand as the operator.

    Returns:
        whether there was one.
    """
    return _write_products(graph, made_by) | _write_softmaxes(graph, made_by)


def _write_softmaxes(graph: fx.Graph, made_by: str) -> bool:
    """`e / e.sum(-1)`, where e is exp(x), or exp(x - x.max(-1)): in exact arithmetic the largest x cancels."""
    found = [(node, x) for node in graph.nodes if (x := _softmax_of(node)) is not None]
    for node, x in found:
        with before(node, made_by) as emit:
            replace_layout(node, emit(aten.softmax.int, x, -1))
    return bool(found)


def _softmax_of(node: fx.Node) -> fx.Node | None:
    """Return what a quotient is the softmax of."""
    quotient = arguments(node, aten.div)
    total = None if quotient is None else arguments(quotient["other"], aten.sum)
    powers: Any = None if quotient is None or total is None or total["self"] is not quotient["self"] else total["self"]
    power = arguments(powers, aten.exp)
    if total is None or power is None or not is_last(total, powers):
        return None
    x: fx.Node = power["self"]
    shifted = arguments(x, aten.sub)
    largest = None if shifted is None or shifted["alpha"] != 1 else shifted["other"]
    if isinstance(largest, fx.Node) and largest.target is operator.getitem and largest.args[1] == 0:
        largest = largest.args[0]  # `max` gives values and their places
    most = arguments(largest, aten.amax) or arguments(largest, aten.max)
    if shifted is not None and most is not None and most["self"] is shifted["self"] and is_last(most, most["self"]):
        return shifted["self"]
    return x


@dataclass(frozen=True)
class _Product:
    """An einsum of one product per row and head, `bhqd,bhkd->bhqk`, or per row and query head, `bhgqd,bhkd->bhgqk`.

    Attributes:
        first, second: the axes of the operands; `first` has the rows. result: of the result.
        swapped: whether `first` is the second operand.
        both: b and h. inner: d, which is summed. row, column: q and k. group: g, or "".
    """

    first: str
    second: str
    result: str
    swapped: bool
    both: str
    inner: str
    row: str
    column: str
    group: str

    @classmethod
    def of(cls, node: fx.Node) -> "_Product | None":
        if not is_op(node, aten.einsum) or len(cast("list[fx.Node]", node.args[1])) != 2:
            return None
        equation = str(node.args[0]).replace(" ", "")
        parts = equation.replace("...", "<>").replace("->", ",").split(",")  # an ellipsis stands for rows and heads
        if len(parts) != 3 or "->" not in equation or any(len(part) != len(set(part)) for part in parts):
            return None
        left, right, result = parts
        both = "".join(axis for axis in result if axis in left and axis in right)
        own = [axis for axis in result if axis not in both]
        inner = (set(left) | set(right)) - set(result)
        if len(both) != 2 or len(inner) != 1 or not inner <= set(left) & set(right):
            return None
        # The operand with the rows, and with the groups where there are any, goes first, in whichever order they stand.
        swapped = len(right) > len(left) if len(own) == 3 else own[0] in right
        first, second = (right, left) if swapped else (left, right)
        group = first[first.index(both[1]) + 1 :][:1] if len(own) == 3 else ""
        rows = [axis for axis in own if axis in first and axis != group]
        columns = [axis for axis in own if axis in second]
        if len(rows) != 1 or len(columns) != 1 or len(own) != len(group) + 2 or group in inner:
            return None
        return cls(first, second, result, swapped, both, inner.pop(), rows[0], columns[0], group)


def _write_products(graph: fx.Graph, made_by: str) -> bool:
    found = [(node, product) for node in graph.nodes if (product := _Product.of(node)) is not None]
    for node, p in found:
        x, y = cast("list[fx.Node]", node.args[1])[:: -1 if p.swapped else 1]
        with before(node, made_by) as emit:
            axes, grouped = p.first, list(shape_of(x))
            if p.group:  # the query heads as one axis, as they came from the query
                at = axes.index(p.group)
                x = emit(aten.reshape.default, x, [*grouped[: at - 1], -1, *grouped[at + 1 :]])
                axes = axes.replace(p.group, "")
            x = _arranged(emit, x, axes, [*p.both, p.row, p.inner])
            y = _arranged(emit, y, p.second, [*p.both, p.inner, p.column])
            if p.group:
                sizes = dict(zip(p.first, grouped, strict=True))
                x = emit(aten.reshape.default, x, [sizes[axis] for axis in (*p.both, p.group, p.row, p.inner)])
                y = emit(aten.unsqueeze.default, y, 2)
            product = emit(aten.matmul.default, x, y)
            new = _arranged(emit, product, p.both + p.group + p.row + p.column, list(p.result))
        replace_layout(node, new)
    return bool(found)


def _arranged(emit: Inserter, x: fx.Node, axes: str, wanted: list[str]) -> fx.Node:
    """Return x with its axes as they are wanted: heads to the front first, then the last two swapped."""
    # The swap of the last two axes is an operator of its own: keys are recognised by it.
    front, pair = wanted[:-2], sorted(wanted[-2:], key=axes.index)
    for have, want in ((list(axes), [*front, *pair]), ([*front, *pair], wanted)):
        order = [have.index(axis) for axis in want]
        moved = [i for i, axis in enumerate(order) if i != axis]
        if len(moved) == 2:
            x = emit(aten.transpose.int, x, *moved)
        elif moved:
            x = emit(aten.permute.default, x, order)
    return x
