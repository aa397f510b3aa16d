"""The state of one session: one block of memory that stays where it is."""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress

import torch
from torch import Tensor

from fastcar_compile.artifact.tensor_files import ALIGNMENT
from fastcar_compile.ir.program import StateRole, StateSpec


class StateArena:
    """Every state of a session in one anonymous mapping. Pages take memory when they are first written, so caches cost
    what is filled of them, not what they could hold; to the 2 MiB of a huge page, where the system has those.

    Attributes:
        tensors: name -> the state, at an address of whole cache lines that never changes; all zero at first.
    """

    def __init__(self, specs: Sequence[StateSpec]) -> None:
        places, at = [], 0
        for spec in specs:
            places.append(at)
            size = torch.Size(spec.shape).numel() * spec.dtype.itemsize
            at += -(-size // ALIGNMENT) * ALIGNMENT
        self._memory = mmap.mmap(-1, max(at, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            # Attention reads keys and values of all heads once per step: with 4 KiB pages it waits for translations.
            with suppress(OSError):  # a kernel without huge pages refuses, and nothing else changes
                self._memory.madvise(mmap.MADV_HUGEPAGE)
        self._specs = list(specs)
        self.tensors: dict[str, Tensor] = {}
        for spec, place in zip(specs, places, strict=True):
            count = torch.Size(spec.shape).numel()
            flat = torch.frombuffer(self._memory, dtype=spec.dtype, count=count, offset=place)
            self.tensors[spec.name] = flat.reshape(spec.shape)

    def clear(self) -> None:
        """Set every state to zero, and give its memory back until it is written again."""
        self._memory.madvise(mmap.MADV_DONTNEED)

    @contextmanager
    def kept(self, roles: Iterable[StateRole], slot: int) -> Iterator[None]:
        """Puts one slot (first index) of the states of these roles back at the end of the block: a forward writes no
        other one."""
        wanted = set(roles)
        slots = [self.tensors[s.name][slot] for s in self._specs if s.role in wanted]
        saved = [tensor.clone() for tensor in slots]
        try:
            yield
        finally:
            for tensor, value in zip(slots, saved, strict=True):
                tensor.copy_(value)
