"""What every backend offers to a session."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np

Array = np.ndarray


@dataclass(frozen=True)
class StepResult:
    """One decode forward.

    Attributes:
        logits: float32 [B, 1, V], or hidden states [B, 1, H] of a headless decoder.
        decisions: bool [L, B], True where the row replayed.
        scores: float32 [L, B], the gate's score.
    """

    logits: Array
    decisions: Array
    scores: Array


class Backend(ABC):
    """Owns the state of one session; nothing is shared with another instance but weights.

    Attributes:
        prefill_chunk: tokens of one `prefill` call; 0: any number.
    """

    prefill_chunk: int = 0

    @abstractmethod
    def reset(self) -> None:
        """Set every state to zero."""

    @abstractmethod
    def prefill(self, inputs: Array, position: int) -> Array:
        """Write keys and values of tokens int64 [B, T] (or embeddings float32 [B, T, H]) from `position` on.

        Returns:
            logits float32 [B, T, V]. Replay state is not touched.
        """

    @abstractmethod
    def decode(self, inputs: Array, position: int, step: int, thresholds: Array) -> StepResult:
        """One decode forward of tokens int64 [B, 1] (or embeddings float32 [B, 1, H]).

        Args:
            position: sequence position of the token. step: decode forward number t.
            thresholds: float32 [L].
        """
