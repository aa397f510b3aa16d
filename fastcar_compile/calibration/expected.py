"""What share other videos will replay: cross-validation over the videos of a calibration."""

from __future__ import annotations

import math
from statistics import NormalDist

import numpy as np

from fastcar_compile.artifact.thresholds import Expected
from fastcar_compile.calibration.search import Search, Values

CONFIDENCE = 0.9
"""Of the interval. A test counts how often it holds on drawn videos."""

GOAL = 0.02
"""The interval that a calibration should have: two points to either side."""


def expected(search: Search, values: Values) -> Expected | None:
    """Return the share that other videos will replay with these thresholds. None: one video says nothing of others.

    Each video is left out once. All layers' thresholds are shifted alike until the other videos replay as much as all
    did, and the share of the video that was left out counts.
    """
    distance, other = search.beside(values)
    shares = np.array([search.outcome(chosen).shares for chosen in (values, other)])
    count = shares.shape[1]
    if count < 2:
        return None
    left = np.array([_left_out(shares, video, distance) for video in range(count)])
    # A video's own share moves the thresholds of the fold that it judges, so it deviates by n / (n - 1) too much.
    error = float(left.std(ddof=1)) * (count - 1) / count / math.sqrt(count)
    # Few videos give an uncertain deviation, so Student's t is used and not the normal distribution.
    half = error * student(count - 1)
    middle = float(left.mean())
    return Expected(
        replay=_share(middle),
        low=_share(middle - half),
        high=_share(middle + half),
        confidence=CONFIDENCE,
        videos=count,
        searched=search.searched or count,
        videos_needed=_needed(error * math.sqrt(count)),
    )


def _left_out(shares: np.ndarray, video: int, distance: float) -> float:
    """Return the share of a video where the others replay as much as all did. Shares are linear in a shift.

    Args:
        shares: [2, videos], at the thresholds and at those shifted by `distance`.
    """
    others = np.delete(shares, video, 1).mean(1)
    slope = (others[1] - others[0]) / distance
    # Where the shift changes nothing, as with many equal scores, the video's own share stands.
    if slope <= 0:
        return float(shares[0, video])
    own = (shares[1] - shares[0])[video] / distance
    return float(shares[0, video] + own * (shares[0].mean() - others[0]) / slope)


def _share(value: float) -> float:
    return min(max(value, 0.0), 1.0)


def _needed(deviation: float) -> int:
    """Return the number of videos whose interval is GOAL to either side, if they deviate as much as these."""
    count = 2
    while student(count - 1) * deviation / math.sqrt(count) > GOAL:
        count += 1
    return count


def student(freedom: int) -> float:
    """Return the quantile of Student's t distribution that ends the interval of CONFIDENCE.

    Expansion 26.7.5 of Abramowitz and Stegun, Handbook of Mathematical Functions; exact for one and two degrees.
    """
    tail = (1 + CONFIDENCE) / 2
    if freedom == 1:
        return math.tan(math.pi * (tail - 0.5))
    if freedom == 2:
        return (2 * tail - 1) / math.sqrt(2 * tail * (1 - tail))
    z = NormalDist().inv_cdf(tail)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + sum(term / freedom**power for power, term in enumerate(terms, 1))
