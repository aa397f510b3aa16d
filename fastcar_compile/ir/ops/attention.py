"""Static KV cache operators: cache_write, attention, tas."""

from functools import partial

import torch
from torch import Tensor

from fastcar_compile.gates.scores import TAS_FRACTION_BITS, TAS_LIMIT, score_factor
from fastcar_compile.ir.ops.operator import each_row, loaded, operator, sharing, stored

# Sums of products in fixed point: integers of 2^-24, whose sum has no order.


def fixed_sum(products: Tensor, dims: tuple[int, ...]) -> Tensor:
    """Return the int64 sum over `dims` of float64 products of two float32, in units of 2^-24.

    Each product is exact (24 by 24 bits fit the 53 of a float64), then rounded half to even and limited to 2^46 units.
    One that is not finite counts as -2^46. At most 65,536 of them fit int64.
    """
    # A power of two: the scaling is exact, or infinite and then counted as the least value.
    units = products * (1 << TAS_FRACTION_BITS)
    limited = units.round().clamp(-TAS_LIMIT, TAS_LIMIT)
    return torch.where(units.isfinite(), limited, -TAS_LIMIT).to(torch.int64).sum(dims)


@operator("This token's key or value is written into the cache at its position.")
def cache_write(cache: Tensor, value: Tensor, position: Tensor) -> Tensor:
    """Return a cache [V, Hkv, S, D] with value [B, Hkv, T, D] written at rows position .. position + T - 1.

    `stored` defines the rows of a cache by its dtype. Rows at or beyond S are dropped, so a padded prefill chunk may
    reach past the end of the cache. `position` is int64 [1], or [B]: row b of the batch then writes at its own, in row
    set b // (B / V), and with position -1 nothing.
    """
    # The eager operator copies. The TVM backend writes in place, as nothing reads the old cache behind a write.
    out, share = cache.clone(), sharing(len(value), len(cache))
    for b, start in enumerate(position.expand(len(value)).tolist()):
        # The padding of a prompt's last chunk may lie beyond the cache; nothing ever reads it.
        rows = max(0, min(value.shape[2], cache.shape[2] - start)) if start >= 0 else 0
        out[b // share, :, start : start + rows] = stored(value[b, :, :rows], cache.dtype)
    return out


@operator("Attention that reads the filled part of the cache only.")
def attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    position: Tensor,
    scale: float,
    softcap: float | None = None,
) -> Tensor:
    """Return causal grouped-query attention over the filled part of a static cache.

    Args:
        query: float32 [B, Hq, T, D], already rotated.
        key_cache, value_cache: [B, Hkv, S, D] as `stored` defines, with rows up to position + T - 1 written.
        position: int64 [1], sequence position of query row 0. Row i sees keys 0 .. position + i. Or int64 [B], a
            position for each row of the batch; the caches are then [V, …] and shared as `each_row` has it.
        scale: factor on the logits.
        softcap: a logit becomes softcap * tanh(logit / softcap), before the mask; None: it stays.

    Returns:
        float32 [B, Hq, T, D].
    """
    call = partial(_attend, scale=scale, softcap=softcap)
    return each_row(position, [query], [key_cache, value_cache], call)


def _attend(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, position: Tensor, scale: float, softcap: float | None
) -> Tensor:
    """Return `attention` of rows that share one position."""
    start, steps = int(position), query.shape[2]
    columns = torch.arange(min(start + steps, key_cache.shape[2]), device=query.device)
    rows = torch.arange(start, start + steps, device=query.device)
    # Bottom-right causal: row 0 is at `start`, so it sees everything that was filled before.
    seen = columns[None, :] <= rows[:, None]
    keys, values = (loaded(c[:, :, : seen.shape[1]], query.shape[3]) for c in (key_cache, value_cache))
    if softcap is not None:
        return capped_attention(query, keys, values, seen, scale, softcap)
    result = torch.nn.functional.scaled_dot_product_attention(
        *(query, keys, values),
        # A single row sees every filled column.
        attn_mask=None if steps == 1 else seen,
        scale=scale,
        enable_gqa=query.shape[1] != key_cache.shape[1],
    )
    return result.contiguous()  # PyTorch's own layout depends on the kernel that it chooses


def capped_attention(query: Tensor, keys: Tensor, values: Tensor, seen: Tensor, scale: float, softcap: float) -> Tensor:
    """Return grouped-query attention float32 [B, Hq, T, D] with soft-capped logits, under a mask bool [T, S]."""
    group = query.shape[1] // keys.shape[1]
    keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
    logits = capped(query @ keys.transpose(-1, -2) * scale, softcap)
    return torch.softmax(logits.masked_fill(~seen, -torch.inf), -1) @ values


def capped(logits: Tensor, softcap: float | None) -> Tensor:
    """Return soft-capped logits; None: the logits."""
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


@operator(
    "TAS: the similarity of this token's query to the key at the same place of the previous frame.",
    lambda query: query.new_empty(query.shape[:1]),
)
def tas(query: Tensor, key_cache: Tensor, position: Tensor, stride: int, scale: float) -> Tensor:
    """Return the Temporal Attention Score (FastCar, section 4.2). It knows no soft-cap.

    It is the attention logit between a token and its counterpart one frame earlier, averaged over query heads. The sum
    is defined in integers, so that every backend has the same bits in any order of addition
    (docs/reference/numerics.md, "TAS, bit for bit"): each product of two float32 values is rounded to a multiple of
    2^-24, half to even, and limited to 2^22; one that is not finite counts as -2^22, so that its row does not replay.

    Args:
        query: float32 [B, Hq, 1, D], as attention uses it; Hq * D is at most 65,536.
        key_cache: [B, Hkv, S, D] as `stored` defines.
        position: int64 [1], sequence position of the query; or [B], as of `attention`.
        stride: tokens per frame; the key read is at position - stride, clamped to 0.
        scale: the attention's own factor.

    Returns:
        float32 [B].
    """
    own, key = grouped(query, key_cache, position, stride)
    return fixed_sum(own * key, (1, 2, 3)).float() * score_factor(scale, query.shape[1])


