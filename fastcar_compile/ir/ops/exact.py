"""The operators of `numerics="exact"`: norms, rotary positions and attention, whose names begin with `exact_`.

Their results are functions of exact sums, of correctly rounded operations and of float32 sums in a stated order. So all
backends that have them have the same bits, and a row does not depend on the other rows of its call.
docs/reference/numerics.md ("A decode step, bit for bit") defines them.
`fastcar_compile.ir.exact` is the numpy reference.
"""

from functools import partial

import torch
from torch import Tensor

from fastcar_compile.ir import exact
from fastcar_compile.ir.ops.attention import row_of
from fastcar_compile.ir.ops.operator import (
    BLOCK,
    MANTISSA_BITS,
    NOT_A_NUMBER,
    blocks,
    each_row,
    operator,
    power_of_two,
)

_EXP_TABLE = torch.from_numpy(exact.EXP_TABLE).to(torch.int32)


@operator("Root-mean-square norm whose sum is exact, so that every backend has the same bits.")
def exact_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Return x / sqrt(mean(x^2) + epsilon) * weight over the last axis.

    A row is rounded to integers of at most 2^18 with one exponent, that of its largest magnitude. The sum of their
    squares is exact in float64 in any order. A row with a value that is not finite is NaN.

    Args:
        x: float32 [..., H], H at most 65,536. weight: float32 [H]. epsilon: above 0.

    Returns:
        float32 [..., H].
    """
    whole, scale, finite = _integers(x, exact.NORM_BITS)
    # At most 65,536 squares of at most 2^36: the sum stays below 2^53, where float64 is exact.
    mean = whole.square().sum(-1, keepdim=True).float() * torch.tensor(1 / x.shape[-1], dtype=torch.float32)
    # Twice, because scale^2 alone may overflow or underflow.
    variance = (mean * scale) * scale + torch.tensor(epsilon, dtype=torch.float32)
    root = variance.double().sqrt().float()  # that of MKL for float32 is not rounded to nearest
    y = (x * (torch.ones_like(root) / root)) * weight
    return torch.where(finite, y, torch.nan)


def _integers(x: Tensor, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return rows as integers of at most 2^bits in float64 and the scale of each row, and whether it is finite."""
    top = x.abs().amax(-1, keepdim=True)
    # The sign is 0, so the bits above the mantissa are the exponent field of the row's largest magnitude.
    field = (top.view(torch.int32) >> MANTISSA_BITS).clamp(min=exact.NORM_FIELD)
    finite = field < exact.EXPONENT_BITS
    shift = torch.where(finite, field - (126 + bits), 0)
    return torch.round(x * power_of_two(-shift)).double(), power_of_two(shift), finite


@operator("Layer norm whose sums are exact: the mean is subtracted, and `exact_norm` follows.")
def exact_layer_norm(x: Tensor, weight: Tensor, bias: Tensor, epsilon: float) -> Tensor:
    """Return exact_norm(x - mean(x), weight, epsilon) + bias, the mean over the last axis.

    The mean is that of a row's values as integers of at most 2^23 with one exponent, that of its largest magnitude.

    Args:
        x: float32 [..., H], H at most 65,536. weight, bias: float32 [H]. epsilon: above 0.

    Returns:
        float32 [..., H].
    """
    whole, scale, _ = _integers(x, exact.MEAN_BITS)
    mean = whole.sum(-1, keepdim=True).float() * torch.tensor(1 / x.shape[-1], dtype=torch.float32)
    # A value that is not finite stays so without the mean, and its row becomes NaN.
    return exact_norm(x - mean * scale, weight, epsilon) + bias


@operator("Rotary positions from a table, so that no backend computes a sine of its own.")
def exact_rotary(x: Tensor, table: Tensor, position: Tensor) -> Tensor:
    """Return x with the first R elements of each head rotated; row i by table row position + i, at most the last one.

    Args:
        x: float32 [B, heads, T, D].
        table: float32 [S, R]: R / 2 cosines, then R / 2 sines. Elements c and c + R / 2 are a pair.
        position: int64 [1], or [B].

    Returns:
        float32 [B, heads, T, D].
    """
    # The padding of a chunk may pass the table's end, and reads its last row. An inactive row, -1, reads the first one.
    rows = position.clamp(min=0)[:, None] + torch.arange(x.shape[2], device=x.device)
    cos, sin = table[rows.clamp(max=table.shape[0] - 1)].unsqueeze(1).chunk(2, -1)
    half = cos.shape[-1]
    low, high, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat([low * cos - high * sin, high * cos + low * sin, rest], -1)


