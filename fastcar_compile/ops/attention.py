"""Static KV cache operators: cache_write, attention, tas."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.library import custom_op


@custom_op("fastcar::cache_write", mutates_args=())
def cache_write(cache: Tensor, value: Tensor, position: Tensor) -> Tensor:
    """Cache [B, Hkv, S, D] with value [B, Hkv, T, D] written at sequence rows position .. position + T - 1.

    Rows at or beyond S are dropped, so a padded prefill chunk may reach past the end of the cache.
    """
    start = int(position)
    rows = max(0, min(value.shape[2], cache.shape[2] - start))
    out = cache.clone()
    out[:, :, start : start + rows] = value[:, :, :rows]
    return out


@cache_write.register_fake
def _(cache: Tensor, value: Tensor, position: Tensor) -> Tensor:
    return torch.empty_like(cache)


@custom_op("fastcar::attention", mutates_args=())
def attention(query: Tensor, key_cache: Tensor, value_cache: Tensor, position: Tensor, scale: float) -> Tensor:
    """Causal grouped-query attention over the filled part of a static cache.

    Args:
        query: float32 [B, Hq, T, D], already rotated.
        key_cache, value_cache: float32 [B, Hkv, S, D], with rows up to position + T - 1 written.
        position: int64 [1], sequence position of query row 0. Row i sees keys 0 .. position + i.
        scale: factor on the logits.

    Returns:
        float32 [B, Hq, T, D].
    """
    start, steps = int(position), query.shape[2]
    filled = min(start + steps, key_cache.shape[2])
    columns = torch.arange(filled, device=query.device)
    rows = torch.arange(start, start + steps, device=query.device)
    return torch.nn.functional.scaled_dot_product_attention(
        query,
        key_cache[:, :, :filled],
        value_cache[:, :, :filled],
        attn_mask=(columns[None, :] <= rows[:, None]) if steps > 1 else None,
        scale=scale,
        enable_gqa=query.shape[1] != key_cache.shape[1],
    )


@attention.register_fake
def _(query: Tensor, key_cache: Tensor, value_cache: Tensor, position: Tensor, scale: float) -> Tensor:
    return torch.empty(query.shape, dtype=query.dtype, device=query.device)


@custom_op("fastcar::tas", mutates_args=())
def tas(query: Tensor, key_cache: Tensor, position: Tensor, stride: int, scale: float) -> Tensor:
    """Temporal Attention Score (FastCar, section 4.2): the attention logit between a token and its counterpart
    one frame earlier, averaged over query heads.

    Args:
        query: float32 [B, Hq, 1, D], as attention uses it.
        key_cache: float32 [B, Hkv, S, D].
        position: int64 [1], sequence position of the query.
        stride: tokens per frame; the key read is at position - stride, clamped to 0.
        scale: the attention's own factor.

    Returns:
        float32 [B].
    """
    batch, heads, _, dim = query.shape
    kv_heads = key_cache.shape[1]
    key = key_cache[:, :, max(int(position) - stride, 0)]
    grouped = query.reshape(batch, kv_heads, heads // kv_heads, dim)
    return (grouped * key[:, :, None]).sum(-1).mean((1, 2)) * scale


@tas.register_fake
def _(query: Tensor, key_cache: Tensor, position: Tensor, stride: int, scale: float) -> Tensor:
    return query.new_empty((query.shape[0],))
