"""Dynamic Resource Scheduling in Python: what the HLS controller must answer, and where the array computes each row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fastcar_compile.codegen.hls.control_table.gate import Array, Operands, decide
from fastcar_compile.codegen.hls.control_table.reader import Header, check, gate_of, header_of
from fastcar_compile.codegen.hls.control_table.table import MAX_ROWS, DrsTable, Limits, Status

# What the DRS controller writes for one layer, as 32-bit words (docs/reference/drs_table.md, "Calls").


SCORES, CHAIN = 4, 4 + MAX_ROWS
"""First words of the scores and of the chain counts; before them: status, Index Register, two spare words."""

RESULT_WORDS = CHAIN + MAX_ROWS


def read_result(words: NDArray[Any], rows: int) -> LayerTrace:
    """Return what the controller decided for `rows` rows of the batch; words uint32."""
    status, register = (int(word) for word in words[:2])
    # With another status nothing was decided: the words of scores and chain counts mean nothing then.
    decided = rows if Status(status) is Status.OK else 0
    return LayerTrace(
        status=Status(status),
        index_register=register,
        scores=tuple(words[SCORES : SCORES + decided].view(np.float32).tolist()),
        chain=tuple(words[CHAIN : CHAIN + decided].view(np.int32).tolist()),
    )


class Place(NamedTuple):
    """Where a row computes: on core `core`, in pass `pass_number` over the weights of a tile."""

    core: int
    pass_number: int


@dataclass(frozen=True)
class LayerCall:
    """The arguments of one call of the controller.

    Args:
        layer: index of the decoder layer. step: decode forward number t.
        query: memory words of q (`gate.pack_heads`) and of x (`scores.pack_row`), what the gate reads of them.
        key: those of the cached key and of the cached x.
        chain: int32 [at least B], replays in a row at slot t mod F.
        network: memory words of the layer's network (`scores.pack_network`), for gate `learned`.
    """

    layer: int
    step: int
    query: Array
    key: Array
    chain: Array
    network: Array | None = None


@dataclass(frozen=True)
class LayerTrace:
    """What one call of the controller answers: scores (float32 values) and new chain counts of every row of the table.

    With a status other than OK nothing was decided: the register is 0, scores and chain are empty.
    """

    status: Status
    index_register: int = 0
    scores: tuple[float, ...] = ()
    chain: tuple[int, ...] = ()


def map_rows(index_register: int, rows: int, cores: int) -> tuple[Place, ...]:
    """Return the Mapping Registers: the i-th row that computes goes to core i mod `cores` in pass i div `cores`.

    The register of a replayed row is 0. Bits at or beyond `rows` are ignored.
    """
    mapping, computing = [Place(0, 0)] * rows, 0
    for row in range(rows):
        # Rows that compute are dealt to the cores in turn, so the cores' loads differ by one row at most.
        if index_register >> row & 1:
            mapping[row] = Place(computing % cores, computing // cores)
            computing += 1
    return tuple(mapping)


def run_layer(table: DrsTable | bytes, call: LayerCall, *, limits: Limits | None = None) -> LayerTrace:
    """Return what the HLS controller answers to one call with this table: scores, Index Register, chain counts.

    Of a table that it does not load, it is the answer to the load.

    Args:
        table: a table, or its bytes (then they are checked, and a fault is a status, not an exception).
        limits: of the hardware; a table that needs more has status BAD_HEADER. None: those of the format.
    """
    data = table if isinstance(table, bytes) else table.to_bytes()
    status = check(data, limits)
    if status is not Status.OK:
        return LayerTrace(status)
    header = header_of(data)
    if not 0 <= call.layer < header.layers:
        return LayerTrace(Status.BAD_LAYER)
    gate = gate_of(data, call.layer)
    # A layer without a gate has no operands to check: its factor is 0.
    if gate.factor != 0 and not _operands_fit(header, call):
        return LayerTrace(Status.BAD_OPERANDS)
    operands = Operands(call.query, call.key, call.network)
    decision = decide(gate, call.step, operands, call.chain[: header.rows])
    return LayerTrace(
        Status.OK, decision.index_register, tuple(decision.scores.tolist()), tuple(decision.chain.tolist())
    )


def _operands_fit(header: Header, call: LayerCall) -> bool:
    # Lengths count 128-bit words, as the kernel's arguments do.
    return (header.query_words, header.key_words) == (len(call.query), len(call.key))
