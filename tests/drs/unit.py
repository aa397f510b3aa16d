"""The TAS unit and DRS controller alone, the kernel fastcar_drs, as a host would call it."""

import numpy as np
from numpy.typing import NDArray

from fastcar_compile.codegen.hls.control_table.simulator import RESULT_WORDS, LayerCall, LayerTrace, read_result
from fastcar_compile.codegen.hls.control_table.table import MAX_ROWS, Status
from fastcar_compile.errors import BackendError
from fastcar_compile.runtime.backends.accelerator.calls import Buffer, ComputeUnit

TABLE, GATE = 3, 4
"""Values of `op` (fastcar_drs.hpp)."""

_CALL = ("crc", "layer", "step", "query_words", "key_words")
"""Scalars of a call that play no part in a load."""

_WORD_BYTES = 16


class DrsUnit:
    """The kernel fastcar_drs on a unit. It keeps the control table on chip, from one `load` to the next."""

    def __init__(self, unit: ComputeUnit) -> None:
        self._unit = unit
        self._networks: dict[int, Buffer] = {}
        self._crc = 0  # of the table loaded last, which the kernel compares with the one on chip

    def load(self, table: bytes) -> Status:
        """Load a control table, any bytes, and return the result of its checks.

        Unless it is OK, there is no table on chip.
        """
        unit = self._unit
        # The kernel reads whole memory words. `table_bytes` has the true length, which the CRC covers.
        unit.write("drs_table", np.frombuffer(table + bytes(-len(table) % _WORD_BYTES), np.uint8))
        unit.fill("query", "key", "chain")
        unit.set({"op": TABLE, "table_bytes": len(table)} | dict.fromkeys(_CALL, 0))
        unit.run()
        # Bytes 8 to 11 of a table are its CRC. Every later call repeats it, so a table of another program is noticed.
        self._crc, self._rows = int.from_bytes(table[8:12], "little"), int.from_bytes(table[20:24], "little")
        return Status(int(unit.read("result", _WORD_BYTES).view(np.uint32)[0]))

    def load_network(self, layer: int, network: NDArray[np.uint8], key_words: int) -> None:
        """Give a layer's network to the kernel: it lies behind the `key_words` words of the cached rows."""
        room = np.zeros(key_words * _WORD_BYTES, np.uint8)
        self._networks[layer] = self._unit.make_buffer("key", np.concatenate([room, network.view(np.uint8)]))

    def run(self, call: LayerCall, rows: int) -> LayerTrace:
        """Return the decision for one layer, for `rows` rows of the batch, with the table that was loaded."""
        unit = self._unit
        # The argument has 32 counts, whatever the batch is.
        chain = np.zeros(MAX_ROWS, np.int32)
        chain[: len(call.chain)] = call.chain
        for name, array in (("query", call.query), ("key", call.key), ("chain", chain)):
            unit.fill(name)
            unit.write(name, np.ascontiguousarray(array).view(np.uint8).reshape(-1))
        # A layer's buffer has the network behind the room for the cached rows. An update overwrites that room alone.
        if len(call.key) and call.layer in self._networks:
            unit.update(self._networks[call.layer], np.ascontiguousarray(call.key).view(np.uint8).reshape(-1))
            unit.bind("key", self._networks[call.layer])
        words = {"query_words": len(call.query), "key_words": len(call.key)}
        unit.set({"op": GATE, "table_bytes": 0, "crc": self._crc, "layer": call.layer, "step": call.step} | words)
        unit.run()
        return read_result(unit.read("result", 4 * RESULT_WORDS).view(np.uint32), rows)

    def decide(self, call: LayerCall) -> LayerTrace:
        """As Kernel.decide, with the table of the last load."""
        trace = self.run(call, self._rows)
        if trace.status is not Status.OK:
            raise BackendError(f"the controller stopped with status {trace.status.name}", where=f"layer {call.layer}")
        return trace
