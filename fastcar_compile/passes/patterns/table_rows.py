"""Tables that a model reads by position, such as learnt positions: no row past the last one is read."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, fx

from fastcar_compile.errors import CompileError
from fastcar_compile.ir.provenance import where
from fastcar_compile.ir.query import ancestors, evaluate, is_op, node_arg, shape_of
from fastcar_compile.ir.rewrite import call

aten, fastcar = torch.ops.aten, torch.ops.fastcar


@dataclass(frozen=True)
class _Lookup:
    """A read of `table`, which has `rows`, at an int64 `index` that follows from the position alone."""

    node: fx.Node
    table: fx.Node
    index: fx.Node
    rows: int


def short_tables(module: fx.GraphModule, position: fx.Node, max_seq_len: int) -> list[CompileError]:
    """Return one error for all tables of a decode step that lack the same row of a position below `max_seq_len`.

    The index is evaluated at every position: a table that is read by something else than the position itself, such as
    the row of a picture or a distance, needs the rows that this index has.
    """
    needed: dict[fx.Node, list[int]] = {position: list(range(max_seq_len))}
    short: dict[tuple[int, int, int], dict[str, fx.Node]] = defaultdict(dict)
    for lookup in _lookups(module.graph, position):
        # Several tables may be read at one index, which is evaluated once.
        if lookup.index not in needed:
            values = (_largest(module, position, lookup.index, start) for start in range(max_seq_len))
            needed[lookup.index] = [-1 if value is None else value for value in values]
        beyond = [at for at, row in enumerate(needed[lookup.index]) if row >= lookup.rows]
        if beyond:
            key = (lookup.rows, beyond[0], max(needed[lookup.index]) + 1)
            short[key].setdefault(_name(lookup.table), lookup.node)
    return [_too_short(tables, *key, max_seq_len) for key, tables in short.items()]


def limit_table_rows(module: fx.GraphModule, position: fx.Node, max_seq_len: int, made_by: str) -> None:
    """Limit what the padding of a prompt's last chunk reads to the rows of each table.

    Positions of the padding may pass the end of a table of `max_seq_len` rows. Nothing uses what they give, but they
    must not read out of bounds. `short_tables` has checked every other position.
    """
    for lookup in list(_lookups(module.graph, position)):
        # A chunk that starts at the last position reads furthest: all of its other tokens are padding.
        largest = _largest(module, position, lookup.index, max_seq_len - 1)
        if largest is not None and largest < lookup.rows:
            continue
        with module.graph.inserting_before(lookup.node):
            arguments = (lookup.index, lookup.rows - 1)
            limited = call(module.graph, fastcar.limit.default, arguments, origin=lookup.node, made_by=made_by)
        lookup.node.replace_input_with(lookup.index, limited)


def _largest(module: fx.GraphModule, position: fx.Node, index: fx.Node, start: int) -> int | None:
    """Return the largest row that a call at position `start` reads; None: that cannot be known here."""
    try:
        found = evaluate(module, index, {position: torch.tensor([start])})
    except IndexError:  # the index stands in a table that is too short itself
        return None
    return int(found.max()) if isinstance(found, Tensor) else None


def _name(table: fx.Node) -> str:
    """Return the name of the buffer or parameter that a table is, or is computed from."""
    names = [str(n.target) for n in sorted(ancestors(table)) if n.op == "get_attr"]
    return names[-1] if names else table.name


def _too_short(tables: dict[str, fx.Node], rows: int, first: int, needed: int, max_seq_len: int) -> CompileError:
    """Return the error of tables whose `rows` end before position `first`."""
    name, *others = tables
    named = f"table '{name}' has" if not others else f"tables '{name}' and {len(others)} more have"
    what = f"{named} {rows} rows, but max_seq_len is {max_seq_len}: position {first} reads row {rows}"
    caches = f"with caches of {first} rows where the module builds its own"
    hint = f"give max_seq_len={first}, {caches}, or a table of {needed} rows"
    return CompileError(what, where=where(tables[name]), hint=hint)


def _lookups(graph: fx.Graph, position: fx.Node) -> Iterator[_Lookup]:
    """Yield every read of a table by position."""
    for node in graph.nodes:
        for index, axis in _indices(node):
            table = node_arg(node, 0)
            if _follows_from(position, index):
                yield _Lookup(node, table, index, shape_of(table)[axis])


def _indices(node: fx.Node) -> Iterator[tuple[fx.Node, int]]:
    """Yield (index, axis of the table) of a lookup."""
    if is_op(node, aten.embedding):
        yield node_arg(node, 1), 0
    elif is_op(node, aten.index_select):
        yield node_arg(node, 2), cast("int", node.args[1])
    elif is_op(node, aten.index):
        for axis, index in enumerate(cast("list[Any]", node.args[1])):
            if isinstance(index, fx.Node):
                yield index, axis


def _follows_from(position: fx.Node, index: fx.Node) -> bool:
    """Whether an int64 index depends on the position, and on no other input."""
    found = ancestors(index)
    inputs = {n for n in found if n.op == "placeholder"}
    return inputs == {position} and index.meta["val"].dtype == torch.int64
