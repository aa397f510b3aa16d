"""A prefill graph for more rows: videos of a calibration share its batches, whatever an artifact was compiled for."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from fastcar_compile.ir.program import DecoderProgram, StateSpec
from fastcar_compile.ir.query import is_op, output_nodes, placeholder_names

aten = torch.ops.aten
SIZED = (aten.view, aten.reshape, aten._unsafe_view, aten.expand)
"""Operators whose second argument is a shape. Rows are the outermost axis of what they reshape."""

AGREEMENT = 0.05
"""Greatest difference of logits between both graphs, as a share of the largest: int8 activations may differ."""

Values = dict[fx.Node, Any]


def with_rows(program: DecoderProgram, rows: int) -> DecoderProgram:
    """Return the program with a prefill graph for this many rows, and no decode step to use with it.

    The graph is checked against the given one on the same tokens. Where it does not agree, because it reshapes rows in
    another way than SIZED says, the result is the program itself, which is measured in its own batches.
    """
    config = program.config
    if program.prefill is None or rows <= config.batch_size or config.token_ids is None or config.vocab_size is None:
        return program
    if config.context is not None:
        return program
    graph = fx.Graph()
    graph.output(graph.graph_copy(program.prefill.graph, {}))
    specs = [_widened(spec, config.batch_size, rows) for spec in program.state]
    wide = replace(program, config=replace(config, batch_size=rows), state=specs)
    wide.prefill = fx.GraphModule(program.prefill, graph)
    try:
        with torch.inference_mode():
            return wide if _fit(program, wide) else program
    except (RuntimeError, ValueError, IndexError):  # a shape that does not fit
        return program


def of_prefill(program: DecoderProgram) -> DecoderProgram:
    """Return the program with the sizes of its prefill graph, which reads one video where rows have own positions."""
    config = program.config
    if config.rows is None:
        return program
    specs = [_widened(spec, config.batch_size, 1) for spec in program.state]
    return replace(program, config=replace(config, batch_size=1), state=specs)


def _widened(spec: StateSpec, old: int, rows: int) -> StateSpec:
    return replace(spec, shape=(rows, *spec.shape[1:])) if spec.shape[:1] == (old,) else spec


def _fit(program: DecoderProgram, wide: DecoderProgram) -> bool:
    """Change the shapes in the wide graph to its rows. Return whether both graphs have the same logits then.

    Both run side by side, and a shape changes where the value that it is applied to has grown with the rows.
    """
    old, rows, chunk = program.config.batch_size, wide.config.batch_size, program.config.prefill_chunk
    # The ids vary over rows and positions, so rows that were mixed up give other logits.
    ids = torch.arange(rows * chunk).view(rows, chunk) * 7 % (program.config.token_ids or 1)
    assert program.prefill is not None
    assert wide.prefill is not None
    narrow = _Run(program, ids[:old]).env
    pairs = dict(zip(wide.prefill.graph.nodes, program.prefill.graph.nodes, strict=True))

    def resize(node: fx.Node, found: Values) -> None:
        source, sizes = node.args[0], node.args[1] if len(node.args) > 1 else None
        if not isinstance(source, fx.Node) or not isinstance(sizes, list | tuple) or not isinstance(sizes[0], int):
            return
        grown = found[source].numel() * old == narrow[pairs[source]].numel() * rows
        # A value of the rows grows with them; a constant does not, and its shape stays.
        if grown and sizes[0] > 0:
            node.args = (source, [sizes[0] * rows // old, *sizes[1:]], *node.args[2:])

    found = _Run(wide, ids, resize).env
    for node, value in found.items():
        if isinstance(value, Tensor) and node.op != "get_attr":
            node.meta["val"] = torch.empty_like(value, device="meta")
    logits, last = _logits(wide, found), _logits(program, _Run(program, ids[rows - old :]).env)
    # The first and the last rows are compared: both ends would show a shape that mixes rows.
    both = ((logits[:old], _logits(program, narrow)), (logits[rows - old :], last))
    return all(float((a - b).abs().max()) <= AGREEMENT * float(b.abs().max()) for a, b in both)


class _Run(fx.Interpreter):
    """A run of a prefill graph at position 0. `before` sees the SIZED nodes first.

    Attributes:
        env: the values of all nodes.
    """

    def __init__(
        self, program: DecoderProgram, ids: Tensor, before: Callable[[fx.Node, Values], None] | None = None
    ) -> None:
        assert program.prefill is not None
        super().__init__(program.prefill, garbage_collect_values=False)
        self._before = before
        given = {spec.name: spec.zeros() for spec in program.state}
        given |= {program.config.input_name: ids, "position": torch.zeros(1, dtype=torch.int64)}
        self.run(*(given[name] for name in placeholder_names(program.prefill)))

    def run_node(self, n: fx.Node) -> Any:
        """Return a node's value."""
        if self._before is not None and is_op(n, *SIZED):
            self._before(n, self.env)
        return super().run_node(n)


def _logits(program: DecoderProgram, known: Values) -> Tensor:
    assert program.prefill is not None
    names = dict(zip(program.prefill_outputs, output_nodes(program.prefill.graph), strict=True))
    return known[names["logits"]]
