"""The ONNX definitions of the `fastcar::` operators, for `torch.onnx.export(custom_translation_table=…)`."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch._ops import OpOverload

from fastcar_compile.codegen.onnx import attention, linear, replay, scores, window
from fastcar_compile.codegen.onnx.values import Value

Definition = Callable[..., Value]
"""Takes the operator's arguments by the names of its schema."""

_DEFINITIONS: tuple[Definition, ...] = (
    attention.cache_write,
    attention.attention,
    attention.context_attention,
    attention.tas,
    window.ring_row,
    window.limit,
    window.ring_write,
    window.window_attention,
    replay.gate,
    replay.slot_read,
    replay.slot_write,
    scores.tas_heads,
    scores.input_delta,
    scores.output_bound,
    scores.learned_score,
    scores.constant_score,
    scores.random_score,
    *linear.LINEARS.values(),
    linear.activation_factor,
)


def translation_table() -> dict[OpOverload, Definition]:
    """Return the definition of every operator; each has the operator's name."""
    return {getattr(torch.ops.fastcar, f.__name__).default: f for f in _DEFINITIONS}