def grouped(query: Tensor, key_cache: Tensor, position: Tensor, stride: int) -> tuple[Tensor, Tensor]:
    """Return the query [B, Hkv, Hq / Hkv, D] and the key one frame earlier [B, Hkv, 1, D], both as float64."""
    batch, heads, _, dim = query.shape
    kv_heads = key_cache.shape[1]
    # Where there is no key one frame earlier, row 0 stands in: no row replays in the first frame.
    earlier = (position.expand(batch) - stride).clamp(min=0)
    videos = torch.arange(batch, device=query.device) // sharing(batch, len(key_cache))
    key = loaded(key_cache[videos, :, earlier], dim)
    return query.reshape(batch, kv_heads, heads // kv_heads, dim).double(), key[:, :, None].double()


# Sparse attention over a ring cache: ring_row, limit, ring_write, window_attention.
#
# docs/explanation/sparse_attention.md says why.
#
# A ring cache [B, Hkv, sinks + R, D] keeps the first `sinks` positions and the last R others. Position p >= sinks is
# in
# row sinks + (p - sinks) mod R.


def row_of(position: Tensor, sinks: int, ring: int) -> Tensor:
    """Return the rows of sequence positions int64 [...] in a ring cache of `sinks` + `ring` rows."""
    return torch.where(position < sinks, position, sinks + (position - sinks) % ring)


@operator("The row of the ring cache that this position has.")
def ring_row(position: Tensor, back: int, sinks: int, ring: int) -> Tensor:
    """Return the row of position `position - back` (clamped to 0), int64 as position."""
    return row_of((position - back).clamp(min=0), sinks, ring)


@operator("A position inside of the cache or table that is read: at most its last row.")
def limit(positions: Tensor, most: int) -> Tensor:
    """Return min(positions, most), int64 of any shape: positions in a cache of `most` + 1."""
    return positions.clamp(max=most)


@limit.register_vmap
def _(_info: object, axes: tuple[int | None, ...], positions: Tensor, most: int) -> tuple[Tensor, int | None]:
    return limit(positions, most), axes[0]


@operator("This token's key or value is written into the ring cache.")
def ring_write(cache: Tensor, value: Tensor, position: Tensor, sinks: int) -> Tensor:
    """Return a ring cache [V, Hkv, sinks + R, D] with value [B, Hkv, T, D] written from `position` on.

    T is at most R, so no row is written twice. `stored` defines the rows, and `cache_write` the positions of rows.
    """
    out, share = cache.clone(), sharing(len(value), len(cache))
    for b, start in enumerate(position.expand(len(value)).tolist()):
        if start >= 0:
            rows = row_of(start + torch.arange(value.shape[2], device=cache.device), sinks, cache.shape[2] - sinks)
            out[b // share][:, rows] = stored(value[b], cache.dtype)
    return out


@operator("Attention that reads the sinks and the last tokens from the ring cache.")
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
        position: int64 [1], sequence position of query row 0; or [B], as of `attention`.
        scale: factor on the logits.
        sinks, window: query row i at p = position + i sees keys 0 .. sinks - 1 and p - window + 1 .. p, none after p.
        sink_query: float32 [B, Hq, T, D], the query for the sinks; None: `query`.
        softcap: as in `fastcar::attention`.

    Returns:
        float32 [B, Hq, T, D].
    """
    call = partial(_attend_window, scale=scale, sinks=sinks, window=window, softcap=softcap)
    return each_row(position, [query, sink_query], [key_cache, value_cache], call)


def _attend_window(
    query: Tensor,
    sink_query: Tensor | None,
    key_cache: Tensor,
    value_cache: Tensor,
    position: Tensor,
    scale: float,
    sinks: int,
    window: int,
    softcap: float | None,
) -> Tensor:
    """Return `window_attention` of rows that share one position."""
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


@operator(
    "Cross-attention: the context's keys and values were made before the prompt.",
    lambda query, values: query.new_empty((*query.shape[:3], values.shape[3])),
)
def context_attention(
    query: Tensor, keys: Tensor, values: Tensor, scale: float, mask: Tensor | None = None, softcap: float | None = None
) -> Tensor:
    """Return grouped-query attention to all tokens of a context. It is not causal: position means nothing here.

    Args:
        query: float32 [B, Hq, T, D].
        keys, values: float32 [B, Hkv, L, D], of the context.
        scale: factor on the logits.
        mask: float32 [1 or B, 1, 1, L], added to the logits; the least float32, or minus infinity, hides a token.
        softcap: a logit becomes softcap * tanh(logit / softcap), before the mask; None: it stays.

    Returns:
        float32 [B, Hq, T, D].
    """
    batch, heads, steps, dim = query.shape
    kv_heads = keys.shape[1]
    # Heads that share keys are stacked as rows of one matmul, so that keys are not repeated.
    grouped = (query * scale).reshape(batch, kv_heads, heads // kv_heads * steps, dim)
    logits = capped(grouped @ keys.transpose(-1, -2), softcap)
    if mask is not None:
        logits = logits + mask
    return (torch.softmax(logits, -1) @ values).reshape(batch, heads, steps, values.shape[3])
