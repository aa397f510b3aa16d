"""Work that a C simulation library counts, where it was built with FASTCAR_COUNTERS."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

from fastcar_compile.errors import BackendError

COUNTERS = "FASTCAR_COUNTERS"
"""The macro that counts."""

STATIC_MAPPING = "FASTCAR_STATIC_MAPPING"
"""The macro that maps row b to core b mod C, for comparison with DRS."""


@dataclass(frozen=True)
class Work:
    """What the engine executed.

    Attributes:
        mac: iterations of the MAC array, one word of every weight port each.
        weight_beats: beats of all AXI ports that read weights.
        row_beats: 128-bit words of x and y. copy_beats: of replayed rows.
    """

    mac: int
    weight_beats: int
    row_beats: int
    copy_beats: int


def read_counters(library: ctypes.CDLL) -> Work:
    """Return the work since the last call of this function, and start again from zero.

    Raises:
        BackendError: the library was built without counters.
    """
    entry = getattr(library, "fastcar_csim_counters", None)
    if entry is None:
        raise BackendError("this C simulation does not count its work", hint=f"build it with {COUNTERS}")
    counts = (ctypes.c_uint64 * 4)()
    entry(counts)
    return Work(*counts)
