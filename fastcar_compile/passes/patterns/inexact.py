"""Operators without a definition bit for bit, and why each of them has none."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import cast

import torch
from torch import Tensor, fx

from fastcar_compile.errors import CompileError
from fastcar_compile.ir.modules import with_branches
from fastcar_compile.ir.provenance import where
from fastcar_compile.ir.query import is_op
from fastcar_compile.ir.schema import bound

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
_LAYER_NORM = "only root-mean-square norms are defined bit for bit"
_ANGLES = "rotary positions are defined for half-rotation by a table of positions"
_REASONS = {
    aten.linear: "its weight is not quantised, and a float32 sum has no order",
    aten.layer_norm: _LAYER_NORM,
    aten.native_layer_norm: _LAYER_NORM,
    aten.cos: _ANGLES,
    aten.sin: _ANGLES,
    fastcar.context_attention: "cross-attention is not defined bit for bit",
    fastcar.linear_bf16: "a float32 sum has no order",
}


def inexact(modules: Iterable[fx.GraphModule]) -> list[CompileError]:
    """Return one error per kind of operator in graphs and their branches that backends may round differently."""
    found: dict[tuple[str, str], list[fx.Node]] = {}
    for part in (part for module in modules for part in with_branches(module)):
        for node, reason in _problems(part.graph.nodes):
            found.setdefault((str(node.target), reason), []).append(node)
    return [_error(operator, reason, nodes) for (operator, reason), nodes in found.items()]


def _error(operator: str, reason: str, nodes: list[fx.Node]) -> CompileError:
    count = "" if len(nodes) == 1 else f" ({len(nodes)} times)"
    hint = 'compile with numerics="native", which offload="mlp" and "linears" have'
    return CompileError(f"numerics='exact': {operator}{count}: {reason}", where=where(nodes[0]), hint=hint)


def _problems(nodes: Iterable[fx.Node]) -> Iterator[tuple[fx.Node, str]]:
    for node in nodes:
        if node.op == "call_function" and (reason := _problem(node)) is not None:
            yield node, reason


def _problem(node: fx.Node) -> str | None:
    """Return why the node's bits depend on the backend; None: they do not."""
    # The branches of a `cond` are judged on their own: `inexact` looks into them.
    if not _computes_floats(node) or is_op(node, *MOVES, torch.ops.higher_order.cond):
        return None
    for packet, reason in _REASONS.items():
        if is_op(node, packet):
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


def _computes_floats(node: fx.Node) -> bool:
    """Return whether a float32 goes into the node or comes out of it."""
    return any(_is_float(n) for n in [node, *node.all_input_nodes])


def _is_float(node: fx.Node) -> bool:
    value = node.meta.get("val")
    values = cast("Sequence[object]", value) if isinstance(value, list | tuple) else [value]
    return any(isinstance(v, Tensor) and v.is_floating_point() for v in values)
