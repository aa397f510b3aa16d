"""Tables, calls and the comparison of the HLS controller with the Python simulator that the DRS tests share."""

import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from drs.unit import DrsUnit
from fastcar_compile.codegen.hls.control_table.builder import build_table
from fastcar_compile.codegen.hls.control_table.reader import check
from fastcar_compile.codegen.hls.control_table.simulator import LayerCall, LayerTrace, run_layer
from fastcar_compile.codegen.hls.control_table.table import AttentionShape, DrsTable, Limits, TableStatus, pack_rows

LIMITS = Limits(cores=2, rows=32, table_words=4096, query_words=1024, key_words=64, heads=16)
"""Of the controller in these tests."""

FRAME = 64
LATER = FRAME + 5
"""A decode forward that may replay."""

ONE = AttentionShape(1, 1, 1)
"""One head of one element: q and the key are one number per row, and so is their product."""


def table_for(rows: int = 3, cores: int = 2, layers: int = 3, **options: Any) -> DrsTable:
    """A small good table of attention shape ONE with a gate at 0 in every layer."""
    return build_table(
        *(layers, rows, cores, FRAME, [0.0] * layers), **{"attention": ONE, "scales": [1.0] * layers, **options}
    )


def numbers(values: Sequence[float] | np.ndarray) -> np.ndarray:
    """One number per row as memory words of attention shape ONE."""
    return pack_rows(np.asarray(values, np.float32).reshape(-1, 1, 1))


def signs(register: int, rows: int) -> np.ndarray:
    """q whose score is below the threshold in the rows of the register's bits that are 1, above it in the others."""
    return numbers([-1.0 if register >> row & 1 else 1.0 for row in range(rows)])


def call_for(
    register: int, rows: int = 3, layer: int = 0, step: int = LATER, chain: Sequence[int] | None = None
) -> LayerCall:
    """A call whose scores ask for this Index Register."""
    counts = np.array([0] * rows if chain is None else chain, np.int32)
    return LayerCall(layer, step, signs(register, rows), numbers([1.0] * rows), counts)


def changed(data: bytes, word: int, value: int, *, repair: bool = True) -> bytes:
    """`data` with one 32-bit word replaced and, unless told otherwise, the CRC-32 made to fit."""
    words = list(struct.unpack(f"<{len(data) // 4}I", data))
    words[word] = value
    return repaired(words) if repair else struct.pack(f"<{len(words)}I", *words)


def repaired(words: Sequence[int]) -> bytes:
    """These words as bytes, with the CRC-32 that fits them."""
    body = struct.pack(f"<{len(words) - 3}I", *words[3:])
    return struct.pack("<3I", words[0], words[1], zlib.crc32(body)) + body


@dataclass(frozen=True)
class Controller:
    """The HLS controller, held to the Python simulator at every load and call."""

    kernel: DrsUnit
    limits: Limits = LIMITS

    def agreed(self, table: DrsTable | bytes, call: LayerCall) -> LayerTrace:
        """Loads the table into both and runs them, asserts that they answer alike and returns the answer."""
        data = table if isinstance(table, bytes) else table.to_bytes()
        want = run_layer(data, call, limits=self.limits)
        status = self.kernel.load(data)
        assert status is check(data, self.limits)
        if status is not TableStatus.OK:
            return want
        got = self.kernel.run(call)
        np.testing.assert_array_equal(got.scores, want.scores)  # NaN equals NaN here
        for name in ("status", "index_register", "chain"):
            assert getattr(got, name) == getattr(want, name), name
        return got
