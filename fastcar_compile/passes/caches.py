"""Key and value caches: rings for sparse attention and for windows of the model, and rows of fewer bytes."""

from collections.abc import Callable
from dataclasses import astuple, dataclass, replace
from typing import Literal

import torch
from torch import Tensor, fx

from fastcar_compile.config.formats import KV_TYPES
from fastcar_compile.errors import CompileError
from fastcar_compile.ir.dataflow import evaluate
from fastcar_compile.ir.layers import RingRows, layer_of, mark, ring_of, role_nodes, softcap_of, window_of
from fastcar_compile.ir.pass_manager import Pass
from fastcar_compile.ir.program import DecoderProgram
from fastcar_compile.ir.provenance import error_at
from fastcar_compile.ir.query import argument_names, bound, index_of, is_op, node_arg, placeholder, shape_of, value_of
from fastcar_compile.ir.rewrite import after, fake_like, fake_value, replace_call, set_origin
from fastcar_compile.ir.sites import Rotations
from fastcar_compile.ir.types import ATTENTION_ROLES, DecoderConfig, Ring

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


def rows_needed(config: DecoderConfig, window: int, *, scored: bool, together: int) -> int:
    """Return the positions past the sinks that a ring holds.

    A chunk is written before it is attended to, and may be padded: its other tokens come on top of what the first
    one, and the token after it, still read. So do the rows of a video in a decode step.

    Args:
        scored: a score reads the key of one frame earlier. together: successive positions that the rows of a video, in
            a decode step, are among.
    """
    kept = max(window, config.tokens_per_frame + 1) if scored else window
    return kept + max(config.prefill_chunk, together) - 1


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
                node.update_arg(index_of(node.target, "position"), position)
                node.update_arg(index_of(node.target, "stride"), stride)

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
    """Give the states the shapes that their placeholders have, and rings their sinks."""
    graph = program.graph_module.graph
    shapes = {str(n.target): tuple(value_of(n).shape) for n in graph.find_nodes(op="placeholder")}
    rings = {str(node_arg(n, 0).target): ring.sinks for n in graph.nodes if (ring := ring_of(n)) is not None}
    program.state = [replace(s, shape=shapes[s.name], sinks=rings.get(s.name)) for s in program.state]


# Rotary positions inside the cache: the query that meets the sinks, rotated for its position in the cache.
#
# With positions inside the cache (StreamingLLM), keys of the window keep their distance to the query; only the sinks
# come nearer: a query at p has position min(p, sinks + window - 1). Sinks are cached at their own positions already.
# So no key has to be cached before its rotation: the sinks meet a second query, rotated for the limited position.


_HINT = "use positions='absolute', which needs no rotation"
_PROBES = (3, 40)
"""Positions at which the rotation is evaluated."""


