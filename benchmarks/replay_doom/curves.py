"""NLL against replay: what a gate's measured points say about a limit."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from replay_doom.setup import LIMITS, Variant
from replay_doom.stages import within

Row = Mapping[str, Any]
WHOLE = "all"
"""Group of all frames."""


@dataclass(frozen=True)
class Point:
    """One measured choice of thresholds: share replayed of t >= F, and NLL relative to dense, in some group."""

    replay: float
    cost: float


def point(row: Row, group: str = WHOLE) -> Point:
    """Return the point of a row in a group of frames."""
    values = row if group == WHOLE else row["groups"][group]
    return Point(values["replay_ratio"], float(values["nll"]) / values["nll_dense"])


def rows_of(rows: Iterable[Row], variant: Variant) -> list[Row]:
    """Return the rows of a gate with attention to all positions, in the order of their replay."""
    names = {variant.name, *(within(variant, limit) for limit in LIMITS)}
    own = [row for row in rows if row["calibration"] in names and row["sparse_attention"] == "none"]
    return sorted(own, key=lambda row: row["replay_ratio"])


def curve(rows: Iterable[Row], variant: Variant, group: str = WHOLE) -> list[Point]:
    """Return a gate's measured points in a group, in the order of their replay, with the dense decoder first."""
    found = [point(row, group) for row in rows_of(rows, variant)]
    return [Point(0.0, 1.0), *sorted(found, key=lambda p: p.replay)]


def most_replay(points: Sequence[Point], limit: float) -> float:
    """Return the highest replay at a cost within the limit: between two points the cost is a straight line."""
    best = max((p.replay for p in points if p.cost <= limit), default=0.0)
    for before, after in pairwise(points):
        if before.cost <= limit < after.cost:
            share = (limit - before.cost) / (after.cost - before.cost)
            best = max(best, before.replay + share * (after.replay - before.replay))
    return best
