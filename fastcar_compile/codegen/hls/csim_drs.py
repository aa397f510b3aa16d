"""C simulation of the TAS unit and DRS controller."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastcar_compile.codegen.hls.interface import RESULT_WORDS
from fastcar_compile.drs.simulator import CAPACITY, DispatchRecord, LayerCall, LayerTrace
from fastcar_compile.drs.table import MAX_ROWS, NO_LAYER, Status

Array = NDArray[Any]

SOURCES = ("csim_drs_entry.cpp", "fastcar_drs.cpp")
"""What a library of the controller alone is built from."""

_SCORES, _CHAIN = 4, 4 + MAX_ROWS


class DrsLibrary:
    """The controller in a loaded library, the emitted project's or one built from SOURCES alone."""

    def __init__(self, library: ctypes.CDLL | Path) -> None:
        self._library = ctypes.CDLL(str(library)) if isinstance(library, Path) else library

    def run(self, table: bytes, call: LayerCall, rows: int, capacity: int = CAPACITY) -> LayerTrace:
        """One call of the controller.

        Args:
            table: any bytes.
            rows: rows of the batch, so that as many scores and chain counts are read.
            capacity: records at most.

        Returns:
            As `simulator.run_layer`.
        """
        words = aligned(np.frombuffer(table + bytes(-len(table) % 4), np.uint8))
        query, key = (
            aligned(np.ascontiguousarray(a, np.float32).view(np.uint8).reshape(-1)) for a in (call.query, call.key)
        )
        chain = np.zeros(MAX_ROWS, np.uint32)
        chain[: len(call.chain)] = call.chain
        result = np.zeros(RESULT_WORDS + 2 * capacity, np.uint32)
        held = NO_LAYER if call.held is None else call.held
        scalars = (len(table), call.layer, call.step, len(call.query), len(call.key), held, capacity)
        numbers = np.array([v & 0xFFFFFFFF for v in scalars], np.uint32)
        arrays = (words, query, key, chain, result, numbers)
        self._library.fastcar_csim_drs(*(ctypes.c_void_p(a.ctypes.data) for a in arrays))
        return read_result(result, rows)


def read_result(result: Array, rows: int) -> LayerTrace:
    """What the controller wrote, as uint32 words; `rows` of the batch."""
    status, count, register, held = (int(word) for word in result[:4])
    records = result[RESULT_WORDS : RESULT_WORDS + 2 * count].reshape(-1, 2)
    decided = rows if Status(status) in (Status.OK, Status.QUEUE_FULL) else 0
    return LayerTrace(
        status=Status(status),
        index_register=register,
        scores=tuple(result[_SCORES : _SCORES + decided].view(np.float32).tolist()),
        chain=tuple(result[_CHAIN : _CHAIN + decided].view(np.int32).tolist()),
        records=tuple(DispatchRecord.from_words(int(word), int(argument)) for word, argument in records),
        held=None if held == NO_LAYER else held,
    )


def aligned(data: Array) -> Array:
    """The bytes at an address that is a multiple of 16, as 128-bit words want it; a copy unless they are there already."""
    if data.ctypes.data % 16 == 0:
        return data
    buffer = np.empty(data.size + 16, np.uint8)
    start = -buffer.ctypes.data % 16
    buffer[start : start + data.size] = data
    return buffer[start : start + data.size]
