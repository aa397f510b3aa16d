"""Where a score finds the key of one frame earlier, in a full cache and in a ring."""

from __future__ import annotations

import torch
from torch import fx

from fastcar_compile.ir.layers import mark
from fastcar_compile.ir.program import DecoderConfig
from fastcar_compile.ir.query import argument_names, is_op, placeholder
from fastcar_compile.ir.rewrite import call

fastcar = torch.ops.fastcar


def earlier_key(graph: fx.Graph, config: DecoderConfig, origin: fx.Node, made_by: str) -> tuple[fx.Node, int]:
    """Return (position, stride) with which a score finds the key of one frame earlier at row `position - stride`.

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
        mark(rows[0], None)
    return rows[0], 0


def reads_earlier_key(node: fx.Node) -> bool:
    """Return whether the operator reads a key at row `position - stride` of a key cache that it is given."""
    names = argument_names(node)
    return {"key_cache", "position", "stride"} <= set(names) and node.args[names.index("key_cache")] is not None
