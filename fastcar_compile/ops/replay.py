"""Replay operators: gate, slot_read, slot_write."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fastcar_compile.ops.operator import operator


@dataclass(frozen=True)
class ReplayRule:
    """The constants of a decision, as `gate` takes them."""

    stride: int
    max_chain: int
    couple_cfg: bool
    refresh_every: int
    at_most: bool


def decide(score: Tensor, threshold: Tensor, step: Tensor, chain: Tensor, rule: ReplayRule) -> Tensor:
    """Return the decisions of `gate` for scores [..., B]; `step` and `chain` broadcast against them."""
    replay = (score <= threshold) if rule.at_most else (score >= threshold)
    # In the first frame no slot holds an output yet.
    replay = replay & (step >= rule.stride)
    if rule.refresh_every > 0:
        replay = replay & (step // rule.stride % rule.refresh_every != 0)
    if rule.max_chain >= 0:
        replay = replay & (chain < rule.max_chain)
    if rule.couple_cfg:
        first, second = replay.chunk(2, -1)
        # One row of a guidance pair that computes makes the other compute.
        replay = torch.cat([first & second] * 2, -1)
    return replay


@operator("gate", reason="After the first frame, the row replays where the score passes and the limits allow it.")
def gate(
    score: Tensor,
    threshold: Tensor,
    step: Tensor,
    chain: Tensor,
    stride: int,
    max_chain: int,
    couple_cfg: bool,
    refresh_every: int = 0,
    at_most: bool = False,
) -> Tensor:
    """Return which rows replay the MLP output of the previous frame.

    Args:
        score: float32 [B].
        threshold: float32 [1]. A row replays if score >= threshold, or score <= threshold with `at_most`.
        step: int64 [1], decode forward number t. No row replays before t = stride.
        chain: int32 [F, B], successive replays at every slot.
        stride: tokens per frame F.
        max_chain: a row with this many successive replays computes; negative: unlimited.
        couple_cfg: rows b and b + B / 2 are a guidance pair, which replays only together.
        refresh_every: every row computes in the frames t // F that are a multiple of this; 0: in none.
        at_most: the comparison.

    Returns:
        bool [B], True where the row replays.
    """
    slot = chain[int(step) % chain.shape[0]]
    rule = ReplayRule(stride, max_chain, couple_cfg, refresh_every, at_most)
    return decide(score, threshold, step, slot, rule)


@gate.register_fake
def _(
    score: Tensor,
    threshold: Tensor,
    step: Tensor,
    chain: Tensor,
    stride: int,
    max_chain: int,
    couple_cfg: bool,
    refresh_every: int = 0,
    at_most: bool = False,
) -> Tensor:
    return torch.empty_like(score, dtype=torch.bool)


@operator("slot_read", reason="The slot of this place of the frame: what was cached one frame earlier.")
def slot_read(cache: Tensor, step: Tensor) -> Tensor:
    """Return a copy of row step mod F of a cache [F, B, ...], [B, ...]."""
    return cache[int(step) % cache.shape[0]].clone()


@slot_read.register_fake
def _(cache: Tensor, step: Tensor) -> Tensor:
    return cache.new_empty(cache.shape[1:])


@operator("slot_write", reason="What the layer computed or replayed is kept for the same place of the next frame.")
def slot_write(cache: Tensor, value: Tensor, step: Tensor) -> Tensor:
    """Return a cache [F, B, ...] with value [B, ...] written at row step mod F."""
    out = cache.clone()
    out[int(step) % cache.shape[0]] = value
    return out


@slot_write.register_fake
def _(cache: Tensor, value: Tensor, step: Tensor) -> Tensor:
    return torch.empty_like(cache)
