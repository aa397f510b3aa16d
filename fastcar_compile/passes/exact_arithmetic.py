"""Every operation of a decode step gets a definition bit for bit: integers, and float32 in a stated order."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, fx

from fastcar_compile.errors import CompileError
from fastcar_compile.ir.dataflow import ancestors, evaluate, in_order
from fastcar_compile.ir.layers import softcap_of, window_of
from fastcar_compile.ir.ops.linear import FLOAT_LINEARS
from fastcar_compile.ir.pass_manager import Pass
from fastcar_compile.ir.program import DecoderProgram
from fastcar_compile.ir.provenance import error_at
from fastcar_compile.ir.query import bound, is_op, node_arg, placeholder, shape_of, value_of, with_branches
from fastcar_compile.ir.rewrite import attribute, replace_call, rewrite_each
from fastcar_compile.passes.patterns.norms import layer_norm, rms_norm, rotary

aten, fastcar = torch.ops.aten, torch.ops.fastcar


MOVES = (
    *(aten.view, aten.reshape, aten._unsafe_view, aten.transpose, aten.permute, aten.t, aten.unsqueeze, aten.squeeze),
    *(aten.flatten, aten.unflatten, aten.movedim, aten.swapaxes, aten.roll, aten.flip),
    *(aten.slice, aten.select, aten.split, aten.split_with_sizes, aten.chunk, aten.unbind, aten.narrow),
    *(aten.cat, aten.stack, aten.expand, aten.repeat, aten.clone, aten.contiguous, aten.alias, aten.detach),
    *(aten.to, aten._to_copy, aten.embedding, aten.index, aten.index_select, aten.where, aten.full, aten.zeros),
    *(aten.ones, aten.neg, aten.abs, aten.relu),
)
"""What moves, selects or widens values; none of it rounds."""
SUMS = (aten.add, aten.sub)
_HINT = 'compile with numerics="native", which offload="mlp" and "linears" have'
_ANGLES = "rotary positions are defined for half-rotation by a table of positions"
_REASONS: dict[Any, str] = {
    aten.linear: "its weight is not quantised, and a float32 sum has no order",
    aten.cos: _ANGLES,
    aten.sin: _ANGLES,
    fastcar.context_attention: "cross-attention is not defined bit for bit",
    **dict.fromkeys(FLOAT_LINEARS, "a float32 sum has no order"),
}


def inexact(modules: Iterable[fx.GraphModule]) -> list[CompileError]:
    """Return one error per kind of operator in graphs and their branches that backends may round differently."""
    found: dict[tuple[str, str], list[fx.Node]] = {}
    for node in (node for module in modules for part in with_branches(module) for node in part.graph.nodes):
        if node.op == "call_function" and (reason := _problem(node)) is not None:
            found.setdefault((str(node.target), reason), []).append(node)
    return [_error(operator, reason, nodes) for (operator, reason), nodes in found.items()]


def _error(operator: str, reason: str, nodes: list[fx.Node]) -> CompileError:
    count = "" if len(nodes) == 1 else f" ({len(nodes)} times)"
    return error_at(nodes[0], f"numerics='exact': {operator}{count}: {reason}", _HINT)


def _problem(node: fx.Node) -> str | None:
    """Return why the node's bits depend on the backend; None: they do not."""
    # The branches of a `cond` are judged on their own: `inexact` looks into them.
    computes_floats = any(_is_float(n) for n in [node, *node.all_input_nodes])
    if not computes_floats or is_op(node, *MOVES, torch.ops.higher_order.cond):
        return None
    if reason := _REASONS.get(getattr(node.target, "overloadpacket", None)):
        return reason
    if is_op(node, fastcar.attention, fastcar.window_attention):
        return _attention(node)
    # Every other operator of `fastcar::` is defined bit for bit, and a single product is rounded once on any backend.
    if getattr(node.target, "namespace", "") == "fastcar" or is_op(node, aten.mul):
        return None
    if is_op(node, *SUMS):
        product = any(is_op(a, aten.mul) and _is_float(a) for a in node.all_input_nodes)
        return "a backend may fuse its product with the sum, which then rounds once" if product or node.kwargs else None
    return None if getattr(node.target, "__name__", "") == "getitem" else "it has no definition bit for bit"


