"""Operators of gates and drafts: tas_heads, input_delta, learned_score, constant_score, random_score; draft_gain, ….

attention.py has `tas`. Every score is a function of exact sums, so that all backends have the same bits in any order of
addition (docs/reference/numerics.md, "Scores, bit for bit").
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fastcar_compile.gates import scores
from fastcar_compile.ir.ops.attention import fixed_sum, grouped
from fastcar_compile.ir.ops.operator import MANTISSA_BITS, operator, power_of_two, sharing
from fastcar_compile.ir.types import INACTIVE


@operator("TAS over chosen query heads.", lambda query: query.new_empty(query.shape[:1]))
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

    The query of a head is multiplied by its weight in float32, that of a head which is not chosen by 0. Then the
    products are summed over all heads as for `tas`.

    Args:
        query: float32 [B, Hq, 1, D]; Hq * D is at most 65,536. key_cache: [B, Hkv, S, D] as `stored` defines.
        position: int64 [1].
        stride, scale: as for `tas`.
        heads: query heads. weights: one per entry of heads.

    Returns:
        float32 [B].
    """
    # A head that is not chosen has weight 0 and stays in the sum: one kernel serves every choice.
    factors = query.new_zeros(query.shape[1])
    factors[list(heads)] = query.new_tensor(list(weights))
    own, key = grouped(query * factors[:, None, None], key_cache, position, stride)
    return fixed_sum(own * key, (1, 2, 3)).float() * scores.score_factor(scale, 1)


def _by_row(x: Tensor) -> Tensor:
    """Return a score of every row of x float32 [B, H], without its values."""
    return x.new_empty(x.shape[:1])


def _by_step_and_row(step: Tensor, rows: int) -> Tensor:
    """Return a score of every forward and row, without its values."""
    return step.new_empty((step.shape[0] * rows,), dtype=torch.float32)


@operator("The relative change of the MLP's input since this slot was last computed.", _by_row)
def input_delta(x: Tensor, cached: Tensor) -> Tensor:
    """Return ||x - cached|| / ||x|| with sums of absolute values, float32 [B], for x and cached float32 [B, H].

    Absolute values are rounded half to even to multiples of 2^-24, limited to 2^22, and summed in int64. A row whose
    x - cached is not finite has NaN, so that it does not replay. H is at most 65,536.
    """
    change = (x - cached).abs()
    # The divisor is at least one unit of 2^-24, so a row of zeros divides by no zero.
    score = _size(change) / _size(x).clamp(min=1)
    return torch.where(change.isfinite().all(-1), score, torch.nan)


def _size(values: Tensor) -> Tensor:
    """Return the sum of absolute values in units of 2^-24, as float32 [B]. 2^24 * x is exact or infinite."""
    units = (values.abs() * float(1 << scores.TAS_FRACTION_BITS)).round().clamp(max=float(scores.TAS_LIMIT))
    return units.to(torch.int64).sum(-1).float()


@operator("A trained network predicts whether the MLP's output has changed.", _by_row)
def learned_score(x: Tensor, cached: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor) -> Tensor:
    """Return w2 . relu(w1 @ [x ; |x - cached|] + b1) + b2.

    The features of a row are rounded to integers of at most 2^22 with one exponent, that of the largest magnitude. Then
    the sums of the first layer are exact in float64 in any order, given the weights that `GateWeights` makes. Products
    of the second layer are those of `tas`. A row with a feature or a hidden unit that is not finite has NaN.

    Args:
        x, cached: float32 [B, H]. w1: bfloat16 [units, 2 H] of `GateWeights`. b1, w2: float32 [units].
        b2: float32 [1].

    Returns:
        float32 [B].
    """
    features = torch.cat([x, (x - cached).abs()], -1)
    largest = features.abs().amax(-1, keepdim=True)
    # One exponent for the whole row, from the bits of its largest feature.
    field = (largest.view(torch.int32) >> MANTISSA_BITS).clamp(min=scores.LEAST_EXPONENT)
    # A product with a power of two only moves the exponent, so `round` is the one rounding.
    whole = (features * power_of_two(scores.SCALE_FIELD - field)).round().double()
    sums = torch.nn.functional.linear(whole, w1.double()).float()
    hidden = (sums * power_of_two(field - scores.SCALE_FIELD) + b1).relu()
    score = fixed_sum(hidden.double() * w2.double(), (-1,)).float() * 2.0**-scores.TAS_FRACTION_BITS + b2
    return torch.where(largest.isfinite()[:, 0] & hidden.isfinite().all(-1), score, torch.nan)


@operator("The same score for every row, for comparison.", _by_step_and_row)
def constant_score(step: Tensor, rows: int, value: float) -> Tensor:
    """Return `value` for every forward and row, float32 [n * rows], for step int64 [n]."""
    return torch.full((step.shape[0] * rows,), value, dtype=torch.float32, device=step.device)


