"""Which query heads tell how far a token changed: chosen layer by layer, greedily, by the damage that they do."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

from fastcar_compile.calibrate.evaluator import Evaluator
from fastcar_compile.gates import gate_named

SHARE = 0.6
"""Of a layer's forwards that replay while its heads are compared."""

MOST_HEADS = 3
"""A further head is taken only while it helps, and never more than this many."""

FIRST_STEP = 0.2
"""Of a weight, as a share of the sum of its layer's absolute weights."""

WORTH = 2.0
"""Of log NLL that one more share of replay may cost while weights are compared."""

Heads = tuple[tuple[int, float], ...]
Say = Callable[[str], None]


def choose_heads(
    evaluator: Evaluator, counts: list[int], say: Say = lambda _line: None, first: int = 0
) -> Iterator[Heads]:
    """Per layer (head, weight 1 or -1) pairs of least NLL when SHARE of the layer replays and nothing else does.

    The best single head comes first, then the head whose sum or difference with those chosen helps most.

    Args:
        evaluator: of calibration videos, with gate "tas". counts: query heads per layer.
        first: the layer to begin with.

    Yields:
        A layer's heads as soon as they are chosen.
    """
    for layer, count in list(enumerate(counts))[first:]:
        yield _layer(evaluator, layer, count, say)


def _layer(evaluator: Evaluator, layer: int, count: int, say: Say) -> Heads:
    best: tuple[float, Heads] = (math.inf, ())
    while len(best[1]) < min(MOST_HEADS, count):
        taken = {head for head, _ in best[1]}
        free = [(head, sign) for head in range(count) if head not in taken for sign in (1.0, -1.0)]
        tried = min((_nll(evaluator, layer, (*best[1], pair)), (*best[1], pair)) for pair in free)
        if tried[0] >= best[0]:
            break
        best = tried
        say(f"heads of layer {layer}: {', '.join(f'{h}:{w:+g}' for h, w in best[1])}, NLL {best[0]:.4g}")
    return best[1]


def _nll(evaluator: Evaluator, layer: int, heads: Heads) -> float:
    """With SHARE of the layer's dense scores above the threshold."""
    evaluator.set_gate(layer, gate_named("tas", heads))
    scores = evaluator.scores(layer)
    threshold = float(scores.kthvalue(max(1, round((1 - SHARE) * len(scores)))).values)
    closed = [None] * evaluator.layers
    return evaluator.measure([*closed[:layer], threshold, *closed[layer + 1 :]]).nll


def refine_heads(
    evaluator: Evaluator,
    heads: Sequence[Heads],
    thresholds: Sequence[float],
    say: Say = lambda _line: None,
    sweeps: int = 3,
) -> tuple[list[Heads], list[float]]:
    """Weights of gate "tas" that do less damage, all layers replaying together: every weight of every layer in turn is
    moved to either side, by a step that is halved from sweep to sweep, and stays where that helps.

    Args:
        evaluator: of calibration videos, with gate "tas". heads: per layer its (head, weight) pairs, all heads named.
        thresholds: of these heads: a layer's share of replays stays about as it is with them.
        sweeps: over all weights.

    Returns:
        Heads and thresholds; the best that were measured.
    """
    climb = _Climb(evaluator, list(heads), list(thresholds))
    for sweep in range(sweeps):
        for layer, pairs in enumerate(heads):
            for head, _ in pairs:
                climb.move(layer, head, FIRST_STEP / 2**sweep)
            say(f"sweep {sweep + 1} of {sweeps}, layer {layer}: {climb.cost:.4f}")
    return climb.heads, climb.thresholds


class _Climb:
    """The best heads so far; cost: log NLL, less what the replay above the first one is worth."""

    def __init__(self, evaluator: Evaluator, heads: list[Heads], thresholds: list[float]) -> None:
        self._evaluator, self.heads, self.thresholds = evaluator, heads, thresholds
        for layer, pairs in enumerate(heads):
            evaluator.set_gate(layer, gate_named("tas", pairs))
        self._scores = [evaluator.scores(layer) for layer in range(len(heads))]
        self._shares = [float((s >= t).float().mean()) for s, t in zip(self._scores, thresholds, strict=True)]
        first = evaluator.measure(thresholds)
        self._replay, self.cost = first.replay, math.log(first.nll)

    def move(self, layer: int, head: int, step: float) -> None:
        """This weight one step up, or else one step down, as long as either helps once."""
        pairs = self.heads[layer]
        size = sum(abs(w) for _, w in pairs)
        for sign in (1.0, -1.0):
            moved = tuple((h, w + sign * step * size if h == head else w) for h, w in pairs)
            threshold, cost = self._tried(layer, moved)
            if cost < self.cost:
                self.heads[layer], self.thresholds[layer], self.cost = moved, threshold, cost
                return
        self._evaluator.set_gate(layer, gate_named("tas", pairs))

    def _tried(self, layer: int, pairs: Heads) -> tuple[float, float]:
        self._evaluator.set_gate(layer, gate_named("tas", pairs))
        scores = self._evaluator.scores(layer)
        threshold = float(scores.kthvalue(max(1, round((1 - self._shares[layer]) * len(scores)))).values)
        found = self._evaluator.measure([*self.thresholds[:layer], threshold, *self.thresholds[layer + 1 :]])
        return threshold, math.log(found.nll) - WORTH * (found.replay - self._replay)
