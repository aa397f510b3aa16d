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

from fastcar_compile.calibration.allocate import Point, allocate, allocate_budget
from fastcar_compile.calibration.evaluator import Evaluator
from fastcar_compile.gates import Comparison, Gate

QUANTILES = (0.2, 0.4, 0.55, 0.68, 0.78, 0.86, 0.92, 0.96, 1.0)
"""Shares of a layer's recorded scores at which its damage curve is measured on the dense decoder."""

SPREADS = (0.1, 0.05, 0.025)
"""Then around the choice so far, on top of the other layers' thresholds: one of these to either side, in turn."""

ROUNDS = 2
"""At most, with one spread, as long as they help."""

STEPS = (0.06, 0.03)
"""By which single layers grow while a budget of damage allows it, as shares of a layer's scores."""

EXCESS = 0.004
"""A joint ratio meets its target where it is at least the target and at most this beyond. Choices are compared so."""

TRIES = 8
"""Of a common shift, for the ratio to be met; many equal scores may keep it from that."""

HOPELESS = math.log(6.0)
"""A layer's curve is not followed beyond this damage (six times the NLL)."""

Values = tuple[float | None, ...]
At = Callable[[int, float], float | None]
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

    def near(self, layer: int, base: Values, spread: float, ends: bool = False) -> list[Point]:
        """Damage of thresholds around this layer's own in `base`, relative to `base`; with `ends` also of the layer
        closed and always replaying."""
        share, before = self.share(layer, base[layer]), self.outcome(base)
        points = [Point(base[layer], before.ratios[layer], 0.0)]
        shares = [max(share - spread, 0.0), min(share + spread, 1.0), *((0.0, 1.0) if ends else ())]
        values = [self.at(layer, s) for s in shares] if self._able[layer] else []
        for value in dict.fromkeys(values):
            if value != base[layer]:
                found = self.outcome(_with(base, layer, value))
                points.append(Point(value, found.ratios[layer], found.damage - before.damage))
        return points

    def uniform(self, target: float) -> Values:
        """One quantile for every layer, that meets the target."""
        return self._meet(target, target, lambda share: self._all(share, self.at))

    def level(self, target: float) -> Values:
        """One threshold for every layer: the best one where layers were trained together. Like `uniform` otherwise."""
        able = [scores for scores, can in zip(self._scores, self._able, strict=True) if can]
        pooled = torch.sort(torch.cat(able), descending=self._comparison is Comparison.AT_LEAST).values
        at: At = lambda _layer, share: _at(pooled, share, self._comparison)  # noqa: E731
        return self._meet(target, target, lambda share: self._all(share, at))

    def shifted(self, values: Values, target: float) -> Values:
        """All shares shifted alike until they meet the target; a layer that never or always replays stays."""
        shares = [self.share(layer, value) for layer, value in enumerate(values)]

        def by(shift: float) -> Values:
            moved = (min(max(share + shift, 0.0), 1.0) if 0 < share < 1 else share for share in shares)
            return tuple(
                value if new == old else self.at(i, new)
                for i, (value, old, new) in enumerate(zip(values, shares, moved, strict=True))
            )

        return self._meet(target, 0.0, by, low=-1.0)

    def _all(self, share: float, at: At) -> Values:
        return tuple(at(i, share) if able else None for i, able in enumerate(self._able))

    def _meet(
        self, target: float, first: float, values_at: Callable[[float], Values], low: float = 0.0, high: float = 1.0
    ) -> Values:
        """Of values that grow with an argument the least that reach the target, or else the most that were tried."""
        guess, best = first, values_at(first)
        for _ in range(TRIES):
            values = values_at(guess)
            ratio, before = self.outcome(values).replay, self.outcome(best).replay
            if (ratio < target, abs(ratio - target)) <= (before < target, abs(before - target)):
                best = values
            if 0 <= ratio - target <= EXCESS or low >= high:
                break
            low, high = (guess, high) if ratio < target else (low, guess)
            step = guess + target + EXCESS / 2 - ratio
            guess = step if low < step < high else (low + high) / 2
        return best

    def for_replay(self, target: float) -> Values:
        """Thresholds of at least this replay ratio, of small damage."""
        best, plain = self._first(target), self.uniform(target)
        best = plain if self._better(plain, best, target) else best
        for spread in SPREADS:
            for number in range(ROUNDS):
                ends = spread == SPREADS[0] and number == 0
                curves = [self.near(layer, best, spread, ends) for layer in range(len(best))]
                chosen = self._reach(curves, target, min(target, _most(curves)))
                if not self._better(chosen, best, target):
                    break
                best = chosen
        return best

    def _first(self, target: float) -> Values:
        """From damage curves on the dense decoder; where layers were trained together, from their common threshold.

        Curves are not followed into what is hopeless: beyond their reach one quantile for every layer is the beginning.
        """
        if self._one_scale:
            return self.level(target)
        curves = [self.curve(layer, self.closed) for layer in range(len(self.closed))]
        reach = _most(curves)
        if reach < target <= sum(self._able) / len(self._able):
            return self.uniform(target)
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

    def _reach(self, curves: list[list[Point]], target: float, sought: float) -> Values:
        """Ratios shift a little when layers replay together, so the joint ratio is met afterwards."""
        chosen = tuple(p.threshold for p in allocate(curves, sought))
        return self.shifted(chosen, target)

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