@operator("A random score, for comparison.", _by_step_and_row)
def random_score(step: Tensor, rows: int, layer: int, share: int = 0) -> Tensor:
    """Return a hash of (forward, layer, row), uniform in (0, 1], float32 [n * rows], for step int64 [n].

    With `share`, rows is 1 and step has a number for each row; `share` neighbours are hashed as one row.
    """
    if share:
        each = zip(step.clamp(min=-1), torch.arange(len(step)) // share, strict=True)
        return torch.stack([random_score(s[None], int(v) + 1, layer)[-1] for s, v in each])
    row = torch.arange(rows, device=step.device)
    by_step, by_row, by_layer = scores.HASH_FACTORS
    x = ((step[:, None] + 1) * by_step + (row + 1) * by_row + (layer + 1) * by_layer) % scores.HASH_PRIME
    for constant in scores.HASH_ROUNDS:
        # Residues of a 31-bit prime: the product of two stays below 2^62, which int64 has.
        square = x * x % scores.HASH_PRIME
        x = (square * square % scores.HASH_PRIME * x + constant) % scores.HASH_PRIME
    return ((x // 2 ** (31 - scores.HASH_BITS) + 1).float() * 2.0**-scores.HASH_BITS).flatten()


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


@operator(
    "After the first frame, the row replays where the score passes and the limits allow it.",
    lambda score: torch.empty_like(score, dtype=torch.bool),
)
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
        threshold: float32 [1] or [B]. A row replays if score >= threshold, or score <= threshold with `at_most`.
        step: int64 [1], decode forward number t; or [B], one for each row. No row replays before t = stride. A row of
            step -1 computes and keeps nothing; one of step -2 is not there: it counts as replaying, so that the rows
            beside it decide whether the MLP runs.
        chain: int32 [F, V], successive replays at every slot; row b is one of video b // (B / V).
        stride: tokens per frame F.
        max_chain: a row with this many successive replays computes; negative: unlimited.
        couple_cfg: rows b and b + B / 2 are a guidance pair, which replays only together.
        refresh_every: every row computes in the frames t // F that are a multiple of this; 0: in none.
        at_most: the comparison.

    Returns:
        bool [B], True where the row replays.
    """
    rule = ReplayRule(stride, max_chain, couple_cfg, refresh_every, at_most)
    return decide(score, threshold, step, _slots(chain, step, len(score)), rule) | (step == INACTIVE)


def _slots(cache: Tensor, step: Tensor, rows: int) -> Tensor:
    """Return the slots [rows, ...] of a cache [F, V, ...]; every `rows` / V neighbours are rows of one video."""
    videos = torch.arange(rows, device=cache.device) // sharing(rows, cache.shape[1])
    return cache[step.expand(rows) % cache.shape[0], videos]


@operator(
    "The slot of this place of the frame: what was cached one frame earlier.",
    lambda cache, step: cache.new_empty((max(cache.shape[1], len(step)), *cache.shape[2:])),
)
def slot_read(cache: Tensor, step: Tensor) -> Tensor:
    """Return a copy of row step mod F of a cache [F, V, ...], [B, ...]; step int64 [1] or [B]."""
    return _slots(cache, step, max(cache.shape[1], len(step)))


@operator("What the layer computed or replayed is kept for the same place of the next frame.")
def slot_write(cache: Tensor, value: Tensor, step: Tensor) -> Tensor:
    """Return a cache [F, V, ...] with value [B, ...] written at row step mod F; step as of `gate`."""
    out, share = cache.clone(), sharing(len(value), cache.shape[1])
    for b, t in enumerate(step.expand(len(value)).tolist()):
        if t >= 0:
            out[t % len(cache), b // share] = value[b]
    return out


@operator(
    "How much of what the draft leaves of the cached output still holds, by the change of the MLP's input.",
    lambda x: x.new_empty(x.shape[:1]),
)
def draft_gain(x: Tensor, cached: Tensor, edges: Tensor, gains: Tensor) -> Tensor:
    """Return gains[i] where i edges are at most the change `input_delta(x, cached)`.

    Args:
        x, cached: float32 [B, H]. edges: float32 [n - 1], not falling. gains: float32 [n].

    Returns:
        float32 [B]; 0 where the change is not a number.
    """
    change = input_delta(x, cached)
    # No comparison with a NaN holds, so its row would get the first gain.
    place = (change[:, None] >= edges).sum(-1)
    return torch.where(change.isnan(), 0.0, gains[place])


@operator(
    "The part of a sum over both inputs that the gain leaves.",
    lambda both, gain: both.new_empty((gain.shape[0], both.shape[1])),
)
def draft_difference(both: Tensor, gain: Tensor) -> Tensor:
    """Return both[:B] - gain * both[B:], float32 [B, K], for both float32 [2 B, K] and gain float32 [B]."""
    own, cached = both.chunk(2)
    return own - gain[:, None] * cached


@operator("The output of a row that replays: the draft's, and what the gain leaves of the cached output.")
def draft_sum(left: Tensor, cached: Tensor, bias: Tensor, gain: Tensor) -> Tensor:
    """Return bias + gain * (cached - bias) + left, float32 [B, H].

    Args:
        left: what the draft's linears make of what the gain leaves; cached: both float32 [B, H]. bias: float32 [H].
        gain: float32 [B].
    """
    return bias + gain[:, None] * (cached - bias) + left