class SinkQueries:
    """Adds the second query of each attention to one graph.

    Args:
        limit: the largest position in the cache, sinks + window - 1. made_by: name of the pass.
    """

    def __init__(self, module: fx.GraphModule, limit: int, made_by: str) -> None:
        self.module, self.graph, self.limit, self.made_by = module, module.graph, limit, made_by
        self.position = placeholder(module.graph, "position")
        self._limited: dict[fx.Node, fx.Node] = {}
        self._rotations = Rotations(module.graph)

    def of(self, attention: fx.Node) -> fx.Node:
        """The second query of an attention.

        Raises:
            CompileError: query and key are not rotated by the position alone, or the product of both depends on more
                than their distance.
        """
        query, write = node_arg(attention, 0), node_arg(attention, 1)
        rotated = self._rotations.of(query)
        if not rotated:
            what = "positions='cache' needs rotary embeddings: this query does not depend on the position by itself"
            raise error_at(attention, what, _HINT)
        self._check_distance(attention, query, node_arg(write, 1))
        # The projection is shared by both queries; only the rotation behind it is computed twice.
        copies: dict[fx.Node, fx.Node] = {}
        for node in [n for n in self.graph.nodes if n in rotated]:
            with self.graph.inserting_before(attention):
                copies[node] = self._copy(node, lambda n: copies[n] if n in copies else self._limit(n))
        return copies[query]

    def _limit(self, node: fx.Node) -> fx.Node:
        """A node that follows from the position, with the position limited; any other as it is."""
        if node not in self._rotations.by_position:
            return node
        if node not in self._limited:
            self._limited[node] = self._limited_copy(node)
        return self._limited[node]

    def _limited_copy(self, node: fx.Node) -> fx.Node:
        if self._is_positions(node):
            return self._limited_positions(node)
        # At T = 1 `_is_positions` has taken the input. In a chunk,
        # the first position does not say where the others are.
        if node is self.position:
            what = "positions='cache': the positions of a chunk cannot be told from the position of its first token"
            raise error_at(node, what, _HINT)
        inputs = {n: self._limit(n) for n in node.all_input_nodes}
        with self.graph.inserting_after(node):
            return self._copy(node, lambda n: inputs[n])

    def _limited_positions(self, node: fx.Node) -> fx.Node:
        """Positions, limited. Where they have no source of their own, it is that of what reads them first."""
        origin = next((n for n in (node, *node.users) if "stack_trace" in n.meta), node)
        with after(node, self.made_by, origin=origin) as emit:
            limited = emit(fastcar.limit.default, node, self.limit)
        mark(limited, layer_of(node))
        return limited

    def _is_positions(self, node: fx.Node) -> bool:
        """Whether the node holds the sequence positions of this call's tokens."""
        val = node.meta["val"]
        if val.dtype != torch.int64 or val.numel() != self._tokens():
            return False
        for start in _PROBES:
            value = evaluate(self.module, node, {self.position: torch.tensor([start])})
            if value is None or not torch.equal(value.reshape(-1), torch.arange(start, start + val.numel())):
                return False
        return True

    def _tokens(self) -> int:
        attention = next(n for n in self.graph.nodes if is_op(n, fastcar.attention, fastcar.window_attention))
        return int(attention.meta["val"].shape[2])

    def _copy(self, node: fx.Node, replace: Callable[[fx.Node], fx.Node]) -> fx.Node:
        copied = self.graph.node_copy(node, replace)
        copied.meta = dict(node.meta)
        set_origin(copied, node, self.made_by)
        return copied

    def _check_distance(self, attention: fx.Node, query: fx.Node, key: fx.Node) -> None:
        """The product of a rotated query and a rotated key must stay when both positions move alike."""
        products: list[Tensor] = []
        for start in _PROBES:
            # Query and key are 17 positions apart at each probe.
            query_at, key_at = self._value_at(query, start + 17), self._value_at(key, start)
            if query_at is None or key_at is None or query_at.shape[1] % key_at.shape[1]:
                what = "positions='cache': the rotation of query and key cannot be evaluated"
                raise error_at(attention, what, _HINT)
            keys = key_at.repeat_interleave(query_at.shape[1] // key_at.shape[1], 1)
            products.append((query_at * keys).sum(-1))
        if not torch.allclose(*products, rtol=1e-3, atol=1e-3):
            what = "the product of query and key depends on more than distance"
            raise error_at(attention, f"positions='cache' needs rotary embeddings: {what}", _HINT)

    def _value_at(self, value: fx.Node, start: int) -> Tensor | None:
        """`value` with fixed numbers for what is rotated, at a position."""
        # Only the first of the inputs get numbers. What follows from another input is computed.
        sources = self._rotations.sources(value)
        known: dict[fx.Node, Tensor] = {n: _numbers(n) for n in sources} | {self.position: torch.tensor([start])}
        return evaluate(self.module, value, known) if sources else None


def _numbers(node: fx.Node) -> Tensor:
    """Fixed numbers of a node's shape, the same along the batch and the tokens, whose axes are not last."""
    shape = tuple(node.meta["val"].shape)
    return torch.sin(torch.arange(shape[-1], dtype=torch.float32) * 1.7 + 0.3).expand(shape).clone()


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
        rows: of each video in a decode step, at successive positions.
    """

    name = "sparse-attention"
    reason = "Attention reads sinks and a sliding window from a ring cache of constant size."
    sinks: int = 16
    window: int = 256
    positions: Literal["absolute", "cache"] = "absolute"
    rows: int = 1

    def apply(self, program: DecoderProgram) -> bool:
        """Raise CompileError where there is no attention to rewrite yet, or it is sparse in another way already."""
        before = program.config.ring
        if before is not None and (before.sinks, before.window, before.positions, self.rows) == astuple(self):
            return False
        self._check(program)
        config = program.config
        scored = bool(reads_keys(program))
        length = rows_needed(config, self.window, scored=scored, together=self.rows)
        ring = Ring(self.sinks, self.window, length, self.positions)
        for module in program.graphs():
            _make_sparse(module, ring, config)
        refresh_shapes(program)
        program.config = replace(config, ring=ring)
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
        if self.sinks + self.window >= (length := program.config.max_seq_len):
            what = f"sparse attention to {self.sinks} sinks and {self.window} tokens sees all of the {length} positions"
            raise CompileError(what, hint="leave it out, give fewer sinks or a smaller window, or a larger max_seq_len")


def _make_sparse(module: fx.GraphModule, ring: Ring, config: DecoderConfig) -> None:
    """Rewrite the attentions of one graph that see more than the option's window."""
    made_by, caches = SparsifyAttention.name, RingRewriter(module, config, SparsifyAttention.name)
    # Without sinks every key keeps its distance to the query, so positions in the cache change nothing.
    in_cache = ring.positions == "cache" and ring.sinks > 0
    queries = SinkQueries(module, ring.attended - 1, made_by) if in_cache else None
    attentions = [n for n in module.graph.nodes if is_op(n, fastcar.attention, fastcar.window_attention)]
    attentions = [n for n in attentions if (own := window_of(n)) is None or own.window > ring.window]
    for node in attentions:
        caches.caches_of(node, RingRows(ring.sinks, ring.rows))
    for node in attentions:
        softcap = () if (cap := softcap_of(node)) is None else (cap,)
        options = (ring.sinks, ring.window, None if queries is None else queries.of(node), *softcap)
        replace_call(node, made_by, fastcar.window_attention.default, *node.args[:5], *options)
    # Last, because the row of an earlier key follows from the ring that its cache has become.
    caches.find_keys()


@dataclass(frozen=True)
class WindowCaches(Pass):
    """Keep of keys and values only the rows that a window of the model's own still reads, in both graphs.

    1. Matches every `fastcar.window_attention` over caches that `fastcar.cache_write` writes.
    2. The caches become rings of the window's rows, and those that a chunk adds (`rows_needed`). Where a score reads
       the key of one frame earlier, the ring holds at least a frame and a token.
    3. A cache of no more positions than that stays as it is.

    Options:
        rows: rows of each video in a decode step.
    """

    name = "window-caches"
    reason = "The model's own window reads the last tokens only, so keys and values are kept in a ring."
    rows: int = 1

    def apply(self, program: DecoderProgram) -> bool:
        """Return whether there was a cache to shorten."""
        scored = reads_keys(program)
        modified = False
        for module in program.graphs():
            rewriter = RingRewriter(module, program.config, self.name)
            for node in [n for n in module.graph.nodes if is_op(n, fastcar.window_attention)]:
                ring = self._ring(program, node, scored)
                if ring is not None:
                    rewriter.caches_of(node, ring)
                    modified = True
            rewriter.find_keys()
        refresh_shapes(program)
        return modified

    def _ring(self, program: DecoderProgram, attention: fx.Node, scored: set[str]) -> RingRows | None:
        window, write = window_of(attention), node_arg(attention, 1)
        if window is None or not is_op(write, fastcar.cache_write):
            return None
        # A cache that sparse-attention made a ring is written by `ring_write`, and was left out above.
        cache = node_arg(write, 0)
        # Guesses are within a frame; of a prompt, rows read as many tokens as there are of them.
        together = max(program.config.tokens_per_frame, self.rows) if self.rows > 1 else 1
        rows = rows_needed(program.config, window.window, scored=str(cache.target) in scored, together=together)
        return RingRows(window.sinks, rows) if window.sinks + rows < shape_of(cache)[2] else None


TYPES = {name: getattr(torch, name) for name in KV_TYPES if name != "float32"}
"""float32 is what a captured decoder has."""


@dataclass(frozen=True)
class QuantizeKvCache(Pass):
    """Give the key and value caches of both graphs another type.

    1. Matches every float32 state of role key_cache or value_cache.
    2. Its placeholder and what is written of it get the type. No node is added: an operator that writes a cache rounds
       to the cache's type (`ir.ops.operator.stored`), and one that reads it widens the rows to float32.

    Options:
        dtype: a KV type (`config.formats.KV_TYPES`) other than "float32"; a row of "int8" is longer by its exponents.
    """

    name = "quantize-kv-cache"
    reason = "Keys and values are cached in fewer bytes."
    dtype: str = "float16"

    def apply(self, program: DecoderProgram) -> bool:
        """Raise CompileError for an unknown type, and where an operator that takes float32 only reads a cache."""
        if self.dtype not in TYPES:
            hint = f"use one of: {', '.join(sorted(TYPES))}"
            raise CompileError(f"no cache has the type {self.dtype!r}", where=self.name, hint=hint)
        caches = [s for s in program.state if s.role in ATTENTION_ROLES and s.dtype == torch.float32]
        for module in program.graphs():
            for spec in caches:
                self._quantize(module.graph, spec.name)
        made = {s: replace(s, shape=self._shape(s.shape), dtype=TYPES[self.dtype]) for s in caches}
        program.state = [made.get(s, s) for s in program.state]
        return bool(caches)

    def _shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return (*shape[:3], KV_TYPES[self.dtype].row_size(shape[3]))

    def _quantize(self, graph: fx.Graph, name: str) -> None:
        """Give a cache and what is written of it their new type."""
        cache = placeholder(graph, name)
        stored = torch.empty(self._shape(shape_of(cache)), dtype=TYPES[self.dtype], device="meta")
        cache.meta["val"] = fake_like(graph, stored)
        for write in cache.users:
            if not is_op(write, fastcar.cache_write, fastcar.ring_write):
                raise self._unknown(cache, write)
            # What the write returns follows from its cache: another type, and longer rows for int8.
            write.meta["val"] = fake_value(graph, write)
            # An ATen operator would take mantissas and exponents for keys.
            for reader in write.users:
                if reader.op != "output" and getattr(reader.target, "namespace", "") != "fastcar":
                    raise self._unknown(write, reader)

    def _unknown(self, cache: fx.Node, user: fx.Node) -> CompileError:
        what = f"{self.dtype} caches: {user.target} reads {cache.name} itself"
        return error_at(user, what, f'use kv="float32", or run {self.name} after normalize-state')
