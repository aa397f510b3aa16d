"""Choose query heads for gate `tas` layer by layer: greedily, by the NLL when the layer replays."""

import math
from collections.abc import Iterator

from fastcar_compile.gates import gate_named
from fastcar_compile.tune.evaluator import Evaluator
from fastcar_compile.tune.search import Say

SHARE = 0.6
"""Share of a layer's forwards that replay while its heads are compared."""

MOST_HEADS = 3
"""Most heads of one layer. A further head is added only if it lowers the NLL."""

Heads = tuple[tuple[int, float], ...]


def choose_heads(evaluator: Evaluator, counts: list[int], say: Say) -> Iterator[Heads]:
    """Yield for each layer the (head, weight 1 or -1) pairs with the least NLL when SHARE of this layer alone replays.

    The best single head comes first. Then comes the head whose sum or difference with those chosen lowers the NLL most.

    Args:
        evaluator: on calibration videos, with gate "tas". counts: query heads of each layer.
        say: called with one line per chosen head.
    """
    for layer, count in enumerate(counts):
        yield _layer(evaluator, layer, count, say)


def _layer(evaluator: Evaluator, layer: int, count: int, say: Say) -> Heads:
    best: tuple[float, Heads] = (math.inf, ())
    while len(best[1]) < min(MOST_HEADS, count):
        taken = {head for head, _ in best[1]}
        free = [(head, sign) for head in range(count) if head not in taken for sign in (1.0, -1.0)]
        # Equal NLLs are decided by the heads, so the choice is deterministic.
        tried = min((_nll(evaluator, layer, (*best[1], pair)), (*best[1], pair)) for pair in free)
        if tried[0] >= best[0]:
            break
        best = tried
        say(f"heads of layer {layer}: {', '.join(f'{h}:{w:+g}' for h, w in best[1])}, NLL {best[0]:.4g}")
    return best[1]


def _nll(evaluator: Evaluator, layer: int, heads: Heads) -> float:
    """Return the NLL with SHARE of the layer's dense scores above the threshold."""
    evaluator.set_gate(layer, gate_named("tas", heads, rotary=evaluator.rotary))
    scores = evaluator.scores(layer)
    # TAS replays large scores: the share below the threshold computes.
    threshold = float(scores.kthvalue(max(1, round((1 - SHARE) * len(scores)))).values)
    closed = [None] * evaluator.layers
    return evaluator.measure([*closed[:layer], threshold, *closed[layer + 1 :]]).nll
