"""Where a score finds the key of one frame earlier, in a full cache and in a ring."""

from __future__ import annotations

import dataclasses

import torch
from torch import fx

from fastcar_compile.ir.layers import RingRows, mark, ring_of
from fastcar_compile.ir.program import DecoderProgram
from fastcar_compile.ir.provenance import error_at
from fastcar_compile.ir.query import argument_names, bound, is_op, node_arg, placeholder, value_of
from fastcar_compile.ir.rewrite import after, fake_like, replace, replace_call
from fastcar_compile.ir.types import DecoderConfig

aten, fastcar = torch.ops.aten, torch.ops.fastcar


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
        with after(last, made_by, origin=origin) as emit:
            rows = [emit(fastcar.ring_row.default, *arguments)]
        mark(rows[0], None)
    return rows[0], 0


def reads_earlier_key(node: fx.Node) -> bool:
    """Return whether the operator reads a key at row `position - stride` of a key cache that it is given."""
    # An `offloaded_gate` whose gate compares no query has the argument `key_cache`, and None in it.
    names = argument_names(node)
    return {"key_cache", "position", "stride"} <= set(names) and bound(node)["key_cache"] is not None


# Full caches become rings: placeholders, writes, and where scores find the key of one frame earlier.


def rows_needed(config: DecoderConfig, window: int, *, scored: bool) -> int:
    """Return the positions past the sinks that a ring holds.

    A chunk is written before it is attended to, and may be padded: its other tokens come on top of what the first
    one, and the token after it, still read.

    Args:
        scored: a score reads the key of one frame earlier.
    """
    kept = max(window, config.tokens_per_frame + 1) if scored else window
    return kept + max(config.prefill_chunk, 1) - 1


class RingRewriter:
    """Makes caches of one graph rings."""

    def __init__(self, module: fx.GraphModule, config: DecoderConfig, made_by: str) -> None:
        self.graph, self.config, self.made_by = module.graph, config, made_by
        self.position = placeholder(module.graph, "position")

    def caches_of(self, attention: fx.Node, ring: RingRows) -> None:
        """Make key and value cache of an attention rings."""
        for index in (0, 1):
            self._write(node_arg(attention, 1 + index), ring)

    def find_keys(self) -> None:
        """Let the scores find their keys in the caches that are rings now."""
        for node in [n for n in self.graph.nodes if reads_earlier_key(n)]:
            if ring_of(bound(node)["key_cache"]) is not None:
                position, stride = earlier_key(self.config, bound(node)["key_cache"], node, self.made_by)
                node.update_arg(argument_names(node).index("position"), position)
                node.update_arg(argument_names(node).index("stride"), stride)

    def _write(self, node: fx.Node, ring: RingRows) -> None:
        cache, value = node_arg(node, 0), node_arg(node, 1)
        if not is_op(node, fastcar.cache_write) or cache.op != "placeholder":
            what = "this cache is not written by fastcar.cache_write"
            raise error_at(node, what, f"run {self.made_by} after normalize-state")
        # The placeholder keeps its name and its readers; its rows shrink from max_seq_len to those of the ring.
        old = value_of(cache)
        shape = (*old.shape[:2], ring.sinks + ring.rows, old.shape[3])
        cache.meta["val"] = fake_like(self.graph, torch.empty(shape, dtype=old.dtype, device="meta"))
        replace_call(node, self.made_by, fastcar.ring_write.default, cache, value, self.position, ring.sinks)


def reads_keys(program: DecoderProgram) -> set[str]:
    """Return the names of the key caches of which a score reads the key of one frame earlier."""
    written = [bound(n)["key_cache"] for n in program.graph_module.graph.nodes if reads_earlier_key(n)]
    return {str(node_arg(w, 0).target) for w in written if is_op(w, fastcar.cache_write, fastcar.ring_write)}


def refresh_shapes(program: DecoderProgram) -> None:
    """Give the states the shapes that their placeholders have."""
    graph = program.graph_module.graph
    shapes = {str(n.target): tuple(value_of(n).shape) for n in graph.find_nodes(op="placeholder")}
    program.state = [dataclasses.replace(s, shape=shapes[s.name]) for s in program.state]


# Memory layouts: what a model may write behind a tensor depends on its strides, which a rewrite may change.


_SAME_MEMORY = (aten.transpose, aten.permute, aten.t, aten.unsqueeze, aten.squeeze, aten.alias, aten.detach)


def replace_layout(old: fx.Node, new: fx.Node) -> None:
    """Put `new` in the place of `old`, whose memory layout may be another one."""
    # torch.export recorded the views behind the old node for its strides.
    if value_of(new).stride() != value_of(old).stride():
        free_views(old)
    replace(old, new)


def free_views(node: fx.Node) -> None:
    """Turn views of a node, whose layout a rewrite has changed, into reshapes: they are right for any layout."""
    for user in node.users:
        if is_op(user, aten.view):
            user.target = aten.reshape.default
        elif is_op(user, *_SAME_MEMORY):
            free_views(user)