@operator("Attention in integers over an int8 cache, the same on every backend.")
def exact_attention(query: Tensor, key_cache: Tensor, value_cache: Tensor, position: Tensor, scale: float) -> Tensor:
    """Return causal grouped-query attention over the filled part of an int8 cache.

    Args:
        query: float32 [B, Hq, T, D], already rotated.
        key_cache, value_cache: int8 [B, Hkv, S, D + ceil(D / 32)] with rows up to position + T - 1 written.
        position: int64 [1], sequence position of query row 0. Row i sees keys 0 .. position + i. Or [B], as
            of `attention`.
        scale: factor on the logits.

    Returns:
        float32 [B, Hq, T, D].
    """
    return each_row(position, [query], [key_cache, value_cache], partial(_attend_full, scale=scale))


def _attend_full(query: Tensor, key_cache: Tensor, value_cache: Tensor, position: Tensor, scale: float) -> Tensor:
    """Return `exact_attention` of rows that share one position."""
    start, steps = int(position), query.shape[2]
    filled = min(start + steps, key_cache.shape[2])
    columns = torch.arange(filled, device=query.device)
    seen = columns <= torch.arange(start, start + steps, device=query.device)[:, None]
    return _attend(query, key_cache[:, :, :filled], value_cache[:, :, :filled], seen, scale)


@operator("Attention in integers over a ring cache, the same on every backend.")
def exact_window_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    position: Tensor,
    scale: float,
    sinks: int,
    window: int,
) -> Tensor:
    """Return causal grouped-query attention to the sinks and to a sliding window of an int8 ring cache.

    Args:
        query: float32 [B, Hq, T, D], already rotated.
        key_cache, value_cache: int8 [B, Hkv, sinks + R, D + ceil(D / 32)], rings written up to position + T - 1.
        position: int64 [1], sequence position of query row 0.
        scale: factor on the logits.
        sinks, window: as in `fastcar::window_attention`.

    Returns:
        float32 [B, Hq, T, D]. Rows of the cache are added in the order of the memory, not of their positions.
    """
    call = partial(_attend_window, scale=scale, sinks=sinks, window=window)
    return each_row(position, [query], [key_cache, value_cache], call)


def _attend_window(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    position: Tensor,
    scale: float,
    sinks: int,
    window: int,
) -> Tensor:
    """Return `exact_window_attention` of rows that share one position."""
    start, end = int(position), int(position) + query.shape[2]
    rows = min(end, key_cache.shape[2])
    # By position and not by row: once the ring has wrapped, a row holds a later position than its number says.
    held = _held(rows, end - 1, sinks, key_cache.shape[2] - sinks)
    here = torch.arange(start, end)[:, None]
    seen = (held >= 0) & (held <= here) & ((held < sinks) | (held > here - window))
    keys, values = (cache[:, :, :rows] for cache in (key_cache, value_cache))
    return _attend(query, keys, values, seen.to(query.device), scale)


def _held(rows: int, newest: int, sinks: int, ring: int) -> Tensor:
    """Return the position that each of the first rows of a ring cache holds, int64 [rows]; -1: none."""
    # The last `ring` positions, and the sinks, which never leave; a sink is not held twice.
    positions = torch.arange(max(newest + 1 - ring, 0), newest + 1)
    positions = torch.cat([torch.arange(min(sinks, newest + 1)), positions[positions >= sinks]])
    held = torch.full((rows,), -1)
    held[row_of(positions, sinks, ring)] = positions
    return held


