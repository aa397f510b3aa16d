"""Threshold search: loss curves on the dense decoder, then around the best choice so far.

A loss is an increase of the log NLL. docs/reference/gates.md describes the method.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fastcar_compile.gates import Comparison, Gate
from fastcar_compile.tune.curves import LossCurves, Point, allocate, allocate_budget
from fastcar_compile.tune.evaluator import Evaluator, check_dense
from fastcar_compile.tune.journal import Journal

QUANTILES = (0.2, 0.4, 0.55, 0.68, 0.78, 0.86, 0.92, 0.96, 1.0)
"""Shares of a layer's recorded scores at which its loss curve is measured on the dense decoder."""

SPREADS = (0.1, 0.05)
"""Distances from the choice so far at which curves are measured again, one after the other."""

REACH = 0.3
"""A first choice measures no curve further below its target."""

BETWEEN = (0.25, 0.5, 0.75)
"""Where a curve is read between two measured points, as shares of their distance."""

ROUNDS = 2
"""Most refinements with one spread. They stop earlier when one does not help."""

STEPS = (0.06, 0.03)
"""Steps by which single layers replay more within a loss budget, as shares of a layer's scores."""

TOLERANCE = 0.004
"""A joint ratio meets its target if it is at least the target and at most this much greater."""

TRIES = 8
"""Most attempts at a common shift that meets the target. Many equal scores can make it impossible."""

LEAST_GROWTH = 0.2
"""Least growth of the replay per share that a shift is computed with. Equal scores can make a measured one zero."""

PROMISE = 0.005
"""A search ends where its curves promise a smaller decrease of the log NLL: 0.5 % of the NLL."""

BESIDE = (0.003, 0.02, 0.05)
"""Least, usual and greatest distance of thresholds that show how the videos' shares grow, as a share of the scores."""

Values = tuple[float | None, ...]
At = Callable[[int, float], float | None]
Say = Callable[[str], None]


@dataclass(frozen=True)
class Outcome:
    """Joint result of a threshold vector.

    Attributes:
        ratios: of each layer. loss: increase of the log NLL over dense.
        shares: for each video (each pair of videos, where they replay together), the mean of its layers' ratios.
    """

    ratios: tuple[float, ...]
    loss: float
    shares: tuple[float, ...] = ()

    @property
    def replay(self) -> float:
        """Mean over layers."""
        return sum(self.ratios) / len(self.ratios)


