"""The state of one session: one block of memory that stays where it is."""

import mmap
import warnings
from collections.abc import Collection, Generator, Sequence
from contextlib import contextmanager, suppress
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastcar_compile.artifact.sections import State
from fastcar_compile.errors import BackendError
from fastcar_compile.ir.tensor_files import ALIGNMENT
from fastcar_compile.ir.types import StateRole
from fastcar_compile.support.machine import available_memory


class StateArena:
    """Every state of a session in one anonymous mapping.

    A page takes memory when it is first written. So caches cost their filled part, rounded up to the 2 MiB of a
    huge page where the system has huge pages.

    Attributes:
        arrays: name -> the state, at an address of whole cache lines that never changes; all zero at first.
    """

    def __init__(self, specs: Sequence[State]) -> None:
        places, at = dict[str, int](), 0
        # Each state begins a cache line, as TVM wants of a tensor that it uses in place; those of a kind are together.
        for spec in sorted(specs, key=lambda spec: spec.kind):
            places[spec.name] = at
            at += -(-spec.nbytes // ALIGNMENT) * ALIGNMENT
        self._memory = _reserved(max(at, 1))
        if hasattr(mmap, "MADV_HUGEPAGE"):
            # Every decode step reads keys and values of all heads. With 4 KiB pages it waits for translations.
            with suppress(OSError):  # a kernel without huge pages refuses, and nothing else changes
                self._memory.madvise(mmap.MADV_HUGEPAGE)
        self._specs = list(specs)
        self.arrays: dict[str, NDArray[Any]] = {}
        for spec in specs:
            # The array keeps the mapping alive, so no address changes while TVM has a tensor over it.
            flat = np.frombuffer(self._memory, spec.format.numpy, prod(spec.shape), places[spec.name])
            self.arrays[spec.name] = flat.reshape(spec.shape)

        self._together: dict[str, NDArray[Any]] = {}

    def together(self, states: Sequence[State]) -> NDArray[Any]:
        """Return all states of one kind, in their order, as one array [n, ...]."""
        name = states[0].name
        if name not in self._together:
            first, size = self.arrays[name], -(-states[0].nbytes // ALIGNMENT) * ALIGNMENT
            shape, strides = (len(states), *first.shape), (size, *first.strides)
            self._together[name] = np.lib.stride_tricks.as_strided(first, shape, strides)
        return self._together[name]

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
