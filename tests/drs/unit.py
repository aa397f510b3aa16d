"""The TAS unit and DRS controller in C simulation, without a kernel around them."""

import ctypes
from pathlib import Path

import numpy as np
from hls.sources import headers
from numpy.typing import NDArray

from fastcar_compile.codegen.hls.control_table.simulator import RESULT_WORDS, LayerCall, LayerTrace, read_result
from fastcar_compile.codegen.hls.control_table.table import MAX_ROWS, Limits, TableStatus
from fastcar_compile.codegen.hls.render import render
from fastcar_compile.runtime.backends.hls_csim import aligned, build_library

SOURCE = Path(__file__).with_name("controller.cpp")


def build_controller(limits: Limits, folder: Path) -> Path:
    """The library of a controller with these limits."""
    sources = headers() | {"fastcar_drs_config.hpp": render("fastcar_drs_config.hpp", limits=limits).encode()}
    return build_library(sources | {SOURCE.name: SOURCE.read_bytes()}, folder, [SOURCE.name])


class DrsUnit:
    """A controller, which keeps the control table from one `load` to the next."""

    def __init__(self, path: Path) -> None:
        self._library = ctypes.CDLL(str(path))

    def load(self, table: bytes) -> TableStatus:
        """Load a control table, any bytes, and return the result of its checks."""
        words = _aligned(np.frombuffer(table + bytes(-len(table) % 16), np.uint8))
        return TableStatus(self._library.load(_at(words), ctypes.c_uint32(len(table))))

    def run(self, call: LayerCall) -> LayerTrace:
        """Return the decision, or the status of a call that is refused."""
        counts, answer = np.zeros(MAX_ROWS, np.uint32), np.zeros(RESULT_WORDS, np.uint32)
        counts[: len(call.chain)] = call.chain
        network = np.zeros(0) if call.network is None else call.network
        query, key, network = map(_aligned, (call.query, call.key, network))
        lengths = [ctypes.c_uint32(len(operand)) for operand in (call.query, call.key)]
        operands = (_at(query), lengths[0], _at(key), lengths[1], _at(network), _at(counts), _at(answer))
        rows = self._library.decide(ctypes.c_uint32(call.layer), ctypes.c_uint32(int(call.step)), *operands)
        return read_result(answer, rows)


def _aligned(array: NDArray[np.generic]) -> NDArray[np.uint8]:
    return aligned(np.frombuffer(array.tobytes(), np.uint8).copy())


def _at(array: NDArray[np.generic]) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)