class Search:
    """Chooses one threshold per layer.

    Args:
        evaluator: on the calibration videos. gate: its class. able: for each layer, whether it may replay.
        journal: measurements so far. say: called with one line per measurement. spared: of each layer, what share of
            its MLP's weights a replay does not read; default: all.

    Attributes:
        few: returns a search on some of the videos, which finds how the layers share the replay; then this one only
            meets the target. None: this one does both.
        searched: number of videos (pairs, where they replay together) that found the shares; 0: all.
    """

    def __init__(
        self,
        evaluator: Evaluator,
        gate: type[Gate],
        able: Sequence[bool],
        journal: Journal,
        say: Say,
        spared: Sequence[float] = (),
    ) -> None:
        self._evaluator, self._comparison, self._able = evaluator, gate.comparison, list(able)
        self._one_scale, self.spared = gate.one_scale, tuple(spared) or (1.0,) * len(able)
        self._journal, self._say, self.count = journal, say, 0
        self.few: Callable[[], Search] | None = None
        self.searched = 0
        self._growth, self._shifts = 0.0, dict[Values, float]()
        self._ended = set[int]()
        self.closed: Values = (None,) * len(able)
        dense = evaluator.measure(self.closed)
        self.dense_nll = check_dense(dense.nll)
        # The scores that replay first come first, so a share of the layer is an index.
        flip = gate.comparison is Comparison.AT_LEAST
        self._scores = [torch.sort(s, descending=flip).values for s in dense.scores]

    def outcome(self, values: Values) -> Outcome:
        """Return the joint result of a threshold vector, measured or from the journal."""
        # Hexadecimal names are exact: two thresholds never share a measurement.
        name = json.dumps([None if v is None else float(v).hex() for v in values])
        entry = self._journal.find(name)
        if entry is None:
            self.count += 1
            found = self._evaluator.measure(values, with_scores=False)
            entry = [found.nll, *found.ratios, *found.shares]
            self._journal.add(name, entry)
            self._say(f"{len(self._journal.entries)} measured, last: replay {found.replay:.1%}, NLL {found.nll:.4g}")
        nll, ratios, shares = entry[0], entry[1 : 1 + len(values)], entry[1 + len(values) :]
        # A replay may reach an NLL of 0; its loss stays a number.
        loss = math.log(max(nll / self.dense_nll, sys.float_info.min)) if math.isfinite(nll) else math.inf
        return Outcome(tuple(ratios), loss, tuple(shares))

    def net(self, found: Outcome) -> float:
        """Return the share of all MLPs' weights that the replays do not read."""
        return sum(r * s for r, s in zip(found.ratios, self.spared, strict=True)) / len(self.spared)

    def at(self, layer: int, share: float) -> float | None:
        """Return the threshold that this share of the layer's dense scores passes."""
        return _at(self._scores[layer], share, self._comparison)

    def curves(self) -> LossCurves:
        """Return loss curves of single layers, with the others closed, of which nothing is measured yet."""

        def alone(layer: int, share: float) -> Point:
            value = self.at(layer, share)
            found = self.outcome(_with(self.closed, layer, value))
            return Point(value, found.ratios[layer], found.loss)

        return LossCurves(alone, self._able)

    def near(self, layer: int, base: Values, spread: float, ends: bool = False) -> list[Point]:
        """Return the loss of thresholds around this layer's own in `base`, relative to `base`.

        Args:
            spread: distance to either side, a share of the scores. ends: also measure the layer closed; and always
                open, unless its loss curve has ended before.
        """
        share, before = self.share(layer, base[layer]), self.outcome(base)
        points = [Point(base[layer], before.ratios[layer], 0.0)]
        outer = (0.0, *(() if layer in self._ended else (1.0,))) if ends else ()
        shares = [max(share - spread, 0.0), min(share + spread, 1.0), *outer]
        values = [self.at(layer, s) for s in shares] if self._able[layer] else []
        for value in dict.fromkeys(values):
            if value != base[layer]:
                found = self.outcome(_with(base, layer, value))
                points.append(Point(value, found.ratios[layer], found.loss - before.loss))
        return points

    def _between(self, layer: int, points: list[Point]) -> list[Point]:
        """Return the points of a layer with further ones read from a curve through the three around its own share."""
        own, *others = points
        middle = self.share(layer, own.threshold)
        around = [(self.share(layer, p.threshold) - middle, p) for p in others if p.threshold is not None]
        below = max((entry for entry in around if entry[0] < 0), key=lambda entry: entry[0], default=None)
        above = min((entry for entry in around if entry[0] > 0), key=lambda entry: entry[0], default=None)
        if below is None or above is None:
            return points
        x, read = (below[0], 0.0, above[0]), []
        for part in BETWEEN:
            for end in (below[0], above[0]):
                # The weights of the three points' values in that of the parabola through them (Lagrange).
                at = part * end
                weights = [math.prod((at - x[j]) / (x[i] - x[j]) for j in range(3) if j != i) for i in range(3)]
                ratio, loss = (
                    sum(w * value for w, value in zip(weights, values, strict=True))
                    for values in ((below[1].ratio, own.ratio, above[1].ratio), (below[1].loss, 0.0, above[1].loss))
                )
                read.append(Point(self.at(layer, middle + part * end), min(max(ratio, 0.0), 1.0), loss))
        return points + read

    def uniform(self, target: float) -> Values:
        """Return the thresholds of one quantile for all layers that meet the target."""
        return self._meet(target, target, lambda share: self._all(share, self.at))

    def level(self, target: float) -> Values:
        """Return one common threshold that meets the target: a good start where layers were trained together."""
        at = self._pooled()
        return self._meet(target, target, lambda share: self._all(share, at))

    def _pooled(self) -> At:
        """Return the thresholds of shares of all layers' scores together."""
        able = [scores for scores, can in zip(self._scores, self._able, strict=True) if can]
        pooled = torch.sort(torch.cat(able), descending=self._comparison is Comparison.AT_LEAST).values
        return lambda _layer, share: _at(pooled, share, self._comparison)

    def shifted(self, values: Values, target: float) -> Values:
        """Return thresholds with all shares shifted alike to meet the target; those of 0 and 1 stay."""
        shifts = dict[Values, float]()

        def at(shift: float) -> Values:
            moved = self.moved(values, shift)
            shifts.setdefault(moved, shift)
            return moved

        self._shifts = shifts
        return self._meet(target, 0.0, at, low=-1.0)

    def moved(self, values: Values, shift: float) -> Values:
        """Return thresholds with all shares shifted alike; those of 0 and 1 stay."""
        shares = [self.share(layer, value) for layer, value in enumerate(values)]
        moved = (min(max(share + shift, 0.0), 1.0) if 0 < share < 1 else share for share in shares)
        return tuple(
            value if new == old else self.at(i, new)
            for i, (value, old, new) in enumerate(zip(values, shares, moved, strict=True))
        )

    def _all(self, share: float, at: At) -> Values:
        return tuple(at(i, share) if able else None for i, able in enumerate(self._able))

    def _meet(self, target: float, first: float, values_at: Callable[[float], Values], low: float = 0.0) -> Values:
        """Return the least thresholds tried that reach the target, or else the greatest; they grow with an argument.

        The next argument follows from how the replay grew between the last two, within what is not ruled out.
        """
        guess, best, last = first, values_at(first), None
        growth, high = self._growth or 1.0, 1.0
        for _ in range(TRIES):
            values = values_at(guess)
            ratio, before = self.outcome(values).replay, self.outcome(best).replay
            # Reaching the target comes first, then the distance from it.
            if (ratio < target, abs(ratio - target)) <= (before < target, abs(before - target)):
                best = values
            if 0 <= ratio - target <= TOLERANCE or low >= high:
                break
            low, high = (guess, high) if ratio < target else (low, guess)
            # Equal scores or noise can give a slope of the wrong sign. The last good slope is then kept.
            if last is not None and (ratio - last[1]) * (guess - last[0]) > 0:
                growth = max((ratio - last[1]) / (guess - last[0]), LEAST_GROWTH)
            last = guess, ratio
            step = guess + (target + TOLERANCE / 2 - ratio) / growth
            # A step beyond what is ruled out becomes a bisection.
            guess = step if low < step < high else (low + high) / 2
        self._growth = growth
        return best

    def beside(self, values: Values) -> tuple[float, Values]:
        """Return thresholds whose shares differ from these all alike, and the difference; measured before if any were.

        Args:
            values: of `shifted`, or others.
        """
        least, usual, greatest = BESIDE
        own = self._shifts.get(values)
        if own is not None:
            near = [(abs(shift - own), shift - own, other) for other, shift in self._shifts.items()]
            near = [entry for entry in near if least <= entry[0] <= greatest]
            if near:
                return min(near, key=lambda entry: entry[0])[1:]
        return usual, self.moved(values, usual)

    def for_replay(self, target: float) -> Values:
        """Return thresholds of at least this replay ratio and small loss."""
        if self.few is not None:
            few = self.few()
            chosen = few.for_replay(target)
            self._growth, self.searched = few._growth, len(few.outcome(chosen).shares)
            found = self.shifted(chosen, target)
            return found if self.outcome(found).replay >= target else self.uniform(target)
        chosen, plain = self._first(target), self.uniform(target)
        best = plain if self._better(plain, chosen, target) else chosen
        for spread in SPREADS:
            for number in range(ROUNDS):
                chosen = self._refined(best, target, spread, ends=spread == SPREADS[0] and number == 0)
                if chosen is None:
                    return best
                if not self._better(chosen, best, target):
                    break
                best = chosen
        return best

    def _refined(self, best: Values, target: float, spread: float, ends: bool) -> Values | None:
        """Return the choice by curves around the best one. None: they promise less than PROMISE.

        They are read between their points too, so smaller spreads would promise no more.
        """
        curves = [self._between(layer, self.near(layer, best, spread, ends)) for layer in range(len(best))]
        points = allocate(curves, min(target, _most(curves)))
        if sum(point.loss for point in points) > -PROMISE and self.outcome(best).replay >= target:
            return None
        return self.shifted(_chosen(points), target)

    def _first(self, target: float) -> Values:
        """Return the first choice: from loss curves, or the common threshold where layers were trained together.

        For a target beyond the curves' reach the first choice is one quantile for all layers.
        """
        if self._one_scale:
            return self.level(target)
        drawn = self.curves()
        curves = drawn.for_replay([share for share in QUANTILES if share >= target - REACH], target)
        self._ended = drawn.ended
        reach = _most(curves)
        if reach < target <= sum(self._able) / len(self._able):
            return self.uniform(target)
        # Ratios change when layers replay together, so the allocated thresholds are shifted to the target.
        return self.shifted(_chosen(allocate(curves, target)), target)

    def path(self, targets: Sequence[float]) -> list[Values]:
        """Return thresholds near each of these replay ratios, from the layers' own curves: nothing joint is measured.

        Layers that were trained together get one common threshold.
        """
        if self._one_scale:
            return [self._all(target, self._pooled()) for target in targets]
        curves = self.curves().for_loss(QUANTILES, math.inf)
        most = _most(curves)
        return [_chosen(allocate(curves, min(target, most))) for target in targets]

    def for_loss(self, max_loss: float) -> Values:
        """Return thresholds whose replays spare many weights, and whose measured loss is at most this."""
        drawn = self.curves().for_loss(QUANTILES, max_loss)
        # A replay spares as much as its draft leaves.
        curves = [[replace(p, ratio=p.ratio * s) for p in own] for own, s in zip(drawn, self.spared, strict=True)]
        budget, best = max_loss, self.closed
        for _ in range(8):
            chosen = _chosen(allocate_budget(curves, budget))
            found = self.outcome(chosen)
            if found.loss <= max_loss and self.net(found) > self.net(self.outcome(best)):
                best = chosen
                break
            # Layers that replay together cost more than their curves say, so the budget of the curves shrinks.
            budget *= 0.6
        return self._grow(best, max_loss)

    def _better(self, values: Values, than: Values, target: float) -> bool:
        new, old = self.outcome(values), self.outcome(than)
        return (new.replay < target, new.loss) < (old.replay < target, old.loss)

    def _grow(self, best: Values, max_loss: float) -> Values:
        """Return thresholds with single layers raised while the measured loss stays within the budget."""
        for step in STEPS:
            grown = True
            while grown:
                grown = False
                for layer in (i for i, able in enumerate(self._able) if able):
                    share = self.share(layer, best[layer]) + step
                    candidate = _with(best, layer, self.at(layer, min(share, 1.0)))
                    found = self.outcome(candidate)
                    if found.loss <= max_loss and self.net(found) > self.net(self.outcome(best)):
                        best, grown = candidate, True
        return best

    def share(self, layer: int, value: float | None) -> float:
        """Return the share of the layer's dense scores that pass a threshold: the inverse of `at`."""
        if value is None:
            return 0.0
        scores = self._scores[layer]
        passing = (scores <= value) if self._comparison is Comparison.AT_MOST else (scores >= value)
        return float(passing.float().mean())


def _at(scores: Tensor, share: float, comparison: Comparison) -> float | None:
    """Return the score that this share of the sorted scores passes; None for a share of 0."""
    if share <= 0:
        return None
    return comparison.always if share >= 1 else float(scores[min(int(share * len(scores)), len(scores) - 1)])


def _chosen(points: Sequence[Point]) -> Values:
    return tuple(point.threshold for point in points)


def _with(values: Values, layer: int, value: float | None) -> Values:
    return (*values[:layer], value, *values[layer + 1 :])


def _most(curves: list[list[Point]]) -> float:
    # Rounding down may cost every layer a unit, so the most that is sought is a unit less.
    return sum(max(p.ratio for p in curve) for curve in curves) / len(curves) - 0.001
