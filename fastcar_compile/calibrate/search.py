"""From measurements to thresholds: damage curves on a dense decoder, then around the choice so far."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from fastcar_compile.calibrate.allocate import Point, allocate, allocate_budget
from fastcar_compile.calibrate.evaluator import Evaluator
from fastcar_compile.gates import Comparison, Gate

QUANTILES = (0.2, 0.4, 0.55, 0.68, 0.78, 0.86, 0.92, 0.96)
"""Shares of a layer's recorded scores at which its damage curve is measured on the dense decoder."""

SPREADS = (0.1,)
"""Then around the choice so far, on top of the other layers' thresholds: one of these to either side, in turn."""

ONE_SCALE_SPREADS = (0.06,)
"""The same where calibration begins with one threshold for every layer, which is near its best."""

STEPS = (0.06, 0.03)
"""By which single layers grow while a budget of damage allows it, as shares of a layer's scores."""

UNIFORM_TOLERANCE = 0.003
"""How near the joint ratio of one quantile for every layer comes to its target."""

HOPELESS = math.log(6.0)
"""A layer's curve is not followed beyond this damage (six times the NLL)."""

Values = tuple[float | None, ...]
Say = Callable[[str], None]


@dataclass(frozen=True)
class Outcome:
    """Joint result of a threshold vector: ratios per layer and log NLL above dense."""

    ratios: tuple[float, ...]
    damage: float

    @property
    def replay(self) -> float:
        """Mean over layers."""
        return sum(self.ratios) / len(self.ratios)


class Journal:
    """Every measurement, kept in a JSON file so that an interrupted calibration goes on where it was.

    Args:
        path: the file; None: nothing is kept. key: hash of everything that the measurements depend on; a file with
            another key is started anew.
    """

    def __init__(self, path: Path | None, key: str) -> None:
        self._path, self._key = path, key
        self.entries: dict[str, list[float]] = {}
        if path is not None and path.exists():
            data = json.loads(path.read_text("utf-8"))
            if data.get("key") == key:
                self.entries = data["measurements"]

    def add(self, name: str, entry: list[float]) -> None:
        """Keep one measurement; the file is replaced as a whole."""
        self.entries[name] = entry
        if self._path is not None:
            text = json.dumps({"key": self._key, "measurements": self.entries}, sort_keys=True, indent=0)
            scratch = self._path.with_name(self._path.name + ".part")
            scratch.write_text(text + "\n", "utf-8")
            os.replace(scratch, self._path)


