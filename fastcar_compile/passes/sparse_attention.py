"""Sparse attention: sinks and a sliding window over ring caches, whose size does not depend on max_seq_len."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import fx

from fastcar_compile.errors import CompileError
from fastcar_compile.ir.layers import role_nodes
from fastcar_compile.ir.pass_manager import Pass
from fastcar_compile.ir.program import DecoderConfig, DecoderProgram, Ring
from fastcar_compile.ir.query import is_op
from fastcar_compile.ir.rings import RingRows, softcap_of, window_of
from fastcar_compile.passes.patterns.ring_caches import RingRewriter, reads_keys, refresh_shapes, rows_needed
from fastcar_compile.passes.patterns.sink_query import SinkQueries

fastcar = torch.ops.fastcar


@dataclass(frozen=True)
class SparsifyAttention(Pass):
    """Make every attention see the first `sinks` tokens and the last `window` ones, in both graphs.

    1. `fastcar.cache_write` becomes `fastcar.ring_write`, and the key and value caches become rings.
    2. `fastcar.attention` becomes `fastcar.window_attention`. With positions inside the cache it also gets the query
       that meets the sinks.
    3. A score that reads the key of one frame earlier keeps it: the ring then holds at least a frame and a token.
    4. A layer whose own window is no longer than `window` keeps it, and has no sinks.

    Options:
        sinks, window: tokens.
        positions: "absolute", or "cache": rotary positions inside the cache.
    """

    name: ClassVar[str] = "sparse-attention"
    reason: ClassVar[str] = "Attention reads sinks and a sliding window from a ring cache of constant size."
    sinks: int = 16
    window: int = 256
    positions: Literal["absolute", "cache"] = "absolute"

    def apply(self, program: DecoderProgram) -> bool:
        """Raise CompileError where there is no attention to rewrite yet, or it is sparse in another way already."""
        before = program.config.ring
        if before is not None and (before.sinks, before.window, before.positions) == dataclasses.astuple(self):
            return False
        self._check(program)
        config = program.config
        scored = bool(reads_keys(program))
        ring = Ring(self.sinks, self.window, rows_needed(config, self.window, scored=scored), self.positions)
        for module in program.graphs():
            _Rewriter(module, ring, config).run()
        refresh_shapes(program)
        program.config = dataclasses.replace(config, ring=ring)
        return True

    def _check(self, program: DecoderProgram) -> None:
        if program.config.ring is not None:
            hint = "name the pass once in the pipeline"
            raise CompileError(f"sparse-attention ran already, as {program.config.ring}", hint=hint)
        if not role_nodes(program.graph_module):
            what = "sparse-attention finds no attention sites"
            raise CompileError(what, hint="run it after normalize-state and find-sites")
        if self.window < 1 or self.sinks < 0:
            what = f"sparse-attention cannot have a window of {self.window} and {self.sinks} sinks"
            raise CompileError(what, hint="give a window of at least 1 token and no negative number of sinks")
        if self.positions not in ("absolute", "cache"):
            raise CompileError(f"positions are {self.positions!r}", hint="give 'absolute' or 'cache'")


class _Rewriter:
    """Rewrites one graph."""

    def __init__(self, module: fx.GraphModule, ring: Ring, config: DecoderConfig) -> None:
        self.graph, self.ring = module.graph, ring
        self.caches = RingRewriter(module, config, SparsifyAttention.name)
        # Without sinks every key keeps its distance to the query, so positions in the cache change nothing.
        in_cache = ring.positions == "cache" and ring.sinks > 0
        self.queries = SinkQueries(module, ring.attended - 1, SparsifyAttention.name) if in_cache else None

    def run(self) -> None:
        attentions = [n for n in self.graph.nodes if self._applies(n)]
        for node in attentions:
            self.caches.caches_of(node, RingRows(self.ring.sinks, self.ring.rows))
        for node in attentions:
            self._attention(node)
        # Last, because the row of an earlier key follows from the ring that its cache has become.
        self.caches.find_keys()

    def _applies(self, node: fx.Node) -> bool:
        """Whether it is an attention that sees more than the option's window."""
        own = window_of(node)
        return is_op(node, fastcar.attention) or (own is not None and own.window > self.ring.window)

    def _attention(self, node: fx.Node) -> None:
        query, *others = node.args[:5]
        sink_query = None if self.queries is None else self.queries.of(node)
        arguments = (query, *others, self.ring.sinks, self.ring.window, sink_query)
        if (softcap := softcap_of(node)) is not None:
            arguments = (*arguments, softcap)
        self.caches.replace(node, fastcar.window_attention.default, arguments)
