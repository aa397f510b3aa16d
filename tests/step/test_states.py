"""States in a step kernel's memory: parts that are read and written, on AXI ports that carry several weight ports."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from fastcar_compile.artifact.sections import State
from fastcar_compile.codegen.hls.step_program.cache_layout import CacheLayout, Sizes
from fastcar_compile.errors import ArtifactError
from fastcar_compile.ir.types import StateRole
from fastcar_compile.runtime.backends.accelerator.kernel import KernelStates
from step.values import Array

VIDEOS, HEADS, SLOTS, HIDDEN = 2, 3, 5, 8
LAYOUT = CacheLayout(6, 64, 150)
KEYS, VALUES = VIDEOS * HEADS * LAYOUT.key_words, VIDEOS * HEADS * LAYOUT.value_words
COUNTS, OUTPUTS = SLOTS * VIDEOS, SLOTS * VIDEOS * HIDDEN // 4
SIZES = Sizes(
    rows=VIDEOS, ports=6, positions=150, x_words=1, a_words=1, y_words=1, constant_words=0, weight_words=0,
    key_words=2 * KEYS, value_words=2 * VALUES, input_words=1, output_words=1, replay_words=2 * COUNTS + 2 * OUTPUTS,
    videos=VIDEOS,
)  # fmt: skip
PLACES = {"key_cache": KEYS, "value_cache": VALUES, "chain_count": COUNTS, "mlp_cache": 2 * COUNTS + OUTPUTS}
"""Those of the second of two layers."""
CACHE = (VIDEOS, HEADS, 150, 66)
SHAPES = {"key_cache": CACHE, "value_cache": CACHE, "chain_count": (SLOTS, VIDEOS)}
SHAPES["mlp_cache"] = (SLOTS, VIDEOS, HIDDEN)
DTYPES = {"key_cache": "int8", "value_cache": "int8", "chain_count": "int32", "mlp_cache": "float32"}
STATES = [State(name=n, shape=shape, dtype=DTYPES[n], role=StateRole(n), layer=1) for n, shape in SHAPES.items()]
ROWS = slice(None), slice(None)
PARTS: list[tuple[str, Any]] = [
    *[(name, (*ROWS, part)) for name in ("key_cache", "value_cache") for part in (slice(0, 0), slice(0, 45), 149, 7)],
    *[(name, part) for name in ("chain_count", "mlp_cache") for part in (3, np.array([0, 4]), np.array([], int))],
    *[(name, slice(None)) for name in SHAPES],
]


class Memory:
    """Memory of a device, uint8 by argument. Two AXI ports carry three weight ports each."""

    def __init__(self) -> None:
        rng, size = np.random.default_rng(4), 3 * 2 * (KEYS + VALUES) * 16
        sizes = {"cache_0": size, "cache_1": size, "replay": SIZES.replay_words * 16}
        self.buffers = {name: rng.integers(0, 256, size, np.uint8) for name, size in sizes.items()}
        self.kernel = SimpleNamespace(caches=lambda: ["cache_0", "cache_1"])

    def read(self, name: str, size: int, first: int) -> Array:
        return self.buffers[name][first : first + size].copy()

    def write(self, name: str, data: Array, first: int) -> None:
        self.buffers[name][first : first + data.size] = data

    def states(self, **changes: int) -> KernelStates:
        kernel: Any = SimpleNamespace(unit=self, program=SimpleNamespace(sizes=SIZES))
        return KernelStates(kernel, PLACES | changes, STATES)

    def state(self, name: str) -> Array:
        """A whole state, word by word."""
        if name == "mlp_cache":
            at = 16 * PLACES[name]
            return self.buffers["replay"][at : at + 16 * OUTPUTS].view(np.float32).reshape(SHAPES[name])
        if name == "chain_count":
            words = self.buffers["replay"].view(np.int32).reshape(-1, 4)[PLACES[name] :][:COUNTS]
            return words[:, 0].reshape(SHAPES[name]).copy()
        keys = name == "key_cache"
        words, unpack = (KEYS, LAYOUT.unpack_keys) if keys else (VALUES, LAYOUT.unpack_values)
        first, each = PLACES[name] + (0 if keys else 2 * KEYS), words // VIDEOS // HEADS
        found = list[Array]()
        for head in range(VIDEOS * HEADS):
            at = range(first + head * each, first + (head + 1) * each)
            ports = [[self._word(port, word) for word in at] for port in range(6)]
            found.append(unpack(np.array(ports).view(np.int8), head))
        return np.array(found).reshape(CACHE)

    def _word(self, port: int, word: int) -> Array:
        at = 16 * (3 * word + port % 3)
        return self.buffers[f"cache_{port // 3}"][at : at + 16]


@pytest.mark.parametrize(("name", "part"), PARTS, ids=str)
def test_a_part_is_read_and_written_and_nothing_else(name: str, part: Any) -> None:
    memory, rng = Memory(), np.random.default_rng(5)
    before = {state: memory.state(state) for state in SHAPES}
    found = memory.states().read(name, part)
    np.testing.assert_array_equal(found, before[name][part])
    new = rng.integers(-9, 9, found.shape).astype(found.dtype)
    memory.states().write(name, part, new)
    before[name][part] = new
    for state, value in before.items():
        np.testing.assert_array_equal(memory.state(state), value, err_msg=state)


@pytest.mark.parametrize(
    ("name", "place"), [("key_cache", KEYS), ("value_cache", VALUES), ("chain_count", COUNTS + 2 * OUTPUTS)]
)
def test_a_place_behind_the_memory_is_refused(name: str, place: int) -> None:
    Memory().states(**{name: place})
    with pytest.raises(ArtifactError, match=f"the states {name} lie behind the kernel's memory"):
        Memory().states(**{name: place + 1})
