"""Sparse attention: sinks and a sliding window over ring caches, whose size does not depend on max_seq_len."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import fx

from fastcar_compile.errors import CompileError
from fastcar_compile.ir.layers import role_nodes
from fastcar_compile.ir.pass_manager import Pass
from fastcar_compile.ir.program import DecoderConfig, DecoderProgram, Ring
from fastcar_compile.ir.provenance import where
from fastcar_compile.ir.query import argument_names, is_op, node_arg, placeholder, value_of
from fastcar_compile.ir.rewrite import call, fake_like, replace
from fastcar_compile.passes.patterns.earlier_key import earlier_key, reads_earlier_key
from fastcar_compile.passes.patterns.sink_query import SinkQueries

fastcar = torch.ops.fastcar


@dataclass(frozen=True)
class SparsifyAttention(Pass):
    """Make every attention see the first `sinks` tokens and the last `window` ones, in both graphs.

    1. `fastcar.cache_write` becomes `fastcar.ring_write`, and the key and value caches become rings.
    2. `fastcar.attention` becomes `fastcar.window_attention`. With positions inside the cache it also gets the query
       that meets the sinks.
    3. A score that reads the key of one frame earlier keeps it: the ring then holds at least a frame and a token.

    Options:
        sinks, window: tokens.
        positions: "absolute", or "cache": rotary positions inside the cache.
    """

    name: ClassVar[str] = "sparse-attention"
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
        ring = Ring(self.sinks, self.window, self._rows(program), self.positions)
        for module in program.graphs():
            _Rewriter(module, ring, config).run()
        shape = {s.name: (*s.shape[:2], ring.capacity, s.shape[3]) for s in program.state if len(s.shape) == 4}
        program.state = [dataclasses.replace(s, shape=shape.get(s.name, s.shape)) for s in program.state]
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

    def _rows(self, program: DecoderProgram) -> int:
        """Positions past the sinks that the ring holds.

        A chunk is written before it is attended to, and may be padded: its other tokens come on top of what the first
        one, and the token after it, still read.
        """
        config = program.config
        scores = any(reads_earlier_key(n) for n in program.graph_module.graph.nodes)
        kept = max(self.window, config.tokens_per_frame + 1) if scores else self.window
        return kept + max(config.prefill_chunk, 1) - 1


class _Rewriter:
    """Rewrites one graph."""

    def __init__(self, module: fx.GraphModule, ring: Ring, config: DecoderConfig) -> None:
        self.module, self.graph, self.ring = module, module.graph, ring
        self.config = dataclasses.replace(config, ring=ring)
        self.position = placeholder(module.graph, "position")
        in_cache = ring.positions == "cache" and ring.sinks > 0
        self.queries = SinkQueries(module, ring.attended - 1, SparsifyAttention.name) if in_cache else None

    def run(self) -> None:
        attentions = [n for n in self.graph.nodes if is_op(n, fastcar.attention)]
        for node in attentions:
            for cache in (node_arg(node, 1), node_arg(node, 2)):
                self._write(cache)
        for node in attentions:
            self._attention(node)
        scores = [n for n in self.graph.nodes if reads_earlier_key(n)]
        for node in scores:
            names, arguments = argument_names(node), list(node.args)
            row, stride = earlier_key(self.graph, self.config, node, SparsifyAttention.name)
            arguments[names.index("position")], arguments[names.index("stride")] = row, stride
            node.args = tuple(arguments)

    def _replace(self, node: fx.Node, target: Any, arguments: tuple[Any, ...]) -> None:
        with self.graph.inserting_before(node):
            new = call(self.graph, target, arguments, origin=node, made_by=SparsifyAttention.name)
        replace(node, new)

    def _write(self, node: fx.Node) -> None:
        cache, value = node_arg(node, 0), node_arg(node, 1)
        if not is_op(node, fastcar.cache_write) or cache.op != "placeholder":
            what = "this cache is not written by fastcar.cache_write"
            raise CompileError(what, where=where(node), hint="run sparse-attention after normalize-state")
        old = value_of(cache)
        shape = (*old.shape[:2], self.ring.capacity, old.shape[3])
        cache.meta["val"] = fake_like(self.graph, torch.empty(shape, dtype=old.dtype, device="meta"))
        self._replace(node, fastcar.ring_write.default, (cache, value, self.position, self.ring.sinks))

    def _attention(self, node: fx.Node) -> None:
        query, *others = node.args[:5]
        sink_query = None if self.queries is None else self.queries.of(node)
        arguments = (query, *others, self.ring.sinks, self.ring.window, sink_query)
        self._replace(node, fastcar.window_attention.default, arguments)
