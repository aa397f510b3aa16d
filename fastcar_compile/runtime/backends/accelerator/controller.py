"""The score unit and DRS controller of an artifact, in C simulation or on a board: it decides which rows compute."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastcar_compile.artifact.offload import Op
from fastcar_compile.codegen.hls.control_table.gate import pack_inputs
from fastcar_compile.codegen.hls.control_table.reader import read_table
from fastcar_compile.codegen.hls.control_table.simulator import RESULT_WORDS, LayerCall, LayerTrace, read_result
from fastcar_compile.codegen.hls.control_table.table import MAX_ROWS, Status
from fastcar_compile.errors import BackendError, InternalError
from fastcar_compile.gates.base import GateInputs
from fastcar_compile.runtime.backends.accelerator.calls import Buffer, ComputeUnit

Array = NDArray[Any]

_CALL = ("crc", "layer", "step", "query_words", "key_words")
"""Scalars of a call that play no part in a load."""

_WORD_BYTES = 16
"""The table is read, and the result written, in whole memory words."""


class Controller:
    """The controller of a kernel on a unit. It keeps the control table on chip, from one `load` to the next."""

    def __init__(self, unit: ComputeUnit) -> None:
        self._unit = unit
        self._networks: dict[int, Buffer] = {}
        self._crc = 0  # CRC of the table loaded last, which the kernel compares with the table on chip

    def load(self, table: bytes) -> Status:
        """Load a control table, any bytes, and return the result of its checks.

        Unless the result is OK, the chip holds no table.
        """
        unit = self._unit
        # The kernel reads whole memory words. `table_bytes` has the true length, which the CRC covers.
        unit.write("table", np.frombuffer(table + bytes(-len(table) % _WORD_BYTES), np.uint8))
        unit.fill("query", "key", "chain")
        unit.set({"op": Op.TABLE, "table_bytes": len(table)} | dict.fromkeys(_CALL, 0))
        unit.run()
        # Bytes 8 to 11 of a table are its CRC. Every later call repeats it, so a table of another program is noticed.
        self._crc = int.from_bytes(table[8:12], "little")
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
        for name, words in (("query", call.query), ("key", call.key), ("chain", chain)):
            unit.fill(name)
            unit.write(name, np.ascontiguousarray(words).view(np.uint8).reshape(-1))
        # A layer's buffer has the network behind the room for the cached rows. An update overwrites that room alone.
        if len(call.key) and call.layer in self._networks:
            unit.update(self._networks[call.layer], np.ascontiguousarray(call.key).view(np.uint8).reshape(-1))
            unit.bind("key", self._networks[call.layer])
        unit.set(
            {
                "op": Op.GATE,
                "table_bytes": 0,
                "crc": self._crc,
                "layer": call.layer,
                "step": call.step,
                "query_words": len(call.query),
                "key_words": len(call.key),
            }
        )
        unit.run()
        return read_result(unit.read("result", 4 * RESULT_WORDS).view(np.uint32), rows)


@dataclass(frozen=True)
class GateDecision:
    """The unit's decision for one layer: replay bool [B], score float32 [B], chain int32 [B] with this forward."""

    replay: Array
    score: Array
    chain: Array


class LiveTable:
    """A control table with the thresholds of a session. Where small scores replay it holds minus thresholds.

    Args:
        data: drs/table.bin.

    Raises:
        UserError: the table is not valid.
    """

    def __init__(self, data: bytes) -> None:
        self.table = read_table(data)
        self.sign = np.float32(-1 if self.table.gate.at_most else 1)

    def decides(self, layer: int) -> bool:
        """Return whether the table has a gate for this layer; else the host decides, or the layer never replays."""
        return self.table.factors[layer] != 0

    def follow(self, thresholds: Array) -> bytes | None:
        """Take thresholds float32 [L]; return the table with these thresholds, None where it had them before.

        The controller does not use the threshold of a layer whose gate the host decides.
        """
        given = (self.sign * thresholds).tolist()
        # A threshold of +inf keeps the controller from replaying a layer that the host decides.
        own = [t if self.decides(layer) else float("inf") for layer, t in enumerate(given)]
        if tuple(own) == self.table.thresholds:
            return None
        self.table = self.table.with_thresholds(own)
        return self.table.to_bytes()


class GateController:
    """Decides layer by layer through the controller.

    Args:
        controller: controller that decides. table: drs/table.bin; it is loaded here.

    Raises:
        UserError: the table is not valid. BackendError: the controller refuses it.
    """

    def __init__(self, controller: Controller, table: bytes) -> None:
        self._controller, self._live = controller, LiveTable(table)
        self._load(table)
        self.reset()

    def reset(self) -> None:
        """Forget the last forward."""
        self._step = 0
        self._traces: dict[int, LayerTrace] = {}

    def start(self, step: int, thresholds: Array) -> None:
        """Begin decode forward number `step`; thresholds float32 [L].

        Changed thresholds make a new table, which is loaded once. Where small scores replay, the unit compares minus
        score and minus threshold.

        Raises:
            BackendError: the controller refuses the table.
        """
        self._step = step
        self._traces.clear()
        changed = self._live.follow(thresholds)
        if changed is not None:
            self._load(changed)

    def decide(self, layer: int, inputs: GateInputs[Array], chain: Array) -> GateDecision:
        """Return the decision for one layer.

        Args:
            inputs: what the layer's gate reads. chain: int32 [B], replays in a row at this slot.

        Raises:
            BackendError: the controller stopped with a status other than OK.
        """
        trace = self._run(layer, *pack_inputs(inputs), chain)
        # A bit of the Index Register says that the row computes.
        replay = [not trace.index_register >> row & 1 for row in range(self._live.table.rows)]
        scores = self._live.sign * np.array(trace.scores, np.float32)
        return GateDecision(np.array(replay), scores, np.array(trace.chain, np.int32))

    def decides(self, layer: int) -> bool:
        """Return whether the table has a gate for this layer; else the host decides, or the layer never replays."""
        return self._live.decides(layer)

    def require(self, layer: int, mask: int) -> None:
        """Raise InternalError where bit b of a layer's `mask`, 1: row b computes, is not what was decided for row b."""
        if self.decides(layer) and self._traces[layer].index_register != mask:
            raise InternalError(f"layer {layer}: the host's replay mask is not what the DRS controller decided")

    def _load(self, table: bytes) -> None:
        self._require(self._controller.load(table), "loading the DRS table")

    def _run(self, layer: int, query: Array, key: Array, chain: Array) -> LayerTrace:
        trace = self._controller.run(LayerCall(layer, self._step, query, key, chain), self._live.table.rows)
        self._require(trace.status, f"layer {layer}")
        self._traces[layer] = trace
        return trace

    @staticmethod
    def _require(status: Status, where: str) -> None:
        """Raise BackendError unless the status is OK."""
        if status is not Status.OK:
            hint = "another program uses the board" if status is Status.NO_TABLE else "compile the model again"
            raise BackendError(f"the DRS controller stopped with status {status.name}", where=where, hint=hint)
