"""Rows of a batch that replay on their own: caches of real tokens, and thresholds that a share of the scores passes.

Gate `tas` decides every row by its own score. A threshold per layer stays for the whole block, as in a deployment. It
is a quantile of the scores that a pass over the block saw. Replaying changes later scores, so the pass is repeated. The
last pass is the reference: every timed block must decide the same.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from fastcar_compile.ir.types import StateRole
from fastcar_compile.runtime.backends.cpu import CpuStepper
from speed.sizes import Job

FILLED = 10
"""Tokens that every row decodes first. Their keys and values are repeated up to the context."""

PASSES = 4
"""Most passes over a block that look for thresholds."""

_SLOTS = (StateRole.MLP_CACHE, StateRole.GATE_CACHE, StateRole.CHAIN_COUNT)
_CACHES = (StateRole.KEY_CACHE, StateRole.VALUE_CACHE)

Tokens = Callable[[int], np.ndarray]
"""Number of a step -> its tokens int64 [B, 1]."""


def quantile_thresholds(scores: np.ndarray, ratio: float, coupled: bool) -> np.ndarray:
    """Return a threshold per layer that this share of the scores reaches, float32 [L].

    Args:
        scores: float32 [steps, L, B]; a row replays where its score is not below the threshold.
        coupled: a pair of rows b and b + B / 2 replays where both would.
    """
    if coupled:
        half = scores.shape[2] // 2
        scores = np.minimum(scores[:, :, :half], scores[:, :, half:])
    layers = scores.shape[1]
    ordered = np.sort(scores.transpose(1, 0, 2).reshape(layers, -1), 1)[:, ::-1]
    count = round(ratio * ordered.shape[1])
    padded = np.pad(ordered, [(0, 0), (1, 1)], constant_values=((0, 0), (np.inf, -np.inf)))
    above, below = padded[:, count], padded[:, count + 1]
    between = np.where(np.isfinite(above) & np.isfinite(below), (above + below) / 2, np.where(count > 0, below, above))
    return between.astype(np.float32)


@dataclass(frozen=True)
class Found:
    """Thresholds float32 [L], and the decisions bool [steps, L, B] that they gave."""

    thresholds: np.ndarray
    decisions: np.ndarray


class IndependentRows:
    """The state before a block, and thresholds by ratio.

    Args:
        tokens: those of a block. start: position of its first token. Forward number F + i decodes token i.
    """

    def __init__(self, stepper: CpuStepper, job: Job, tokens: Tokens, start: int) -> None:
        self._stepper, self._job, self._tokens, self._start = stepper, job, tokens, start
        self._steps = job.sizes.block
        self._by_ratio = dict[float, Found]()
        if self._steps > FILLED:
            raise RuntimeError(f"a block of {self._steps} steps is longer than the {FILLED} tokens before it")
        self._fill()
        state = stepper._state
        slots = [state.arrays[s.name] for s in state._specs if s.role in _SLOTS]
        self._saved = [(array, array[: self._steps].copy()) for array in slots]

    def _fill(self) -> None:
        """Decode FILLED tokens of every row, and repeat their keys and values up to the context."""
        dense = np.full(self._job.sizes.layers, np.inf, np.float32)
        self._stepper.reset()
        for at in range(FILLED):
            # A pair's rows decode the same tokens after different first ones, as with guidance.
            self._stepper.decode(self._tokens(at) if at else self._first(), at, at, dense)
        state = self._stepper._state
        for name in (s.name for s in state._specs if s.role in _CACHES):
            array = state.arrays[name]
            for at in range(FILLED, self._job.sizes.context, FILLED):
                length = min(FILLED, self._job.sizes.context - at)
                array[:, :, at : at + length] = array[:, :, :length]

    def _first(self) -> np.ndarray:
        return np.arange(self._job.batch, dtype=np.int64)[:, None] % self._job.sizes.vocab

    def restore(self) -> None:
        """Put the replay state back to that before the block. Its keys and values are written again."""
        for array, values in self._saved:
            array[: self._steps] = values

    def found(self, ratio: float) -> Found:
        """Return thresholds whose block replays about this share of rows and layers."""
        if ratio not in self._by_ratio:
            self._by_ratio[ratio] = self._search(ratio)
        return self._by_ratio[ratio]

    def _search(self, ratio: float) -> Found:
        thresholds = np.full(self._job.sizes.layers, np.inf, np.float32)
        scores, _ = self._pass(thresholds)
        best, distance = None, np.inf
        for _ in range(PASSES):
            thresholds = quantile_thresholds(scores, ratio, self._job.coupled)
            scores, decisions = self._pass(thresholds)
            off = abs(float(decisions.mean()) - ratio)
            if best is None or off < distance:
                best, distance = Found(thresholds, decisions), off
            if off * decisions[:, 0].size < 1:
                break
        assert best is not None
        return best

    def _pass(self, thresholds: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return scores float32 and decisions bool [steps, L, B] of the block."""
        self.restore()
        frame, scores, decisions = self._job.sizes.tokens_per_frame, [], []
        for i in range(self._steps):
            result = self._stepper.decode(self._tokens(i), self._start + i, frame + i, thresholds)
            scores.append(result.scores.copy())  # the next step writes to the same memory
            decisions.append(result.decisions.copy())
        return np.stack(scores), np.stack(decisions)
