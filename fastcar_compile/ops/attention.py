"""Static KV cache operators: cache_write, attention, tas."""

from __future__ import annotations

import torch
from torch import Tensor

from fastcar_compile.drs.score import score_factor
from fastcar_compile.ops.cached import loaded, stored
from fastcar_compile.ops.fixed_point import fixed_sum
from fastcar_compile.ops.operator import operator


@operator("cache_write", reason="This token's key or value is written into the cache at its position.")
def cache_write(cache: Tensor, value: Tensor, position: Tensor) -> Tensor:
    """Return a cache [B, Hkv, S, D] with value [B, Hkv, T, D] written at rows position .. position + T - 1.

    The cache is float32, float16 or int8; `stored` defines its rows. Rows at or beyond S are dropped, so a padded
    prefill chunk may reach past the end of the cache.
    """
    start = int(position)
    # The padding of a prompt's last chunk may lie beyond the cache; nothing ever reads it.
    rows = max(0, min(value.shape[2], cache.shape[2] - start))
    # The eager operator copies. The TVM backend writes in place, as nothing reads the old cache behind a write.
    out = cache.clone()
    out[:, :, start : start + rows] = stored(value[:, :, :rows], cache.dtype)
    return out


@cache_write.register_fake
def _(cache: Tensor, value: Tensor, position: Tensor) -> Tensor:
    return torch.empty_like(cache)


@operator("attention", reason="Attention that reads the filled part of the cache only.")
def attention(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, position: Tensor, scale: float, softcap: float | None = None
) -> Tensor:
    """Return causal grouped-query attention over the filled part of a static cache.

    Args:
        query: float32 [B, Hq, T, D], already rotated.
        key_cache, value_cache: [B, Hkv, S, D] as `stored` defines, with rows up to position + T - 1 written.
        position: int64 [1], sequence position of query row 0. Row i sees keys 0 .. position + i.
        scale: factor on the logits.
        softcap: a logit becomes softcap * tanh(logit / softcap), before the mask; None: it stays.

    Returns:
        float32 [B, Hq, T, D].
    """
    start, steps = int(position), query.shape[2]
    filled = min(start + steps, key_cache.shape[2])
    columns = torch.arange(filled, device=query.device)
    rows = torch.arange(start, start + steps, device=query.device)
    keys, values = (loaded(c[:, :, :filled], query.shape[3]) for c in (key_cache, value_cache))
    # Bottom-right causal: row 0 is at `start`, so it sees everything that was filled before.
    seen = columns[None, :] <= rows[:, None]
    if softcap is not None:
        return capped_attention(query, keys, values, seen, scale, softcap)
    result = torch.nn.functional.scaled_dot_product_attention(
        *(query, keys, values),
        # A single row sees every filled column.
        attn_mask=seen if steps > 1 else None,
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


@attention.register_fake
def _(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, position: Tensor, scale: float, softcap: float | None = None
) -> Tensor:
    return torch.empty(query.shape, dtype=query.dtype, device=query.device)


@operator("tas", reason="TAS: the similarity of this token's query to the key at the same place of the previous frame.")
def tas(query: Tensor, key_cache: Tensor, position: Tensor, stride: int, scale: float) -> Tensor:
    """Return the Temporal Attention Score (FastCar, section 4.2). It knows no soft-cap.

    It is the attention logit between a token and its counterpart one frame earlier, averaged over query heads. The sum
    is defined in integers, so that every backend has the same bits in any order of addition
    (docs/reference/numerics.md, "TAS, bit for bit"): each product of two float32 values is rounded to a multiple of
    2^-24, half to even, and limited to 2^22; one that is not finite counts as -2^22, so that its row does not replay.

    Args:
        query: float32 [B, Hq, 1, D], as attention uses it; Hq * D is at most 65,536.
        key_cache: [B, Hkv, S, D] as `stored` defines.
        position: int64 [1], sequence position of the query.
        stride: tokens per frame; the key read is at position - stride, clamped to 0.
        scale: the attention's own factor.

    Returns:
        float32 [B].
    """
    batch, heads, _, dim = query.shape
    kv_heads = key_cache.shape[1]
    # Where there is no key one frame earlier, row 0 stands in: no row replays in the first frame.
    key = loaded(key_cache[:, :, max(int(position) - stride, 0)], dim).double()
    grouped = query.reshape(batch, kv_heads, heads // kv_heads, dim).double()
    return fixed_sum(grouped * key[:, :, None], (1, 2, 3)).float() * score_factor(scale, heads)


@tas.register_fake
def _(query: Tensor, key_cache: Tensor, position: Tensor, stride: int, scale: float) -> Tensor:
    return query.new_empty((query.shape[0],))
