"""Where a score finds the key of one frame earlier, in a full cache and in a ring."""

from __future__ import annotations

import torch
from torch import fx

from fastcar_compile.ir.layers import mark
from fastcar_compile.ir.program import DecoderConfig
from fastcar_compile.ir.query import argument_names, is_op, node_arg, placeholder
from fastcar_compile.ir.rewrite import call
from fastcar_compile.ir.rings import ring_of

fastcar = torch.ops.fastcar


def earlier_key(config: DecoderConfig, cache: fx.Node, origin: fx.Node, made_by: str) -> tuple[fx.Node, int]:
    """Return (position, stride) with which a score finds the key of one frame earlier at row `position - stride`.

    In a ring cache that is a computed row and stride 0; the row is computed once for all layers whose rings are alike.

    Args:
        cache: the written key cache that the score reads.
    """
    graph = cache.graph
    position, ring = placeholder(graph, "position"), ring_of(cache)
    # A full cache has one row per position, so one frame earlier is `tokens_per_frame` rows back.
    if ring is None:
        return position, config.tokens_per_frame
    arguments = (position, config.tokens_per_frame, ring.sinks, ring.rows)
    rows = [n for n in position.users if is_op(n, fastcar.ring_row) and n.args == arguments]
    if not rows:
        # The row follows from the position alone. Right behind the
        # inputs, it stands in front of every layer that reads it.
        last = [n for n in graph.nodes if n.op == "placeholder"][-1]
        with graph.inserting_after(last):
            rows = [call(graph, fastcar.ring_row.default, arguments, origin=origin, made_by=made_by)]
        mark(rows[0], None)
    return rows[0], 0


def reads_earlier_key(node: fx.Node) -> bool:
    """Return whether the operator reads a key at row `position - stride` of a key cache that it is given."""
    # An `offloaded_gate` whose gate compares no query has the argument `key_cache`, and None in it.
    names = argument_names(node)
    return {"key_cache", "position", "stride"} <= set(names) and node.args[names.index("key_cache")] is not None


def key_cache_of(score: fx.Node) -> fx.Node:
    """Return the written key cache that a score reads."""
    return node_arg(score, argument_names(score).index("key_cache"))


def find_again(config: DecoderConfig, score: fx.Node, made_by: str) -> None:
    """Let a score find its key where it is now, after its cache became a ring."""
    names, arguments = argument_names(score), list(score.args)
    row, stride = earlier_key(config, key_cache_of(score), score, made_by)
    arguments[names.index("position")], arguments[names.index("stride")] = row, stride
    score.args = tuple(arguments)
