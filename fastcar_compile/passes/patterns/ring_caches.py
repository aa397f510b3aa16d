"""Full caches become rings: placeholders, writes, and where scores find the key of one frame earlier."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import fx

from fastcar_compile.errors import CompileError
from fastcar_compile.ir.program import DecoderConfig, DecoderProgram
from fastcar_compile.ir.provenance import where
from fastcar_compile.ir.query import is_op, node_arg, placeholder, value_of
from fastcar_compile.ir.rewrite import call, fake_like, replace
from fastcar_compile.ir.rings import RingRows, ring_of
from fastcar_compile.passes.patterns.earlier_key import find_again, key_cache_of, reads_earlier_key

fastcar = torch.ops.fastcar


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
            if ring_of(key_cache_of(node)) is not None:
                find_again(self.config, node, self.made_by)

    def replace(self, node: fx.Node, target: Any, arguments: tuple[Any, ...], **options: Any) -> None:
        """Put a call in the place of a node."""
        with self.graph.inserting_before(node):
            new = call(self.graph, target, arguments, origin=node, made_by=self.made_by, **options)
        replace(node, new)

    def _write(self, node: fx.Node, ring: RingRows) -> None:
        cache, value = node_arg(node, 0), node_arg(node, 1)
        if not is_op(node, fastcar.cache_write) or cache.op != "placeholder":
            what = "this cache is not written by fastcar.cache_write"
            raise CompileError(what, where=where(node), hint=f"run {self.made_by} after normalize-state")
        # The placeholder keeps its name and its readers; its rows shrink from max_seq_len to those of the ring.
        old = value_of(cache)
        shape = (*old.shape[:2], ring.sinks + ring.rows, old.shape[3])
        cache.meta["val"] = fake_like(self.graph, torch.empty(shape, dtype=old.dtype, device="meta"))
        self.replace(node, fastcar.ring_write.default, (cache, value, self.position, ring.sinks))


def reads_keys(program: DecoderProgram) -> set[str]:
    """Return the names of the key caches of which a score reads the key of one frame earlier."""
    scores = [n for n in program.graph_module.graph.nodes if reads_earlier_key(n)]
    written = [key_cache_of(n) for n in scores]
    return {str(node_arg(w, 0).target) for w in written if is_op(w, fastcar.cache_write, fastcar.ring_write)}


def refresh_shapes(program: DecoderProgram) -> None:
    """Give the states the shapes that their placeholders have."""
    graph = program.graph_module.graph
    shapes = {str(n.target): tuple(value_of(n).shape) for n in graph.find_nodes(op="placeholder")}
    program.state = [dataclasses.replace(s, shape=shapes[s.name]) for s in program.state]