def _attend(query: Tensor, keys: Tensor, values: Tensor, seen: Tensor, scale: float) -> Tensor:
    """Return attention to rows of an int8 cache that bool [T, S] shows, one batch row and key/value head at a time."""
    batch, heads, steps, dim = query.shape
    kv_heads = keys.shape[1]
    group = query.reshape(batch, kv_heads, heads // kv_heads, steps, dim)
    heads_of = zip(group.flatten(0, 1), keys.flatten(0, 1), values.flatten(0, 1), strict=True)
    return torch.stack([_attend_head(*own, seen, scale) for own in heads_of]).reshape(query.shape)


def _attend_head(query: Tensor, keys: Tensor, values: Tensor, seen: Tensor, scale: float) -> Tensor:
    """Return the attention of a group of query heads [G, T, D] to the rows of their key/value head."""
    logits = _logits(query, keys, scale).masked_fill(~seen, -torch.inf)
    top = logits.amax(-1, keepdim=True)
    weights = torch.where(seen, _numerators(logits - top), 0)
    # The sum of integers is exact, so the softmax's denominator has no order.
    total = weights.sum(-1, keepdim=True).float() * 2.0**-exact.EXP_BITS
    # Rows that no query sees may hold anything, a NaN exponent among it: they are zeroed.
    used = torch.where(seen.any(0)[:, None], values, 0)
    y = _weighted_values(weights.float(), used, query.shape[-1]) * (torch.ones_like(total) / total)
    unknown = (values[:, query.shape[-1] :] == NOT_A_NUMBER).float()
    # A block with a NaN makes its 32 columns NaN, for the queries that see its row only.
    columns = (seen.float() @ unknown).repeat_interleave(BLOCK, -1)[:, : query.shape[-1]] > 0
    return torch.where(top.isfinite() & ~columns, y, torch.nan)


def _logits(query: Tensor, keys: Tensor, scale: float) -> Tensor:
    """Return float32 [G, T, S]. float64 has the sum of a block exactly: 2^14 * 127 * 32 < 2^53."""
    dim = query.shape[-1]
    mantissas, exponents = blocks(query, exact.WIDE_BITS)
    others = torch.nn.functional.pad(keys[:, :dim], (0, -dim % BLOCK)).double()
    total = query.new_zeros(())
    for block in range(exponents.shape[-1]):
        sums = mantissas[..., block, :].double() @ others[:, block * BLOCK : (block + 1) * BLOCK].T
        power = exponents[..., block, None] + keys[:, dim + block].to(torch.int32)
        # Each block's sum is rounded to float32 once, and blocks are added in ascending order.
        part = sums.float() * power_of_two(power.clamp(-126, 127))
        total = part if block == 0 else total + part
    unknown = (exponents == NOT_A_NUMBER).any(-1)[..., None] | (keys[:, dim:] == NOT_A_NUMBER).any(-1)
    factor = torch.from_numpy(exact.logit_factor(scale).reshape(1))
    return torch.where(unknown, torch.nan, total * factor)


def _numerators(differences: Tensor) -> Tensor:
    """Return 2^differences as int32 of 2^-24; NaN counts as the limit, and its row is NaN in the end."""
    limited = differences.nan_to_num(nan=exact.EXP_LIMIT).clamp(min=exact.EXP_LIMIT)
    units = torch.round(limited * float(1 << exact.EXP_INPUT_BITS)).to(torch.int32)
    shift, fraction = -(units >> exact.EXP_INPUT_BITS), units & ((1 << exact.EXP_INPUT_BITS) - 1)
    # The fraction's upper bits choose the knot, and the lower 8 interpolate, rounded to nearest.
    knot, rest = fraction >> 8, fraction & 255
    table = _EXP_TABLE.to(differences.device)
    power = table[knot] + (((table[knot + 1] - table[knot]) * rest + 128) >> 8)
    # Half of the last place is added before the shift: rounding to nearest. With shift 0 it is 0.
    return (power + ((1 << shift) >> 1)) >> shift


def _weighted_values(weights: Tensor, values: Tensor, dim: int) -> Tensor:
    """Return the sums [G, T, D] of cached rows int8 [S, .] with weights [G, T, S], tile by tile of 32 rows."""
    spare = -len(values) % BLOCK
    weights = torch.nn.functional.pad(weights, (0, spare))
    rows = torch.nn.functional.pad(values, (0, 0, 0, spare))
    columns = []
    for block in range(values.shape[1] - dim):
        power = power_of_two((rows[:, dim + block].to(torch.int32) - exact.EXP_BITS).clamp(min=-126))
        mantissas, exponents = blocks(weights * power, exact.WIDE_BITS)  # [G, T, tiles, 32], [G, T, tiles]
        tiles = rows[:, block * BLOCK : min((block + 1) * BLOCK, dim)].unflatten(0, (-1, BLOCK)).double()
        parts = torch.einsum("gtnj,njc->gtnc", mantissas.double(), tiles).float() * power_of_two(exponents)[..., None]
        total = torch.zeros_like(parts[:, :, 0])
        # One tile after the other: this float32 sum has a stated order.
        for tile in range(parts.shape[2]):
            total = total + parts[:, :, tile]
        columns.append(total)
    return torch.cat(columns, -1)
