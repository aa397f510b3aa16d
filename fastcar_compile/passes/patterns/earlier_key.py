"""Where a score finds the key of one frame earlier, in a full cache and in a ring."""

from __future__ import annotations

import torch
from torch import fx

from fastcar_compile.ir.program import DecoderConfig
from fastcar_compile.ir.rewrite import call, is_op, placeholder

fastcar = torch.ops.fastcar


def earlier_key(graph: fx.Graph, config: DecoderConfig, origin: fx.Node, made_by: str) -> tuple[fx.Node, int]:
    """(position, stride) with which a score finds the key of one frame earlier at row `position - stride`.

    In a ring cache that is a computed row and stride 0; the row is computed once for all layers.
    """
    position, ring = placeholder(graph, "position"), config.ring
    if ring is None:
        return position, config.tokens_per_frame
    rows = [n for n in position.users if is_op(n, fastcar.ring_row)]
    if not rows:
        last = [n for n in graph.nodes if n.op == "placeholder"][-1]
        with graph.inserting_after(last):
            arguments = (position, config.tokens_per_frame, ring.sinks, ring.rows)
            rows = [call(graph, fastcar.ring_row.default, arguments, origin=origin, made_by=made_by)]
    return rows[0], 0


def argument_names(node: fx.Node) -> list[str]:
    """Names of an operator's parameters, in order; none for other nodes."""
    schema = getattr(node.target, "_schema", None)
    return [a.name for a in schema.arguments] if schema and node.op == "call_function" else []


def reads_earlier_key(node: fx.Node) -> bool:
    """Whether the operator reads a key at row `position - stride` of a key cache."""
    return {"key_cache", "position", "stride"} <= set(argument_names(node))
