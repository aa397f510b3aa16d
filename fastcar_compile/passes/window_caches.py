"""Caches of layers with a sliding window of their own: rings that hold what is still read."""

from __future__ import annotations

import torch
from torch import fx

from fastcar_compile.ir.layers import RingRows, window_of
from fastcar_compile.ir.pass_manager import Pass
from fastcar_compile.ir.program import DecoderProgram
from fastcar_compile.ir.query import is_op, node_arg, shape_of
from fastcar_compile.passes.patterns.caches import RingRewriter, reads_keys, refresh_shapes, rows_needed

fastcar = torch.ops.fastcar


class WindowCaches(Pass):
    """Keep of keys and values only the rows that a window of the model's own still reads, in both graphs.

    1. Matches every `fastcar.window_attention` over caches that `fastcar.cache_write` writes.
    2. The caches become rings of the window's rows, and those that a chunk adds (`rows_needed`). Where a score reads
       the key of one frame earlier, the ring holds at least a frame and a token.
    3. A cache of no more positions than that stays as it is.
    """

    name = "window-caches"
    reason = "The model's own window reads the last tokens only, so keys and values are kept in a ring."

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
        rows = rows_needed(program.config, window.window, scored=str(cache.target) in scored)
        return RingRows(window.sinks, rows) if window.sinks + rows < shape_of(cache)[2] else None