class Search:
    """Chooses one threshold per layer.

    Args:
        evaluator: of the calibration videos. gate: its kind. able: layers that may replay.
        journal: measurements so far. say: progress.
    """

    def __init__(
        self, evaluator: Evaluator, gate: type[Gate], able: Sequence[bool], journal: Journal, say: Say
    ) -> None:
        self._evaluator, self._comparison, self._able = evaluator, gate.comparison, list(able)
        self._one_scale = gate.one_scale
        self._journal, self._say, self.count = journal, say, 0
        self.closed: Values = (None,) * len(able)
        dense = evaluator.measure(self.closed)
        self.dense_nll = dense.nll
        flip = gate.comparison is Comparison.AT_LEAST
        self._scores = [torch.sort(s, descending=flip).values for s in dense.scores]

    def outcome(self, values: Values) -> Outcome:
        """Measured, or remembered."""
        name = json.dumps([None if v is None else float(v).hex() for v in values])
        if name not in self._journal.entries:
            self.count += 1
            found = self._evaluator.measure(values)
            self._journal.add(name, [found.nll, *found.ratios])
            self._say(f"{len(self._journal.entries)} measured, last: replay {found.replay:.1%}, NLL {found.nll:.4g}")
        nll, *ratios = self._journal.entries[name]
        return Outcome(tuple(ratios), math.log(nll / self.dense_nll) if math.isfinite(nll) else math.inf)

    def at(self, layer: int, share: float) -> float | None:
        """The threshold that this share of the layer's dense scores passes."""
        return _at(self._scores[layer], share, self._comparison)

    def curve(self, layer: int, base: Values) -> list[Point]:
        """Damage of this layer's thresholds on top of the others in `base`, relative to the layer closed."""
        without = self.outcome(_with(base, layer, None))
        points = [Point(None, 0.0, 0.0)]
        for share in QUANTILES if self._able[layer] else ():
            value = self.at(layer, share)
            found = self.outcome(_with(base, layer, value))
            points.append(Point(value, found.ratios[layer], found.damage - without.damage))
            if points[-1].damage > HOPELESS:
                break
        return points

    def near(self, layer: int, base: Values, spread: float) -> list[Point]:
        """Damage of thresholds around this layer's own in `base`, relative to `base`."""
        share, before = self.share(layer, base[layer]), self.outcome(base)
        points = [Point(base[layer], before.ratios[layer], 0.0)]
        for steps in (-1, 1) if self._able[layer] else ():
            value = self.at(layer, min(share + steps * spread, 1.0))
            if value != base[layer]:
                found = self.outcome(_with(base, layer, value))
                points.append(Point(value, found.ratios[layer], found.damage - before.damage))
        return points

    def uniform(self, target: float) -> Values:
        """One quantile for every layer, whose joint replay ratio is the target within UNIFORM_TOLERANCE."""
        return self._bisect(target, self.at)

    def level(self, target: float) -> Values:
        """One threshold for every layer: the best one where layers were trained together. Like `uniform` otherwise."""
        able = [scores for scores, can in zip(self._scores, self._able, strict=True) if can]
        pooled = torch.sort(torch.cat(able), descending=self._comparison is Comparison.AT_LEAST).values
        return self._bisect(target, lambda _layer, share: _at(pooled, share, self._comparison))

    def _bisect(self, target: float, at: Callable[[int, float], float | None]) -> Values:
        share, low, high, values = target, 0.0, 1.0, self.closed
        for _ in range(8):
            values = tuple(at(i, share) if able else None for i, able in enumerate(self._able))
            ratio = self.outcome(values).replay
            if abs(ratio - target) <= UNIFORM_TOLERANCE:
                break
            low, high = (share, high) if ratio < target else (low, share)
            guess = share + target - ratio
            share = guess if low < guess < high else (low + high) / 2
        return values

    def for_replay(self, target: float) -> Values:
        """Thresholds of at least this replay ratio, of small damage."""
        best = self._first(target)
        plain = self.uniform(target)
        best = plain if self._better(plain, best, target) else best
        for spread in ONE_SCALE_SPREADS if self._one_scale else SPREADS:
            chosen = self._reach([self.near(layer, best, spread) for layer in range(len(best))], target, target)
            best = chosen if self._better(chosen, best, target) else best
        return best

    def _first(self, target: float) -> Values:
        """From damage curves on the dense decoder; where layers were trained together, from their common threshold.

        Curves are not followed into what is hopeless: beyond their reach one quantile for every layer is the beginning.
        """
        if self._one_scale:
            return self.level(min(target + UNIFORM_TOLERANCE, 1.0))
        curves = [self.curve(layer, self.closed) for layer in range(len(self.closed))]
        reach = _most(curves)
        if reach < target <= sum(self._able) / len(self._able):
            return self.uniform(min(target + UNIFORM_TOLERANCE, 1.0))
        return self._reach(curves, target, target)

    def for_damage(self, max_damage: float) -> Values:
        """Thresholds of great replay ratio whose measured damage is at most this."""
        curves = [self.curve(layer, self.closed) for layer in range(len(self.closed))]
        budget, best = max_damage, self.closed
        for _ in range(8):
            chosen = tuple(p.threshold for p in allocate_budget(curves, budget))
            found = self.outcome(chosen)
            if found.damage <= max_damage and found.replay > self.outcome(best).replay:
                best = chosen
                break
            budget *= 0.6
        return self._grow(best, max_damage)

    def _reach(self, curves: list[list[Point]], target: float, tried: float) -> Values:
        """Ratios shift a little when layers replay together: aim higher until the joint ratio meets the target."""
        for _ in range(6):
            values = tuple(p.threshold for p in allocate(curves, tried))
            short = target - self.outcome(values).replay
            if short <= 0:
                return values
            tried = min(tried + short + 0.002, _most(curves))
        return values

    def _better(self, values: Values, than: Values, target: float) -> bool:
        new, old = self.outcome(values), self.outcome(than)
        return (new.replay < target, new.damage) < (old.replay < target, old.damage)

    def _grow(self, best: Values, max_damage: float) -> Values:
        """Raise single layers while the measured damage stays within the budget."""
        for step in STEPS:
            grown = True
            while grown:
                grown = False
                for layer in (i for i, able in enumerate(self._able) if able):
                    share = self.share(layer, best[layer]) + step
                    candidate = _with(best, layer, self.at(layer, min(share, 1.0)))
                    found = self.outcome(candidate)
                    if found.damage <= max_damage and found.replay > self.outcome(best).replay:
                        best, grown = candidate, True
        return best

    def share(self, layer: int, value: float | None) -> float:
        """The inverse of `at`."""
        if value is None:
            return 0.0
        scores = self._scores[layer]
        passing = (scores <= value) if self._comparison is Comparison.AT_MOST else (scores >= value)
        return float(passing.float().mean())


def _at(scores: Tensor, share: float, comparison: Comparison) -> float | None:
    """Of sorted scores the one that this share passes."""
    if share <= 0:
        return None
    return comparison.always if share >= 1 else float(scores[min(int(share * len(scores)), len(scores) - 1)])


def _with(values: Values, layer: int, value: float | None) -> Values:
    return (*values[:layer], value, *values[layer + 1 :])


def _most(curves: list[list[Point]]) -> float:
    return sum(max(p.ratio for p in curve) for curve in curves) / len(curves) - 0.001
