"""The context of a session: what a caller gives, checked and brought to the compiled length."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastcar_compile.artifact.sections import ContextInput, DecoderConfig
from fastcar_compile.errors import InputError

Array = NDArray[Any]


@dataclass(frozen=True)
class GivenContext:
    """tokens: float32 [B, L, C]. mask: bool [B, L]; None: the decoder takes none."""

    tokens: Array
    mask: Array | None


def checked_context(config: DecoderConfig, context: Array, mask: Array | None) -> GivenContext:
    """Return a context of the compiled length. One that is shorter is padded, and its padding hidden.

    Raises:
        InputError: the decoder has no cross-attention, or the arrays are of another dtype or shape than it takes.
    """
    spec = config.context
    if spec is None:
        raise InputError("the decoder has no cross-attention", hint="put the context in front of the prompt")
    _check(config.batch_size, spec, context)
    if not spec.masked:
        if mask is not None:
            hint = "leave it out, or compile a decoder whose forward takes context_mask"
            raise InputError("the decoder takes no context mask", hint=hint)
        return GivenContext(np.ascontiguousarray(context), None)
    seen = _checked_mask(context.shape[:2], mask)
    # The padding is zero for the tokens and False for the mask: padded tokens are hidden.
    padding = ((0, 0), (0, spec.length - context.shape[1]))
    return GivenContext(np.pad(context, (*padding, (0, 0))), np.pad(seen, padding))


def _check(batch: int, spec: ContextInput, context: Array) -> None:
    if context.dtype != np.float32:
        raise InputError(f"the context is {context.dtype}, expected float32", hint="convert it to float32")
    length = context.shape[1] if context.ndim == 3 else 0
    fits = 0 < length <= spec.length if spec.masked else length == spec.length
    if context.ndim != 3 or not fits or (context.shape[0], context.shape[2]) != (batch, spec.size):
        at_most = "at most " if spec.masked else ""
        expected = f"[{batch}, {at_most}{spec.length}, {spec.size}]"
        raise InputError(f"the context has shape {list(context.shape)}, expected {expected}")


def _checked_mask(shape: tuple[int, ...], mask: Array | None) -> Array:
    if mask is None:
        return np.ones(shape, np.bool_)
    if mask.dtype != np.bool_:
        raise InputError(f"the context mask is {mask.dtype}, expected bool", hint="True is a token that is seen")
    if mask.shape != shape:
        raise InputError(f"the context mask has shape {list(mask.shape)}, expected {list(shape)}")
    # Softmax over no visible token divides by zero.
    if hidden := [row for row, seen in enumerate(mask) if not seen.any()]:
        raise InputError(f"the context mask hides every token of row {hidden[0]}", hint="let it see at least one")
    return mask
