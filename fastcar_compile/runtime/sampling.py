"""Token choice: a sampler takes logits [B, V] as numpy or torch and returns token ids int64 [B]."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Sampler = Callable[[Any], Any]
"""logits float32 [B, V] -> token ids int64 [B]."""


def greedy(logits: Any) -> Any:
    """Return the most probable token of every row."""
    return logits.argmax(-1)
