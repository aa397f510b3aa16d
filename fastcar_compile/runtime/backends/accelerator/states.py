"""The states of a decoder in the memory of a step kernel (docs/reference/artifact.md, "Whole steps")."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import numpy as np

from fastcar_compile.artifact.engine import WORD_BYTES
from fastcar_compile.artifact.sections import State
from fastcar_compile.codegen.hls.step_program.cache_layout import BLOCK, LANES, CacheLayout
from fastcar_compile.errors import ArtifactError
from fastcar_compile.gates.base import Array
from fastcar_compile.ir.types import ATTENTION_ROLES, StateRole
from fastcar_compile.runtime.backends.accelerator.kernel import Kernel
from fastcar_compile.runtime.backends.base import Index


class KernelStates:
    """Reads and writes parts of states, which have the shapes that the decoder's graph has.

    Of a cache the tiles that hold the positions are read and packed again, of replay the slots.

    Args:
        places: first memory word of every state, by its name.

    Raises:
        ArtifactError: a place is behind the kernel's memory.
    """

    def __init__(self, kernel: Kernel, places: Mapping[str, int], states: Sequence[State]) -> None:
        self._unit, self._sizes, self._places = kernel.unit, kernel.program.sizes, places
        self._states = {state.name: state for state in states}
        if wrong := [state.name for state in states if not self._fits(state)]:
            what = f"the states {', '.join(wrong)} lie behind the kernel's memory"
            raise ArtifactError(what, where="accelerator.step.states", hint="compile the model again")

    def _fits(self, state: State) -> bool:
        if state.role in ATTENTION_ROLES:
            keys = state.role is StateRole.KEY_CACHE
            end = self._places[state.name] + prod(state.shape[:2]) * self._tiles(state)[3]
            return end <= (self._sizes.key_words if keys else self._sizes.value_words)
        end = self._places[state.name] * WORD_BYTES + state.shape[0] * _slot_bytes(state)
        return end <= self._sizes.replay_words * WORD_BYTES

    def read(self, name: str, index: Index) -> Array:
        """Return a copy of a part of a state."""
        state, span, part = self._found(name, index)
        return self._load(state, span)[part]

    def write(self, name: str, index: Index, value: Array) -> None:
        """Write a part of a state."""
        state, span, part = self._found(name, index)
        rows = self._load(state, span)
        rows[part] = value
        self._store(state, span, rows)

    def _found(self, name: str, index: Index) -> tuple[State, range, tuple[Any, ...]]:
        """Return a state, its slots or positions that hold a part, in whole tiles, and the part's index in these."""
        state = self._states[name]
        axis, tile = (2, self._tiles(state)[1]) if state.role in ATTENTION_ROLES else (0, 1)
        own: list[Any] = list(index) if isinstance(index, tuple) else [index]
        own += [slice(None)] * (axis + 1 - len(own))
        chosen = np.arange(state.shape[axis])[own[axis]]
        # Of an empty part one tile is read, so that the part has its shape.
        first, last = (int(chosen.min()), int(chosen.max()) + 1) if chosen.size else (0, 1)
        span = range(first // tile * tile, -(-last // tile) * tile)
        own[axis] = chosen - span.start
        return state, span, tuple(own)

    def _load(self, state: State, span: range) -> Array:
        """Return slots [n, B, ...] of replay, or positions [B, Hkv, n, D + D / 32] of keys or values."""
        if state.role in ATTENTION_ROLES:
            layout = replace(self._tiles(state)[0], positions=len(span))
            unpack = layout.unpack_keys if state.role is StateRole.KEY_CACHE else layout.unpack_values
            heads = [unpack(self._sections(words), number) for number, words in self._heads(state, span)]
            return np.stack(heads).reshape(*state.shape[:2], len(span), -1)
        slot = _slot_bytes(state)
        data = self._unit.read("replay", len(span) * slot, self._at(state, span)).view(state.format.numpy)
        rows = data.reshape(len(span), *state.shape[1:], -1)
        # A count is the first lane of a memory word.
        return rows[..., 0] if state.role is StateRole.CHAIN_COUNT else rows.reshape(len(span), *state.shape[1:])

    def _store(self, state: State, span: range, rows: Array) -> None:
        """Write what `_load` returned, changed."""
        if state.role in ATTENTION_ROLES:
            layout = replace(self._tiles(state)[0], positions=len(span))
            pack = layout.pack_keys if state.role is StateRole.KEY_CACHE else layout.pack_values
            heads = rows.reshape(-1, *rows.shape[2:])
            for number, words in self._heads(state, span):
                self._store_sections(words, pack(heads[number], number))
            return
        if state.role is StateRole.CHAIN_COUNT:
            rows = np.pad(rows[..., None], [(0, 0)] * rows.ndim + [(0, 3)])
        self._unit.write("replay", np.ascontiguousarray(rows).view(np.uint8).reshape(-1), self._at(state, span))

    def _at(self, state: State, span: range) -> int:
        """Return the first byte of slots in the replay buffer."""
        return self._places[state.name] * WORD_BYTES + span.start * _slot_bytes(state)

    def _tiles(self, state: State) -> tuple[CacheLayout, int, int, int]:
        """Return a head's layout, the positions of a tile, and the memory words of a tile and of a head on one port."""
        # A row has an exponent byte per block of 32 elements.
        layout = self._sizes.layout(state.shape[3] // (BLOCK + 1))
        if state.role is StateRole.KEY_CACHE:
            return layout, layout.ports * LANES, layout.key_tile_words, layout.key_words
        return layout, BLOCK, layout.value_tile_words, layout.value_words

    def _heads(self, state: State, span: range) -> Iterator[tuple[int, range]]:
        """Yield the number of each head of each row, and the memory words of its tiles on one port."""
        _, tile, tile_words, words = self._tiles(state)
        first = self._places[state.name] + span.start // tile * tile_words
        # Values are behind the keys of all layers.
        first += 0 if state.role is StateRole.KEY_CACHE else self._sizes.key_words
        for number in range(prod(state.shape[:2])):
            at = first + number * words
            yield number, range(at, at + len(span) // tile * tile_words)

    def _sections(self, words: range) -> Array:
        """Return memory words of every weight port, int8 [ports, words, 16]."""
        names, together = self._axi
        size = together * WORD_BYTES
        parts = [self._unit.read(name, len(words) * size, words.start * size) for name in names]
        # An AXI port carries several weight ports word by word: the swap takes them apart.
        ports = np.stack(parts).view(np.int8).reshape(len(names), len(words), together, WORD_BYTES).swapaxes(1, 2)
        return ports.reshape(-1, len(words), WORD_BYTES)

    def _store_sections(self, words: range, sections: Array) -> None:
        """Write memory words of every weight port."""
        names, together = self._axi
        ports = sections.view(np.uint8).reshape(len(names), together, len(words), WORD_BYTES).swapaxes(1, 2)
        for name, part in zip(names, ports, strict=True):
            self._unit.write(name, part.reshape(-1), words.start * together * WORD_BYTES)

    @property
    def _axi(self) -> tuple[list[str], int]:
        """The arguments that hold keys and values, and how many weight ports each carries."""
        names = self._unit.kernel.caches()
        return names, self._sizes.ports // len(names)


def _slot_bytes(state: State) -> int:
    """Return the bytes of a slot of replay. A count has a memory word."""
    counts = state.role is StateRole.CHAIN_COUNT
    return prod(state.shape[1:]) * (WORD_BYTES if counts else state.format.itemsize)
