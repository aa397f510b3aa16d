"""Time of one call of the TAS unit and DRS controller: the clocks of its loops, and the latency of its bursts."""

from __future__ import annotations

from fastcar_compile.codegen.hls.design.controller import controller_cycles, controller_traffic
from fastcar_compile.drs.table import DrsTable


def controller_clocks(table: DrsTable, latency: int, *, decides: bool) -> int:
    """Return the clocks of one call.

    Args:
        latency: clocks of the memory from a request to its first word; bursts wait for each other.
        decides: whether the layer has a gate; else no score is computed, and q and key are not read.
    """
    clocks, bursts = controller_cycles(table), controller_traffic(table).bursts
    if decides:
        return clocks + bursts * latency
    return clocks - table.rows * (table.row_query_words + table.row_key_words + 1) + 2 * latency
