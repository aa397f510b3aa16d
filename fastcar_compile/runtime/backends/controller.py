"""The TAS unit and DRS controller of an artifact, in C simulation or on a board, as the gate unit of a session."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from fastcar_compile.drs.gate import pack_heads
from fastcar_compile.drs.reader import read_table
from fastcar_compile.drs.simulator import LayerCall, LayerTrace
from fastcar_compile.drs.table import Opcode, Status
from fastcar_compile.errors import BackendError
from fastcar_compile.ops.offload_gate import GateDecision
from fastcar_compile.runtime.backends.base import Array


class Controller(Protocol):
    """What runs the kernel `fastcar_drs`: csim_drs.DrsLibrary, or board.BoardController."""

    def run(self, table: bytes, call: LayerCall, rows: int) -> LayerTrace:
        """One call with a table's bytes; `rows` of the batch."""
        ...


class GateController:
    """Decides and dispatches layer by layer through the controller.

    Args:
        library: the controller. table: drs/table.bin.

    Raises:
        UserError: the table is not valid.
    """

    def __init__(self, library: Controller, table: bytes) -> None:
        self._library, self._table, self._binary = library, read_table(table), table
        self.reset()

    def reset(self) -> None:
        """Forget the last forward and empty the prefetch buffer."""
        self._step, self._held = 0, None
        self._traces: dict[int, LayerTrace] = {}

    def start(self, step: int, thresholds: Array) -> None:
        """Begin decode forward number `step`; thresholds float32 [L], and others than before are a new table.

        A threshold of a layer whose gate the host decides is not the unit's.
        """
        self._step = step
        self._traces.clear()
        own = [t if self.decides(layer) else float("inf") for layer, t in enumerate(thresholds.tolist())]
        if tuple(own) != self._table.thresholds:
            self._table = self._table.with_thresholds(own)
            self._binary = self._table.to_bytes()
            self._held = None

    def __call__(self, layer: int, query: Tensor, key: Tensor, chain: Tensor, step: int) -> GateDecision:
        """Decide for one layer; see ops.offload_gate.GateUnit.

        Raises:
            BackendError: the controller stopped with a status other than OK.
        """
        trace = self._run(layer, pack_heads(query.numpy()), pack_heads(key.numpy()), chain.numpy())
        replay = [not trace.index_register >> row & 1 for row in range(self._table.rows)]
        return GateDecision(
            torch.tensor(replay),
            torch.tensor(trace.scores, dtype=torch.float32),
            torch.tensor(trace.chain, dtype=torch.int32),
        )

    def decides(self, layer: int) -> bool:
        """Whether the table has a gate for this layer; else the host decides, or the layer never replays."""
        return self._table.factors[layer] != 0

    def dispatched(self, layer: int) -> LayerTrace:
        """What the controller dispatched for a layer in this forward; a layer without a gate is scheduled now."""
        if layer not in self._traces:
            empty = np.zeros((0, 4), np.float32)
            self._run(layer, empty, empty, np.zeros(self._table.rows, np.int32))
        return self._traces[layer]

    def prefetched(self, layer: int) -> int:
        """Bytes of this layer's weights that its MLP takes from the prefetch buffer: the argument of LOAD_WEIGHTS."""
        records = self.dispatched(layer).records
        return sum(record.argument for record in records if record.opcode is Opcode.LOAD_WEIGHTS)

    def to_prefetch(self, layer: int) -> int | None:
        """The layer whose weights PREFETCH_NEXT fetches while this one's MLP is skipped; None: not dispatched."""
        records = self.dispatched(layer).records
        fetches = any(record.opcode is Opcode.PREFETCH_NEXT for record in records)
        return (layer + 1) % self._table.layers if fetches else None

    def _run(self, layer: int, query: Array, key: Array, chain: Array) -> LayerTrace:
        call = LayerCall(layer, self._step, query, key, chain, self._held)
        trace = self._library.run(self._binary, call, self._table.rows)
        if trace.status is not Status.OK:
            what = f"the DRS controller stopped with status {trace.status.name}"
            raise BackendError(what, where=f"layer {layer}", hint="compile the model again")
        self._held = trace.held
        self._traces[layer] = trace
        return trace
