"""Values that are hard to round, and caches of them."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastcar_compile.ir import exact

Array = NDArray[Any]
KINDS = ("normal", "wide", "tiny", "huge", "outlier", "ties", "bits", "zero", "holes")
"""`tiny` is subnormal, `bits` are any float32, `holes` have values that are not finite."""


def values(kind: str, shape: tuple[int, ...], random: np.random.Generator) -> Array:
    """float32 of one kind."""
    normal = random.normal(size=shape)
    if kind == "wide":
        normal *= 10.0 ** random.uniform(-30, 30, shape)
    elif kind in ("tiny", "huge"):
        normal *= 1e-40 if kind == "tiny" else 1e37
    elif kind == "outlier":
        normal *= np.where(random.random(shape) < 0.05, 1e4, 1e-2)
    elif kind == "ties":
        normal = (random.integers(-9, 9, shape) + 0.5) * 2.0 ** random.choice([-24.0, -12.0, 0.0], shape)
    elif kind == "bits":
        bits = random.integers(0, 2**32, shape, np.uint32).view(np.float32)
        return np.where(np.isfinite(bits), bits, np.float32(1))
    elif kind == "zero":
        normal *= 0
    found = np.clip(normal, -3e38, 3e38).astype(np.float32)
    if kind == "holes":
        found[random.random(shape) < 0.01] = random.choice([np.nan, np.inf, -np.inf])
    return found


def cache(kind: str, shape: tuple[int, int, int], dim: int, random: np.random.Generator) -> Array:
    """Rows int8 [B, Hkv, S, D + n]."""
    return exact.stored_rows(values(kind, (*shape, dim), random))


def visible_rows(rows: int, position: int, window: tuple[int, int, int] | None = None) -> Array:
    """Return which of the rows of a cache the token at `position` sees, bool [rows]; its own is the newest written.

    Args:
        window: of a ring cache: sinks, window, and the position that was written last. The ring is the rows behind the
            sinks. None: a cache of all positions.
    """
    row = np.arange(rows)
    if window is None:
        return row <= position
    sinks, size, newest = window
    ring = rows - sinks
    # Row sinks + (newest - sinks) % ring holds the newest position. A row k places behind it is k positions older.
    held = np.where(row < sinks, row, newest - (newest - sinks - (row - sinks)) % ring)
    # A row of the ring that was never written gets a position before the ring's first, so no window has it.
    recent = (held >= sinks) & (held > position - size)
    return (held <= position) & ((row < sinks) | recent)


def attended(
    query: Array, keys: Array, rows: Array, position: int, scale: float, window: tuple[int, int] | None = None
) -> Array:
    """The reference for queries [B, Hq, T, D], one row after the other."""
    batch, heads, steps, _ = query.shape
    group, size, newest = heads // keys.shape[1], keys.shape[2], position + steps - 1
    y, factor = np.empty_like(query), exact.logit_factor(scale)
    for b, h, i in np.ndindex(batch, heads, steps):
        ring = None if window is None else (*window, newest)
        visible = visible_rows(size, position + i, ring)
        y[b, h, i] = exact.attention(query[b, h, i], keys[b, h // group], rows[b, h // group], visible, factor)
    return y


def same(a: Array, b: Array) -> bool:
    """Equal bits; every NaN is alike."""
    return bool(np.array_equal(a.view(np.int32)[~np.isnan(a)], b.view(np.int32)[~np.isnan(b)])) and bool(
        np.array_equal(np.isnan(a), np.isnan(b))
    )
