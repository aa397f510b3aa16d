"""Cross-attention: attention to a context that is the same for a whole video."""

from __future__ import annotations

import torch
from torch import Tensor

from fastcar_compile.ops.attention import capped
from fastcar_compile.ops.operator import operator


@operator("context_attention", reason="Cross-attention: the context's keys and values were made before the prompt.")
def context_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    scale: float,
    mask: Tensor | None = None,
    softcap: float | None = None,
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


@context_attention.register_fake
def _(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    scale: float,
    mask: Tensor | None = None,
    softcap: float | None = None,
) -> Tensor:
    return query.new_empty((*query.shape[:3], values.shape[3]))
