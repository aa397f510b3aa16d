"""Every operation of a decode step gets a definition bit for bit: integers, and float32 in a stated order."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, fx

from fastcar_compile.errors import CompileError
from fastcar_compile.ir.modules import with_branches
from fastcar_compile.ir.pass_manager import Pass
from fastcar_compile.ir.program import DecoderProgram
from fastcar_compile.ir.provenance import where
from fastcar_compile.ir.query import is_op, node_arg, placeholder, value_of
from fastcar_compile.ir.rewrite import attribute, call, replace
from fastcar_compile.ir.rings import softcap_of, window_of
from fastcar_compile.ir.schema import bound
from fastcar_compile.passes.patterns.inexact import inexact
from fastcar_compile.passes.patterns.norms import rms_norm
from fastcar_compile.passes.patterns.rotary_table import Rotation, position_table, rotations, same_tables

fastcar = torch.ops.fastcar


@dataclass(frozen=True)
class ExactArithmetic(Pass):
    """Replace what backends round in their own order, in both graphs and in the branches of replay.

    1. `x * rsqrt(mean(x^2) + epsilon) * weight` becomes `fastcar.exact_norm`.
    2. A rotary embedding becomes `fastcar.exact_rotary` with a table of all positions, computed here.
    3. `fastcar.attention` and `fastcar.window_attention` over an int8 cache become their exact forms.
    4. What is left must be exact: integers, moves, single products and sums.
    """

    name: ClassVar[str] = "exact-arithmetic"
    reason: ClassVar[str] = "The operation is defined bit for bit, so that every backend computes the same."

    def apply(self, program: DecoderProgram) -> bool:
        """Raise CompileError with every operation that has no exact form, and why."""
        modified = any(rotations(module.graph) for module in program.graphs())
        # Rotary embeddings go first: both graphs must share one list of tables.
        problems = list(_rotate(program))
        for module in program.graphs():
            for part in with_branches(module):
                modified = _norms(part.graph) | _attentions(part.graph) | modified
            # The sines and cosines that a table replaced must be gone before `inexact` looks for what is not exact.
            module.graph.eliminate_dead_code()
            module.recompile()
        problems += inexact(program.graphs())
        if problems:
            raise CompileError.collect(problems)
        return modified


def _norms(graph: fx.Graph) -> bool:
    found = [(node, match) for node in graph.nodes if (match := rms_norm(node)) is not None]
    for node, (x, weight, epsilon) in found:
        with graph.inserting_before(node):
            arguments = (x, weight, epsilon)
            new = call(graph, fastcar.exact_norm.default, arguments, origin=node, made_by=ExactArithmetic.name)
        replace(node, new)
    graph.eliminate_dead_code()
    return bool(found)


def _attentions(graph: fx.Graph) -> bool:
    # An attention without an exact form stays, and `inexact` reports it with its reason.
    found = [n for n in graph.nodes if is_op(n, fastcar.attention, fastcar.window_attention) and _has_exact_form(n)]
    for node in found:
        window, operands = window_of(node), node.args[:5]
        target = fastcar.exact_attention.default
        if window is not None:
            target, operands = fastcar.exact_window_attention.default, (*operands, window.sinks, window.window)
        with graph.inserting_before(node):
            new = call(graph, target, operands, origin=node, made_by=ExactArithmetic.name)
        replace(node, new)
    return bool(found)


def _has_exact_form(node: fx.Node) -> bool:
    plain = softcap_of(node) is None and bound(node).get("sink_query") is None
    return plain and all(value_of(node_arg(node, i)).dtype == torch.int8 for i in (1, 2))


def _rotate(program: DecoderProgram) -> Iterator[CompileError]:
    """Replace the rotary embeddings. The tables are those of the prefill graph, which has many positions per call."""
    modules = [m for m in (program.prefill, program.graph_module) if m is not None]
    tables: list[Tensor] = []
    for module in modules:
        # All layers mostly share one pair of cosines and sines, whose table is evaluated once.
        found, known = rotations(module.graph), dict[tuple[fx.Node, fx.Node], Tensor | str]()
        for rotation in found:
            pair = (rotation.cos, rotation.sin)
            if pair not in known:
                known[pair] = _table(program, module, rotation, tables)
            table = known[pair]
            if isinstance(table, str):
                hint = 'compile with numerics="native", which offload="mlp" and "linears" have'
                what = f"numerics='exact': the rotary embedding {rotation.node.name}: {table}"
                yield CompileError(what, where=where(rotation.node), hint=hint)
            else:
                _replace_rotation(module, rotation, table, _number(tables, table))


def _table(program: DecoderProgram, module: fx.GraphModule, rotation: Rotation, tables: list[Tensor]) -> Tensor | str:
    """Return the table of a rotation: a known one with the same angles, or a new one, which is added to `tables`."""
    rows = program.config.max_seq_len
    # Angles of single positions may differ from those of a chunk in the last bit. Both graphs get the chunk's.
    if module is program.graph_module and program.prefill is not None:
        return _known_table(module, rotation, tables, rows)
    table = position_table(module, rotation, rows)
    if isinstance(table, str):
        return table
    # Two pairs of nodes with the same angles share one table, and so one parameter.
    for other in tables:
        if torch.equal(other, table):
            return other
    tables.append(table)
    return table


def _known_table(module: fx.GraphModule, rotation: Rotation, tables: list[Tensor], rows: int) -> Tensor | str:
    """Return the table that the prefill graph has of the angles of the decode step, by its first positions."""
    few = position_table(module, rotation, min(rows, 4))
    if isinstance(few, str):
        return few
    for table in tables:
        if same_tables(table[: len(few)], few):
            return table
    return "the prefill graph has other angles"


def _number(tables: list[Tensor], table: Tensor) -> int:
    return next(i for i, other in enumerate(tables) if other is table)


def _replace_rotation(module: fx.GraphModule, rotation: Rotation, table: Tensor, number: int) -> None:
    graph, made_by = module.graph, ExactArithmetic.name
    with graph.inserting_before(rotation.node):
        angles = attribute(module, f"rotary_table_{number}", table, rotation.node, made_by)
        arguments = (rotation.x, angles, placeholder(graph, "position"))
        new = call(graph, fastcar.exact_rotary.default, arguments, origin=rotation.node, made_by=made_by)
    replace(rotation.node, new)