def _attention(node: fx.Node) -> str:
    """Return why an attention has no exact form."""
    # exact-arithmetic ran before: an attention that is still here has one of three reasons.
    given = bound(node)
    if given["softcap"] is not None:
        return "attention with a soft-cap is not defined bit for bit"
    if given.get("sink_query") is not None:
        return 'sparse attention with positions="cache" is not defined bit for bit'
    return "its cache is not int8"


def _is_float(node: fx.Node) -> bool:
    value = node.meta.get("val")
    values = cast("Sequence[object]", value) if isinstance(value, list | tuple) else [value]
    return any(isinstance(v, Tensor) and v.is_floating_point() for v in values)


TOLERANCE = 1e-5
"""Between the two graphs, and between two calls: their angles may differ in the last bit."""


@dataclass(frozen=True)
class Rotation:
    """One rotary embedding: its sum, what it rotates, and the nodes of its cosines and sines [1 or B, 1, T, R]."""

    node: fx.Node
    x: fx.Node
    cos: fx.Node
    sin: fx.Node


def rotations(graph: fx.Graph) -> list[Rotation]:
    """Return the rotary embeddings of a graph, in order."""
    return [Rotation(node, *found) for node in graph.nodes if (found := rotary(node)) is not None]


def position_table(module: fx.GraphModule, rotation: Rotation, rows: int) -> Tensor | str:
    """Return float32 [rows, R]: of every position R / 2 cosines, then R / 2 sines; or why there is no such table."""
    position = placeholder(module.graph, "position")
    inputs = {n for n in ancestors(rotation.cos, rotation.sin) if n.op == "placeholder"}
    if inputs != {position}:
        return "its angles depend on more than the position"
    # One call gives the angles of `steps` positions. The last call may pass the end of the table.
    steps = shape_of(rotation.cos)[2]
    parts = [_angles(module, rotation, position, start) for start in range(0, rows, steps)]
    if any(part is None for part in parts):
        return "its angles depend on a weight that is not in memory"
    table = torch.cat([part for part in parts if part is not None])[:rows]
    # Elements c and c + R / 2 of a head are rotated by one angle, so the table keeps one half of each.
    cos, sin = table.chunk(2, 1)
    if not all(torch.equal(*part.chunk(2, 1)) for part in (cos, sin)):
        return "the two halves of a head have different angles"
    # The calls above start at multiples of `steps`. Another start must give the same rows of the table.
    for start in {1 % rows, rows // 2}:
        again = _angles(module, rotation, position, start)
        if again is None or not _alike(again[: rows - start], table[start : start + steps]):
            return "its angles are no function of the position alone"
    half = shape_of(rotation.cos)[3] // 2
    return torch.cat([cos[:, :half], sin[:, :half]], 1).contiguous()


def _angles(module: fx.GraphModule, rotation: Rotation, position: fx.Node, start: int) -> Tensor | None:
    """Return cosines and sines float32 [T, 2 R] of a call at position `start`."""
    known = {position: torch.tensor([start])}
    shared = in_order(module.graph, ancestors(rotation.cos) & ancestors(rotation.sin))
    for node in shared[-1:]:  # what both follow from is computed once
        value = evaluate(module, node, known)
        known |= {} if value is None else {node: value}
    parts = [evaluate(module, node, known) for node in (rotation.cos, rotation.sin)]
    if any(part is None for part in parts):
        return None
    # Batch row 0 stands for all rows: nothing but the position goes into the angles.
    return torch.cat([part[0, 0].float() for part in parts if part is not None], 1)


def _alike(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.allclose(a, b, rtol=0, atol=TOLERANCE)


class ExactArithmetic(Pass):
    """Replace what backends round in their own order, in both graphs and in the branches of replay.

    1. `x * rsqrt(mean(x^2) + epsilon) * weight` becomes `fastcar.exact_norm`.
    2. `aten.layer_norm` over the last axis becomes `fastcar.exact_layer_norm`; ones and zeros stand for a weight and a
       bias that it has not.
    3. A rotary embedding becomes `fastcar.exact_rotary` with a table of all positions, computed here.
    4. `fastcar.attention` and `fastcar.window_attention` over an int8 cache become their exact forms.
    5. What is left must be exact: integers, moves, single products and sums.
    """

    name = "exact-arithmetic"
    reason = "The operation is defined bit for bit, so that every backend computes the same."

    def apply(self, program: DecoderProgram) -> bool:
        """Raise CompileError with every operation that has no exact form, and why."""
        modified = any(rotations(module.graph) for module in program.graphs())
        # Rotary embeddings go first: both graphs must share one list of tables.
        problems = list(_rotate(program))
        parts = [part for module in program.graphs() for part in with_branches(module)]
        exact_norm = fastcar.exact_norm.default
        modified |= rewrite_each(
            parts, rms_norm, lambda _, node: replace_call(node, self.name, exact_norm, *(rms_norm(node) or ()))
        )
        modified |= rewrite_each(parts, layer_norm, _replace_layer_norm)
        # An attention without an exact form stays, and `inexact` reports it with its reason.
        modified |= rewrite_each(parts, _has_exact_form, _replace_attention)
        for module in program.graphs():
            # The sines and cosines that a table replaced must be gone before `inexact` looks for what is not exact.
            module.graph.eliminate_dead_code()
            module.recompile()
        problems += inexact(program.graphs())
        CompileError.raise_all(problems)
        return modified


def _replace_layer_norm(module: fx.GraphModule, node: fx.Node) -> None:
    found = layer_norm(node)
    assert found is not None
    x, weight, bias, epsilon = found
    made_by, width = ExactArithmetic.name, shape_of(x)[-1]
    with module.graph.inserting_before(node):
        if weight is None:
            weight = attribute(module, f"no_weight_{width}", torch.ones(width), node, made_by)
        if bias is None:
            bias = attribute(module, f"no_bias_{width}", torch.zeros(width), node, made_by)
    replace_call(node, made_by, fastcar.exact_layer_norm.default, x, weight, bias, epsilon)


def _replace_attention(_module: fx.GraphModule, node: fx.Node) -> None:
    window, operands = window_of(node), node.args[:5]
    target = fastcar.exact_attention.default
    if window is not None:
        target, operands = fastcar.exact_window_attention.default, (*operands, window.sinks, window.window)
    replace_call(node, ExactArithmetic.name, target, *operands)


def _has_exact_form(node: fx.Node) -> bool:
    if not is_op(node, fastcar.attention, fastcar.window_attention):
        return False
    plain = softcap_of(node) is None and bound(node).get("sink_query") is None
    return plain and all(value_of(node_arg(node, i)).dtype == torch.int8 for i in (1, 2))


def _rotate(program: DecoderProgram) -> Iterator[CompileError]:
    """Replace the rotary embeddings. The tables are those of the prefill graph, which has many positions per call."""
    modules = [m for m in (program.prefill, program.graph_module) if m is not None]
    tables: list[Tensor] = []
    for module in modules:
        # All layers mostly share one pair of cosines and sines, each behind a view of its own. It is evaluated once.
        found, known = rotations(module.graph), dict[object, int | str]()
        # Angles of single positions may differ from those of a chunk in the last bit. Both graphs get the chunk's.
        made = module is program.graph_module and program.prefill is not None
        for rotation in found:
            pair = tuple((n.target, n.args, n.kwargs) for n in (rotation.cos, rotation.sin))
            if pair not in known:
                known[pair] = _table_number(module, rotation, tables, program.config.max_seq_len, made=made)
            number = known[pair]
            if isinstance(number, str):
                what = f"numerics='exact': the rotary embedding {rotation.node.name}: {number}"
                yield error_at(rotation.node, what, _HINT)
            else:
                position = placeholder(module.graph, "position")
                with module.graph.inserting_before(rotation.node):
                    name = f"rotary_table_{number}"
                    angles = attribute(module, name, tables[number], rotation.node, ExactArithmetic.name)
                arguments = (fastcar.exact_rotary.default, rotation.x, angles, position)
                replace_call(rotation.node, ExactArithmetic.name, *arguments)


def _table_number(
    module: fx.GraphModule, rotation: Rotation, tables: list[Tensor], rows: int, *, made: bool
) -> int | str:
    """Return the place in `tables` of a rotation's table: a known one with the same angles, or a new one; or a problem.

    Args:
        made: the prefill graph made all tables, and the first positions of the decode step tell which one is meant.
    """
    table = position_table(module, rotation, min(rows, 4) if made else rows)
    if isinstance(table, str):
        return table
    # Two pairs of nodes with the same angles share one table, and so one parameter.
    for number, other in enumerate(tables):
        if _alike(other[: len(table)], table) if made else torch.equal(other, table):
            return number
    if made:
        return "the prefill graph has other angles"
    tables.append(table)
    return len(tables) - 1
