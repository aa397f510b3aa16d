"""The states of a decoder in the memory of a step kernel, as the decoder's graph has them."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

import fastcar_compile as fc
from fastcar_compile.artifact.sections import State
from fastcar_compile.codegen.hls.step_program.cache_layout import BLOCK, CacheLayout
from fastcar_compile.ir.types import StateRole
from fastcar_compile.runtime.backends.accelerator.kernel import WORD_BYTES, Kernel
from fastcar_compile.runtime.backends.accelerator.step import StepStepper

Array = NDArray[Any]


def states_of(stepper: StepStepper, artifact: fc.Artifact) -> dict[str, Array]:
    """Return every state by name: keys and values int8 [B, Hkv, S, D + ceil(D / 32)], other states as kept."""
    section, kernel = artifact.manifest.accelerator, stepper._kernel
    assert section is not None
    assert section.step is not None
    keys, values = _sections(kernel)
    cached = {StateRole.KEY_CACHE: keys, StateRole.VALUE_CACHE: values}
    sizes, places = kernel.program.sizes, section.step.states
    replay = kernel.unit.read("replay", sizes.replay_words * WORD_BYTES)
    return {s.name: _state(s, cached, replay, places[s.name], sizes.ports) for s in artifact.state}


def _sections(kernel: Kernel) -> tuple[Array, Array]:
    """Return keys and values as they are in memory: int8 [ports, words, 16]."""
    sizes, names = kernel.program.sizes, kernel.unit.kernel.caches()
    words, together = sizes.key_words + sizes.value_words, sizes.ports // len(names)
    parts = [kernel.unit.read(name, words * together * WORD_BYTES).view(np.int8) for name in names]
    # An AXI port carries several logical ports word by word: the swap takes them apart.
    ports = np.stack(parts).reshape(len(names), words, together, WORD_BYTES).swapaxes(1, 2)
    whole = ports.reshape(sizes.ports, words, WORD_BYTES)
    return whole[:, : sizes.key_words], whole[:, sizes.key_words :]


def _state(state: State, cached: Mapping[StateRole, Array], replay: Array, first: int, ports: int) -> Array:
    if state.role in cached:
        return _rows(state, cached[state.role], first, ports)
    data = replay[first * WORD_BYTES :]
    if state.role is StateRole.CHAIN_COUNT:
        # A count is the first lane of a memory word.
        return data.view(np.int32).reshape(-1, 4)[: state.nbytes // 4, 0].reshape(state.shape).copy()
    return data[: state.nbytes].view(state.format.numpy).reshape(state.shape).copy()


def _rows(state: State, sections: Array, first: int, ports: int) -> Array:
    """Return the rows of keys or values of all heads."""
    batch, heads, positions, row = state.shape
    # A row has an exponent byte per block of 32 elements: D + D / 32 bytes.
    layout = CacheLayout(ports, row * BLOCK // (BLOCK + 1), positions)
    keys = state.role is StateRole.KEY_CACHE
    words, unpack = (layout.key_words, layout.unpack_keys) if keys else (layout.value_words, layout.unpack_values)
    places = range(first, first + batch * heads * words, words)
    found = [unpack(sections[:, place : place + words], number) for number, place in enumerate(places)]
    return np.stack(found).reshape(state.shape)
