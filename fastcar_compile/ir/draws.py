"""Noise of draws: of seed, sequence, position and token alone, so that a draw may be repeated anywhere, at any time.

A token is drawn by Gumbel-max: the largest of `score * log2(e) + noise`, where noise is a Gumbel variable in units of
log2. Nothing here but integers and single IEEE operations, so the noise is equal on every machine and in JavaScript
(docs/reference/numerics.md, Draws).
"""

from __future__ import annotations

from functools import cache

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Words = NDArray[np.uint64]

LOG2_E = 1.4426950408889634

MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
WEYL = 0x9E3779B9, 0xBB67AE85
ROUNDS = 10
_LOW, _SHIFT = np.uint64(0xFFFFFFFF), np.uint64(32)

_OCTAVE = 1 << 11
"""Knots of the table in each octave of a word: its linear interpolation is off by less than 1e-7."""

KNOTS = 32 * _OCTAVE + 2
"""Knots of the table; the last two are equal, so that each knot has a next one."""

DRAW_NUMBERS = ("rows", "successive", "position", "code", "seed", "seed_high", "top_k", "first", "count")
"""What a compiled draw takes: rows that are there, how many of them are successive positions of one sequence, the first
position, number of the code, halves of the seed, top_k or 0, and the part of the vocabulary."""


def philox(key: int, counter: tuple[Words, Words, Words, Words]) -> list[Words]:
    """Return the four words, below 2^32, of Philox4x32-10 (Salmon et al., SC 2011); counters are broadcast."""
    a, b, c, d = counter
    low, high = key & 0xFFFFFFFF, key >> 32
    for i in range(ROUNDS):
        keys = (np.uint64((part + i * step) & 0xFFFFFFFF) for part, step in zip((low, high), WEYL, strict=True))
        first, second = a * np.uint64(MULTIPLIERS[0]), c * np.uint64(MULTIPLIERS[1])
        a, c = (second >> _SHIFT) ^ b ^ next(keys), (first >> _SHIFT) ^ d ^ next(keys)
        b, d = second & _LOW, first & _LOW
    return [a, b, c, d]


@cache
def table() -> NDArray[np.int32]:
    """Return the noise at each knot in units of 2^-20, int32 [KNOTS]."""
    knot = np.arange(KNOTS)
    share: Floats = np.ldexp(1 + knot % _OCTAVE / _OCTAVE, knot // _OCTAVE - 32)
    share[-2:] = 1 - 2**-33
    return np.rint(-np.log2(-np.log1p(-share) / np.log(2)) * 2**20).astype(np.int32)


@cache
def _slopes() -> tuple[Floats, Floats]:
    """Return the noise at each knot but the last, and a 4096th of the way to the next one; float64."""
    knots = table() / 2.0**20
    return knots[:-1], np.diff(knots) / 4096


def gumbel(words: NDArray[np.uint32]) -> Floats:
    """Return -log2(-log2(1 - w)) for w = (words | 1) / 2^32, by the table: exact in float64."""
    bits = (words | np.uint32(1)).astype(np.float32).view(np.int32)
    knots, slopes = _slopes()
    place = (bits >> 12) - (127 << 11)
    # No place is outside of the table; "clip" spares a pass that looks for one.
    noise = slopes.take(place, mode="clip")
    noise *= bits & 4095
    noise += knots.take(place, mode="clip")
    return noise


class Noise:
    """The noise of the tokens of some sequences.

    Args:
        seed: below 2^64. sequences: how many; the rows of a batch. vocabulary: tokens of each position.
    """

    _MOST = 1 << 15
    """Values that are computed ahead: numpy takes the same time for the calls of one and of many positions."""

    def __init__(self, seed: int, sequences: int, vocabulary: int) -> None:
        self._seed, self._shape = seed, (sequences, vocabulary)
        self._held = 0, 0, np.zeros((sequences, 0, vocabulary))

    def __call__(self, first: int, count: int = 1, part: int = 0) -> Floats:
        """Return float64 [sequences, count, vocabulary] of the positions from `first` on; part: number of a code."""
        begin, of, known = self._held  # one value: threads may share the object
        at, held = first - begin, known.shape[1]
        if part != of or at < 0 or at + count > held:
            # The first token of a video waits for the noise of few others.
            going = part == of and 0 <= at <= held
            most = self._MOST if going else self._MOST // 4
            known, at = self._made(first, count + most // (self._shape[0] * self._shape[1]), part), 0
            self._held = first, part, known
        return known[:, at : at + count]

    def _made(self, first: int, count: int, part: int) -> Floats:
        sequences, vocabulary = self._shape
        block, row = np.arange(-(-vocabulary // 4), dtype=np.uint64), np.arange(sequences, dtype=np.uint64)
        position = np.arange(first, first + count, dtype=np.uint64)
        counter = block, position[:, None], row[:, None, None], np.array([part], np.uint64)
        words = np.empty((sequences, count, len(block), 4), np.uint32)
        for i, word in enumerate(philox(self._seed, counter)):
            words[..., i] = word
        return gumbel(words.reshape(sequences, count, -1)[..., :vocabulary])
