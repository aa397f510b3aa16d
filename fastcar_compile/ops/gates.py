"""Scores of the gates: tas_heads, input_delta, output_bound, learned_score, constant_score, random_score.

attention.py has `tas`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.library import custom_op

from fastcar_compile.ops.cached import loaded

TINY = 1e-20
"""Least divisor, smaller than every relevant sum: a zero vector does not divide by zero."""

HASH_PRIME = 2**31 - 1
HASH_FACTORS = (48271, 69621, 16807)
HASH_ROUNDS = (1_234_567, 89_012_345, 678_901_234)
HASH_BITS = 24
"""x -> x**5 is a permutation modulo this prime. A product of two residues fits int64, which every backend has."""


@custom_op("fastcar::tas_heads", mutates_args=())
def tas_heads(
    query: Tensor,
    key_cache: Tensor,
    position: Tensor,
    stride: int,
    scale: float,
    heads: Sequence[int],
    weights: Sequence[float],
) -> Tensor:
    """Return the Temporal Attention Score as a weighted sum over chosen query heads.

    Args:
        query: float32 [B, Hq, 1, D]. key_cache: [B, Hkv, S, D] as `stored` defines. position: int64 [1].
        stride, scale: as for `tas`.
        heads: query heads. weights: one per entry of heads.

    Returns:
        float32 [B].
    """
    key = _earlier_key(query, key_cache, position, stride)[:, list(heads)]
    products = (query[:, list(heads), 0] * key).sum(-1)
    return (products * query.new_tensor(list(weights))).sum(-1) * scale


@tas_heads.register_fake
def _(
    query: Tensor,
    key_cache: Tensor,
    position: Tensor,
    stride: int,
    scale: float,
    heads: Sequence[int],
    weights: Sequence[float],
) -> Tensor:
    return query.new_empty((query.shape[0],))


def _earlier_key(query: Tensor, key_cache: Tensor, position: Tensor, stride: int) -> Tensor:
    """Return the key one frame earlier for every query head, [B, Hq, D]."""
    key = loaded(key_cache[:, :, max(int(position) - stride, 0)], query.shape[3])
    return key.repeat_interleave(query.shape[1] // key_cache.shape[1], 1)


@custom_op("fastcar::input_delta", mutates_args=())
def input_delta(x: Tensor, cached: Tensor) -> Tensor:
    """Return ||x - cached|| / ||x|| with sums of absolute values, float32 [B], for x and cached float32 [B, H]."""
    return (x - cached).abs().sum(-1) / x.abs().sum(-1).clamp(min=TINY)


@input_delta.register_fake
def _(x: Tensor, cached: Tensor) -> Tensor:
    return x.new_empty((x.shape[0],))


@custom_op("fastcar::output_bound", mutates_args=())
def output_bound(
    x: Tensor, cached: Tensor, query: Tensor, key_cache: Tensor, position: Tensor, stride: int, weight: float
) -> Tensor:
    """Return ||x - cached|| / ||x|| + weight * sqrt(max(0, 1 - cosine)).

    The cosine of query and key one frame earlier is averaged over query heads.

    Args:
        x, cached: float32 [B, H]. query: float32 [B, Hq, 1, D]. position: int64 [1].
        key_cache: [B, Hkv, S, D] as `stored` defines.

    Returns:
        float32 [B].
    """
    key, own = _earlier_key(query, key_cache, position, stride), query[:, :, 0]
    lengths = (own.square().sum(-1) * key.square().sum(-1)).clamp(min=TINY).sqrt()
    cosine = ((own * key).sum(-1) / lengths).mean(-1)
    return input_delta(x, cached) + weight * (1 - cosine).clamp(min=0).sqrt()


@output_bound.register_fake
def _(
    x: Tensor, cached: Tensor, query: Tensor, key_cache: Tensor, position: Tensor, stride: int, weight: float
) -> Tensor:
    return x.new_empty((x.shape[0],))


@custom_op("fastcar::learned_score", mutates_args=())
def learned_score(x: Tensor, cached: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor) -> Tensor:
    """Return w2 . relu(w1 @ [x ; |x - cached|] + b1) + b2, summed in float32 in any order.

    Args:
        x, cached: float32 [B, H]. w1: bfloat16 [units, 2 H], converted to float32. b1, w2: float32 [units].
        b2: float32 [1].

    Returns:
        float32 [B].
    """
    features = torch.cat([x, (x - cached).abs()], -1)
    hidden = torch.nn.functional.linear(features, w1.float(), b1).relu()
    return torch.mv(hidden, w2) + b2


@learned_score.register_fake
def _(x: Tensor, cached: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor) -> Tensor:
    return x.new_empty((x.shape[0],))


@custom_op("fastcar::constant_score", mutates_args=())
def constant_score(step: Tensor, rows: int, value: float) -> Tensor:
    """Return `value` for every forward and row, float32 [n * rows], for step int64 [n]."""
    return torch.full((step.shape[0] * rows,), value, dtype=torch.float32, device=step.device)


@constant_score.register_fake
def _(step: Tensor, rows: int, value: float) -> Tensor:
    return step.new_empty((step.shape[0] * rows,), dtype=torch.float32)


@custom_op("fastcar::random_score", mutates_args=())
def random_score(step: Tensor, rows: int, layer: int) -> Tensor:
    """Return a hash of (forward, layer, row), uniform in (0, 1], float32 [n * rows], for step int64 [n]."""
    row = torch.arange(rows, device=step.device)
    by_step, by_row, by_layer = HASH_FACTORS
    x = ((step[:, None] + 1) * by_step + (row + 1) * by_row + (layer + 1) * by_layer) % HASH_PRIME
    for constant in HASH_ROUNDS:
        square = x * x % HASH_PRIME
        x = (square * square % HASH_PRIME * x + constant) % HASH_PRIME
    return ((x // 2 ** (31 - HASH_BITS) + 1).float() * 2.0**-HASH_BITS).flatten()


@random_score.register_fake
def _(step: Tensor, rows: int, layer: int) -> Tensor:
    return step.new_empty((step.shape[0] * rows,), dtype=torch.float32)
