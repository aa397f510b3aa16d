"""The state of one session: one block of memory that stays where it is."""

import mmap
import sys
import warnings
from collections.abc import Collection, Generator, Sequence
from contextlib import contextmanager, suppress
from math import prod
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from fastcar_compile.artifact.sections import State
from fastcar_compile.errors import BackendError, InputError
from fastcar_compile.ir.tensor_files import ALIGNMENT
from fastcar_compile.ir.types import ContextInput, DecoderConfig, StateRole
from fastcar_compile.support import limits
from fastcar_compile.support.machine import available_memory

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


def check_ids(ids: NDArray[Any], vocab_size: int) -> None:
    """Raise InputError for a token outside of the vocabulary."""
    # A reduction over one element takes ten times as long as reading it, and most decode steps have one element.
    least, most = (ids.item(),) * 2 if ids.size == 1 else (ids.min(), ids.max())
    if least < 0 or most >= vocab_size:
        bad = ids[(ids < 0) | (ids >= vocab_size)].flat[0]
        what = f"token {bad} is outside the vocabulary of {vocab_size}"
        raise InputError(what, hint=f"use ids 0 .. {vocab_size - 1}")


# The context of a session: what a caller gives, checked and brought to the compiled length.


Array = NDArray[Any]


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


# Counts of a session: replay decisions per forward, layer and row.


_KEPT = 256
"""Forwards whose decisions are kept before they are added up: adding takes numpy longer than copying them."""


class Stats:
    """Replay statistics of the decode forwards since the last reset. Tokens that were not decoded are not counted.

    Attributes:
        forwards: number of decode forwards.
        eligible: number of those that might replay: the forward one frame earlier was a decode forward too.
        tokens_per_frame: F. Without `Session.extend`, a forward t is eligible when t >= F.
    """

    def __init__(self, layers: int, rows: int, tokens_per_frame: int, record: bool) -> None:
        self.forwards = self.eligible = 0
        self.tokens_per_frame = tokens_per_frame
        self._added = np.zeros((layers, rows), np.int64)
        self._latest = np.zeros((_KEPT, layers, rows), np.bool_)
        self._trace: list[np.ndarray] | None = [] if record else None

    def add(self, decisions: np.ndarray, eligible: bool) -> None:
        """Count one forward; decisions bool [L, B]."""
        # The assignment copies: a backend's decisions are a view of memory that its next forward writes.
        self._latest[self.forwards % _KEPT] = decisions
        self.forwards += 1
        self.eligible += eligible
        if self._trace is not None:
            self._trace.append(decisions.copy())
        if self.forwards % _KEPT == 0:
            self._added += self._latest.sum(0)

    @property
    def _counts(self) -> np.ndarray:
        """Replays of each layer and row, int64 [L, B]."""
        return self._added + self._latest[: self.forwards % _KEPT].sum(0)

    @property
    def replay_ratio(self) -> float:
        """Share of (forward, layer, row) that replayed, all forwards counted, as in the paper."""
        total = self.forwards * self._added.size
        return float(self._counts.sum() / total) if total else 0.0

    @property
    def eligible_replay_ratio(self) -> float:
        """Share of (forward, layer, row) that replayed, counting only the eligible forwards."""
        total = self.eligible * self._added.size
        return float(self._counts.sum() / total) if total else 0.0

    @property
    def per_layer(self) -> list[float]:
        """Replay ratio of every layer, all forwards counted."""
        return (self._counts.sum(1) / max(1, self.forwards * self._added.shape[1])).tolist()

    @property
    def decisions(self) -> np.ndarray:
        """Replay decisions, bool [forwards, L, B].

        Raises:
            InputError: the session was not made with record=True.
        """
        if self._trace is None:
            raise InputError("decisions were not recorded", hint="open the session with record=True")
        return np.stack(self._trace) if self._trace else np.zeros((0, *self._added.shape), bool)


class StateArena:
    """Every state of a session in one anonymous mapping.

    A page takes memory when it is first written. So caches cost their filled part, rounded up to the 2 MiB of a
    huge page where the system has huge pages.

    Attributes:
        arrays: name -> the state, at an address of whole cache lines that never changes; all zero at first.
    """

    def __init__(self, specs: Sequence[State]) -> None:
        places, at = list[int](), 0
        # Each state begins a cache line, as TVM wants of a tensor that it uses in place.
        for spec in specs:
            places.append(at)
            at += -(-spec.nbytes // ALIGNMENT) * ALIGNMENT
        self._memory = _reserved(max(at, 1))
        if hasattr(mmap, "MADV_HUGEPAGE"):
            # Every decode step reads keys and values of all heads. With 4 KiB pages it waits for translations.
            with suppress(OSError):  # a kernel without huge pages refuses, and nothing else changes
                self._memory.madvise(mmap.MADV_HUGEPAGE)
        self._specs = list(specs)
        self.arrays: dict[str, NDArray[Any]] = {}
        for spec, place in zip(specs, places, strict=True):
            # The array keeps the mapping alive, so no address changes while TVM has a tensor over it.
            flat = np.frombuffer(self._memory, spec.format.numpy, prod(spec.shape), place)
            self.arrays[spec.name] = flat.reshape(spec.shape)

    def clear(self) -> None:
        """Set every state to zero, and give its memory back until it is written again."""
        # Linux gives zero pages for a private anonymous mapping after MADV_DONTNEED. The addresses stay.
        self._memory.madvise(mmap.MADV_DONTNEED)

    @contextmanager
    def kept(self, roles: Collection[StateRole], slot: int) -> Generator[None]:
        """Put one slot (first index) of the states of these roles back at the end of the block.

        A forward writes no other slot.
        """
        slots = [self.arrays[s.name][slot] for s in self._specs if s.role in roles]
        saved = [array.copy() for array in slots]
        try:
            yield
        finally:
            for array, value in zip(slots, saved, strict=True):
                array[...] = value


def _reserved(size: int) -> mmap.mmap:
    """Return memory of `size` bytes, which is taken page by page as it is written.

    Raises:
        BackendError: the system does not give the memory.
    """
    hint = "compile with a smaller max_seq_len, with a window, or with a narrower KV cache"
    try:
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise BackendError(f"the state of a session takes {size:,} bytes: {error}", hint=hint) from error
    # Linux grants a mapping of more memory than there is. The process would be killed when the caches fill.
    free = available_memory()
    if free < size:
        text = f"the state of this session takes {size:,} bytes when its caches are full, and {free:,} are available"
        warnings.warn(f"{text}; {hint}", UserWarning, stacklevel=2)
    return memory
