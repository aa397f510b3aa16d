"""Every row of a decode step gets a position and a forward number of its own, and rows may share a video's caches."""

import operator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from fastcar_compile.errors import CompileError
from fastcar_compile.ir.dataflow import evaluate
from fastcar_compile.ir.layers import mark
from fastcar_compile.ir.pass_manager import Pass
from fastcar_compile.ir.program import DecoderProgram, StateSpec
from fastcar_compile.ir.provenance import error_at
from fastcar_compile.ir.query import argument_names, is_op, node_arg, node_named, placeholder, shape_of, value_of
from fastcar_compile.ir.rewrite import Inserter, attribute, before, fake_like, fake_value, replace_call
from fastcar_compile.ir.types import ATTENTION_ROLES, CONTEXT_ROLES, REPLAY_ROLES

aten, fastcar = torch.ops.aten, torch.ops.fastcar
_ELEMENTWISE = (aten.mul, aten.add, aten.sub, aten.div, aten.where)
_MOVES = (fastcar.ring_row, fastcar.limit)
"""What makes an integer of each position."""


@dataclass(frozen=True)
class DecodeRows(Pass):
    """Give every row of the decode step its own `position` and `step`, int64 [B]; B = videos x rows.

    1. `position` and `step` become int64 [B], `thresholds` float32 [L x B]. Operators of `fastcar::` take one number
       for each row as well as one for all. What else is computed from the position alone, such as cosines and sines,
       becomes a table of all positions, of which each row reads its own.
    2. With more rows than one for each video, the caches of keys and values become [V, ...] and those of a frame
       [F, V, ...]: row b reads and writes those of video b // rows. Rows of one video have different positions, and
       write before they read, so that a row sees the ones before it.
    3. A row that is not there is zero from the embedding on, and kernels do not multiply rows of zeros.
    4. A study's random score hashes the video, not the row.

    Options:
        rows: rows of each video.
    """

    name = "decode-rows"
    reason = "Every row of a decode step has a position of its own, and the rows of a video share its caches."
    rows: int = 1

    def apply(self, program: DecoderProgram) -> bool:
        """Raise CompileError where an operator needs one position for all rows."""
        module, config = program.graph_module, program.config
        if config.rows is not None:
            return False
        batch = config.batch_size
        program.config = replace(config, batch_size=batch // self.rows, rows=self.rows)
        if batch == 1:
            return True
        problems = [*_contexts(program, self.rows), *_PositionTables(program, self.name).run()]
        CompileError.raise_all(problems)
        for spec in program.state:
            _reshape(module.graph, spec.name, _shared(spec, self.rows))
        program.state = [replace(s, shape=_shared(s, self.rows)) for s in program.state]
        for name in ("position", "step"):
            if name in program.inputs:
                _reshape(module.graph, name, (batch,))
        if "thresholds" in program.inputs:
            _spread_thresholds(module.graph, config.num_layers, batch)
        _zero_inactive(program, self.name)
        for node in list(module.graph.nodes):
            _hash_videos(node, self.rows, self.name)
        module.graph.eliminate_dead_code()
        _refresh(module.graph)
        return True


def _shared(spec: StateSpec, rows: int) -> tuple[int, ...]:
    """Return the shape of a state that `rows` rows of the batch share."""
    if spec.role in ATTENTION_ROLES:
        return (spec.shape[0] // rows, *spec.shape[1:])
    if spec.role in REPLAY_ROLES:
        return (spec.shape[0], spec.shape[1] // rows, *spec.shape[2:])
    return spec.shape


def _reshape(graph: fx.Graph, name: str, shape: tuple[int, ...]) -> None:
    node = placeholder(graph, name)
    node.meta["val"] = fake_like(graph, torch.empty(shape, dtype=value_of(node).dtype, device="meta"))


def _spread_thresholds(graph: fx.Graph, layers: int, batch: int) -> None:
    """Make of one threshold for each layer one for each of its rows, layer after layer."""
    _reshape(graph, "thresholds", (layers * batch,))
    for node in list(placeholder(graph, "thresholds").users):
        node.update_arg(1, batch)  # the size of a layer's part


def _zero_inactive(program: DecoderProgram, made_by: str) -> None:
    """Make the input of the first layer zero where the row is not there. Embeddings are the caller's."""
    graph = program.graph_module.graph
    entry = node_named(graph, program.sites[0].entry)
    if entry.op == "placeholder":
        return
    shape = [len(value_of(entry)), *[1] * (value_of(entry).dim() - 1)]
    with before(entry.next, made_by, origin=entry) as emit:
        zero = emit(aten.full.default, [1], 0.0, dtype=torch.float32)
        away = emit(aten.lt.Scalar, placeholder(graph, "position"), 0)
        kept = emit(aten.where.self, emit(aten.view.default, away, shape), zero, entry)
    entry.replace_all_uses_with(kept, delete_user_cb=lambda user: user is not kept)
    mark(kept, 0)


def _hash_videos(node: fx.Node, rows: int, made_by: str) -> None:
    """Let a score that follows from the forward number alone take one of each row."""
    if is_op(node, fastcar.random_score):
        replace_call(node, made_by, fastcar.random_score.default, node.args[0], 1, node.args[2], rows)
    elif is_op(node, fastcar.constant_score):
        replace_call(node, made_by, fastcar.constant_score.default, node.args[0], 1, node.args[2])


def _refresh(graph: fx.Graph) -> None:
    """Give every node the value that follows from the inputs' new shapes."""
    for node in graph.nodes:
        # The branches of a `cond` read rows of the batch, whose number stays.
        if node.op == "call_function" and getattr(node.target, "namespace", "") in ("fastcar", "aten"):
            node.meta["val"] = fake_value(graph, node)
        elif node.target is operator.getitem and is_op(node_arg(node, 0), aten.split):
            node.meta["val"] = node_arg(node, 0).meta["val"][node.args[1]]


def _contexts(program: DecoderProgram, rows: int) -> list[CompileError]:
    """Return the error of cross-attention, whose states have a row for each row of the batch."""
    if rows == 1 or not any(s.role in CONTEXT_ROLES for s in program.state):
        return []
    what = "cross-attention has a context for each row, so several rows of a video cannot share one"
    return [CompileError(what, hint="compile with rows=1")]


class _PositionTables:
    """Replaces what a graph computes from the position alone by rows of tables."""

    def __init__(self, program: DecoderProgram, made_by: str) -> None:
        self.module, self.graph, self.made_by = program.graph_module, program.graph_module.graph, made_by
        self.position, self.rows = placeholder(self.graph, "position"), program.config.max_seq_len
        self.tables: list[tuple[Tensor, fx.Node]] = []
        self.place: fx.Node | None = None
        self.known: dict[tuple[object, ...], fx.Node] = {}

    def run(self) -> list[CompileError]:
        """Rewrite the graph; return what is wrong with it."""
        problems: list[CompileError] = []
        alone, constant = {self.position}, set[fx.Node]()
        for node in self.graph.nodes:
            inputs = set(node.all_input_nodes)
            if node.op == "get_attr" or (node.op == "call_function" and inputs <= constant):
                constant.add(node)
            elif node.op == "call_function" and inputs <= alone | constant:
                alone.add(node)
        for node in [n for n in self.graph.nodes if n in alone]:
            for user in [u for u in node.users if u not in alone]:
                if self._takes_each(node, user):
                    continue
                problem = self._replace(node, user)
                if problem:
                    hint = "compile without rows: then all rows of a decode step share one position"
                    problems.append(error_at(user, f"rows with positions of their own: {problem}", hint))
        return problems

    def _takes_each(self, node: fx.Node, user: fx.Node) -> bool:
        """Whether an operator takes a position of each row: its argument `position`, as it is or as a row of a ring."""
        while is_op(node, *_MOVES):
            node = node_arg(node, 0)
        named = "position" in argument_names(user) and getattr(user.target, "namespace", "") == "fastcar"
        return node is self.position and named

    def _replace(self, node: fx.Node, user: fx.Node) -> str:
        """Let an operator read rows of a table where it read one value for all; return what is wrong, if anything."""
        result = user.meta.get("val")
        if not is_op(user, *_ELEMENTWISE) or not isinstance(result, Tensor):
            return f"{user.target} reads what follows from the position"
        shape = [1] * (result.dim() - value_of(node).dim()) + list(shape_of(node))
        if shape[0] not in (1, result.shape[0]):
            return f"{user.target} spreads what follows from the position over its rows"
        if (node, *shape) not in self.known:
            table = self._table(node)
            if table is None:
                return "the value of a position needs a weight that is not in memory"
            self.known[node, *shape] = self._row(table.reshape(len(table), *shape)[:, 0], user)
        user.replace_input_with(node, self.known[node, *shape])
        return ""

    def _row(self, table: Tensor, origin: fx.Node) -> fx.Node:
        """Insert what reads each row's place of a table. Equal tables are one, and so are their rows."""
        known = [row for other, row in self.tables if torch.equal(other, table)]
        if known:
            return known[0]
        places = self._places()
        with self.graph.inserting_before(places.next):
            weight = attribute(self.module, f"position_table_{len(self.tables)}", table, origin, self.made_by)
            row = Inserter(self.graph, origin, self.made_by)(aten.index.Tensor, weight, [places])
        for made in (weight, row):
            mark(made, None)
        self.tables.append((table, row))
        return row

    def _places(self) -> fx.Node:
        """The row of a table for each row: its position, and the first one for a row that is not there."""
        if self.place is None:
            with self.graph.inserting_after([n for n in self.graph.nodes if n.op == "placeholder"][-1]):
                emit = Inserter(self.graph, next(iter(self.position.users)), self.made_by)
                self.place = emit(aten.clamp.default, self.position, 0, self.rows - 1)
            mark(self.place, None)
        return self.place

    def _table(self, node: fx.Node) -> Tensor | None:
        """Return the node's value at every position, stacked; None: it is not known here."""
        places = torch.arange(self.rows)[:, None]
        if evaluate(self.module, node, {self.position: places[0]}) is None:
            return None

        def value(place: Tensor) -> Any:
            return evaluate(self.module, node, {self.position: place})

        return torch.func.vmap(value)(places).contiguous()
