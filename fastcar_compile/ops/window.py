"""Sparse attention over a ring cache: ring_row, limit, ring_write, window_attention.

docs/explanation/sparse_attention.md says why.

A ring cache [B, Hkv, sinks + R, D] keeps the first `sinks` positions and the last R others. Position p >= sinks is in
row sinks + (p - sinks) mod R.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastcar_compile.ops.attention import capped
from fastcar_compile.ops.cached import loaded, stored
from fastcar_compile.ops.operator import operator


def row_of(position: Tensor, sinks: int, ring: int) -> Tensor:
    """Return the rows of sequence positions int64 [...] in a ring cache of `sinks` + `ring` rows."""
    return torch.where(position < sinks, position, sinks + (position - sinks) % ring)


@operator("ring_row", reason="The row of the ring cache that this position has.")
def ring_row(position: Tensor, back: int, sinks: int, ring: int) -> Tensor:
    """Return the row of position `position - back` (clamped to 0), int64 [1], for position int64 [1]."""
    return row_of((position - back).clamp(min=0), sinks, ring)


@ring_row.register_fake
def _(position: Tensor, back: int, sinks: int, ring: int) -> Tensor:
    return torch.empty_like(position)


@operator("limit", reason="A position inside of the cache or table that is read: at most its last row.")
def limit(positions: Tensor, most: int) -> Tensor:
    """Return min(positions, most), int64 of any shape: positions in a cache of `most` + 1."""
    return positions.clamp(max=most)


@limit.register_fake
def _(positions: Tensor, most: int) -> Tensor:
    return torch.empty_like(positions)


@operator("ring_write", reason="This token's key or value is written into the ring cache.")
def ring_write(cache: Tensor, value: Tensor, position: Tensor, sinks: int) -> Tensor:
    """Return a ring cache [B, Hkv, sinks + R, D] with value [B, Hkv, T, D] written from `position` on.

    T is at most R, so no row is written twice. `stored` defines the rows.
    """
    positions = int(position) + torch.arange(value.shape[2], device=cache.device)
    out = cache.clone()
    out[:, :, row_of(positions, sinks, cache.shape[2] - sinks)] = stored(value, cache.dtype)
    return out


@ring_write.register_fake
def _(cache: Tensor, value: Tensor, position: Tensor, sinks: int) -> Tensor:
    return torch.empty_like(cache)


@operator("window_attention", reason="Attention that reads the sinks and the last tokens from the ring cache.")
def window_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    position: Tensor,
    scale: float,
    sinks: int,
    window: int,
    sink_query: Tensor | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Return causal grouped-query attention to the sinks and to a sliding window.

    Args:
        query: float32 [B, Hq, T, D], already rotated.
        key_cache, value_cache: [B, Hkv, sinks + R, D] as `stored` defines, ring caches written up to position
            position + T - 1. R is at least window + T - 1.
        position: int64 [1], sequence position of query row 0.
        scale: factor on the logits.
        sinks, window: query row i at p = position + i sees keys 0 .. sinks - 1 and p - window + 1 .. p, none after p.
        sink_query: float32 [B, Hq, T, D], the query for the sinks; None: `query`.
        softcap: as in `fastcar::attention`.

    Returns:
        float32 [B, Hq, T, D].
    """
    # The chunk is written before it is attended to, so `end` positions are in the ring.
    start, end = int(position), int(position) + query.shape[2]
    ring = key_cache.shape[2] - sinks
    here = torch.arange(start, end, device=query.device)
    first = torch.arange(min(sinks, end), device=query.device)
    recent = torch.arange(min(max(sinks, start - window + 1), end), end, device=query.device)
    # Sinks and window as positions; the two overlap nowhere, because `recent` starts behind the sinks.
    columns = torch.cat([first, recent])
    rows = row_of(columns, sinks, ring)
    group = query.shape[1] // key_cache.shape[1]
    dim = query.shape[3]
    # Gathered in the order of positions, so the columns below are those of `columns`.
    keys, values = (loaded(c[:, :, rows], dim).repeat_interleave(group, 1) for c in (key_cache, value_cache))
    seen = (columns <= here[:, None]) & ((columns < sinks) | (columns > here[:, None] - window))
    logits = query @ keys.transpose(-1, -2)
    if sink_query is not None:
        # Sinks come first among the columns, so theirs are replaced as one slice.
        logits[..., : len(first)] = sink_query @ keys[:, :, : len(first)].transpose(-1, -2)
    return torch.softmax(capped(logits * scale, softcap).masked_fill(~seen, -torch.inf), -1) @ values


@window_attention.register_fake
def _(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    position: Tensor,
    scale: float,
    sinks: int,
    window: int,
    sink_query: Tensor | None = None,
    softcap: float | None = None,
) -> Tensor:
    return torch.empty(query.shape, dtype=query.dtype, device=query.device)
