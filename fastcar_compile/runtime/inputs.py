"""What callers give to a session, checked: tokens or embeddings, and a context."""

import sys
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from fastcar_compile.errors import InputError, count_text
from fastcar_compile.ir.types import ContextInput, DecoderConfig
from fastcar_compile.support import limits

Array = NDArray[Any]

# Arrays in and out of a session: numpy inside, the caller's kind outside. Torch is used only where it is loaded.


def _is_torch(value: Any) -> bool:
    torch = sys.modules.get("torch")
    # A process without torch has no torch tensors, so torch is never imported for the question.
    return torch is not None and isinstance(value, torch.Tensor)


def to_numpy(value: Any) -> NDArray[Any]:
    """Return an array: of a torch tensor, of anything that speaks DLPack, or of a sequence.

    Raises:
        InputError: numpy has no such array: the value is bfloat16, sparse, ragged, or without values.
    """
    try:
        if _is_torch(value):
            # `force` detaches the tensor from autograd and copies it from a device to the host.
            return value.numpy(force=True)
        if isinstance(value, np.ndarray) or not hasattr(value, "__dlpack__"):
            return np.asarray(cast(Any, value))
        return np.from_dlpack(value)
    except (TypeError, ValueError, RuntimeError, BufferError, NotImplementedError) as error:
        text = str(error).partition("\n")[0][: limits.TEXT_ERROR]
        what = f"a {type(cast(Any, value)).__name__} cannot be read as an array: {text}"
        raise InputError(what, hint="give a dense numpy array, or a torch tensor of a type that numpy has") from error


def like(example: Any, array: NDArray[Any]) -> Any:
    """Return the array, as a torch tensor where the example is one."""
    return sys.modules["torch"].from_numpy(array) if _is_torch(example) else array


def first_of(given: Any) -> Any:
    """Return the first of several arrays, or the value itself: the kind that a caller gets back."""
    first: Any = given
    return first[0] if isinstance(given, list | tuple) and len(first) else first


def check_ids(ids: NDArray[Any], vocab_size: int) -> None:
    """Raise InputError for a token outside of the vocabulary."""
    # A reduction over one element takes ten times as long as reading it, and most decode steps have one element.
    least, most = (ids.item(),) * 2 if ids.size == 1 else (ids.min(), ids.max())
    if least < 0 or most >= vocab_size:
        bad = ids[(ids < 0) | (ids >= vocab_size)].flat[0]
        what = f"token {bad} is outside the vocabulary of {vocab_size}"
        raise InputError(what, hint=f"use ids 0 .. {vocab_size - 1}")


def checked_context(config: DecoderConfig, context: Array, mask: Array | None) -> tuple[Array, Array | None]:
    """Return a context of the compiled length, float32 [B, L, C], and its mask bool [B, L], or None without masks.

    A shorter context is padded, and its padding hidden.

    Raises:
        InputError: the decoder has no cross-attention, or takes arrays of another dtype or shape.
    """
    spec = config.context
    if spec is None:
        raise InputError("the decoder has no cross-attention", hint="put the context in front of the prompt")
    _check(config.batch_size, spec, context)
    if not spec.masked:
        if mask is not None:
            hint = "leave it out, or compile a decoder whose forward takes context_mask"
            raise InputError("the decoder takes no context mask", hint=hint)
        return np.ascontiguousarray(context), None
    seen = _checked_mask(context.shape[:2], mask)
    # The padding is zero for the tokens and False for the mask: padded tokens are hidden.
    padding = ((0, 0), (0, spec.length - context.shape[1]))
    return np.pad(context, (*padding, (0, 0))), np.pad(seen, padding)


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


class Inputs:
    """Checks tokens or embeddings of one decoder."""

    def __init__(self, config: DecoderConfig) -> None:
        self._config = config
        self._dtype = np.dtype(np.float32 if config.takes_embeddings else np.int64)
        self._tail = config.input_shape

    def token(self, given: Any) -> Array:
        """Return a token of each video, int64 [B] or float32 [B, H], as [B, 1] or [B, 1, H].

        Raises:
            InputError: dtype or shape are wrong, or an id is outside of the vocabulary.
        """
        array = to_numpy(given)
        # Most decode steps pass this comparison. The full check has the error texts.
        if array.shape != (self._config.batch_size, *self._tail) or array.dtype != self._dtype:
            self._check(array, "give one token per row")
        return self.known(array)[:, None]

    def tokens(self, given: Any) -> Array:
        """Return tokens int64 [B, P] or embeddings float32 [B, P, H].

        Raises:
            InputError: dtype or shape are wrong, an id is outside of the vocabulary, or the cache has fewer positions.
        """
        array = to_numpy(given)
        self._check(array, "P is the length of the prompt", "P")
        self.require_room(0, array.shape[1], "the prompt has")  # before the ids are read
        return self.known(array)

    def prompts(self, given: Sequence[Any]) -> list[Array]:
        """Return a prompt of each video, int64 [P] or float32 [P, H] each, of any lengths.

        Raises:
            InputError: their number, a dtype or a shape is wrong, a prompt does not fit, or the rows share a position.
        """
        count = self._config.batch_size
        if len(given) != count:
            hint = f"give {count_text(count, 'prompt')}, or an array of prompts of one length"
            raise InputError(f"there are {count_text(len(given), 'prompt')}", hint=hint)
        found = [to_numpy(prompt) for prompt in given]
        for prompt in found:
            self._check(prompt[None], "P is the length of the prompt", "P", rows=1)
            self.require_room(0, len(prompt), "the prompt has")
        if self._config.rows is None and len({len(prompt) for prompt in found}) > 1:
            what = "the prompts have different lengths, and all rows of this decoder share one position"
            raise InputError(what, hint="compile with rows=1: then every row has a position of its own")
        return [self.known(prompt) for prompt in found]

    def require_room(self, position: int, count: int, who: str) -> None:
        """Raise InputError unless `count` tokens from a position on fit the cache."""
        capacity = self._config.max_seq_len
        if position + count > capacity:
            hint = "shorten it, reset() the session, or compile with a larger max_seq_len"
            raise InputError(f"{who} {count_text(count, 'token')}, but max_seq_len is {capacity}", hint=hint)

    def known(self, array: Array) -> Array:
        if self._config.token_ids is not None:
            check_ids(array, self._config.token_ids)
        return np.ascontiguousarray(array)

    def _check(self, array: Array, hint: str, *time: str, rows: int | None = None) -> None:
        config, dtype = self._config, self._dtype
        if array.dtype != dtype:
            what = f"{config.input_name} are {array.dtype}, expected {dtype}"
            raise InputError(what, hint=f"convert them to {dtype}")
        expected = (config.batch_size if rows is None else rows, *time, *self._tail)
        fits = array.ndim == len(expected) and all(e in ("P", g) for e, g in zip(expected, array.shape, strict=True))
        if not fits or 0 in array.shape:
            what = f"{config.input_name} have shape {list(array.shape)}, expected [{', '.join(map(str, expected))}]"
            raise InputError(what, hint=hint)
