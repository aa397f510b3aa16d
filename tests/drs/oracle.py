"""Dynamic Resource Scheduling from docs/reference/drs_table.md and not from the code: plain lists, no bit fields."""

from __future__ import annotations

from dataclasses import dataclass

Dispatched = tuple[str, int | None, int | None, int | None, int]


@dataclass(frozen=True)
class Answer:
    """Index Register as a list of bits, dispatched (name, row, core, pass, bytes), and what the prefetch buffer holds
    afterwards."""

    computes: list[bool]
    dispatched: list[Dispatched]
    held: int | None
    chain: list[int]


@dataclass(frozen=True)
class Situation:
    """Everything that decides one layer of one forward."""

    wants: list[bool]  # per row: its score reaches the threshold
    chain: list[int]
    cores: int
    step: int
    frame: int
    coupled: bool = False
    max_chain: int | None = None
    layer: int = 0
    prefetch: tuple[int, ...] = (0,)
    held: int | None = None


def schedule(s: Situation) -> Answer:
    """One layer of one forward."""
    rows = range(len(s.wants))
    free = [s.max_chain is None or s.chain[row] < s.max_chain for row in rows]
    replays = [s.wants[row] and free[row] and s.step >= s.frame for row in rows]
    if s.coupled:
        half = len(s.wants) // 2
        for first in range(half):
            both = replays[first] and replays[first + half]
            replays[first] = replays[first + half] = both
    computing = [row for row in rows if not replays[row]]
    held, layers = s.held, len(s.prefetch)
    out: list[Dispatched] = []
    if computing:
        there = s.prefetch[(s.layer + layers - 1) % layers] if held == s.layer else 0
        out.append(("LOAD_WEIGHTS", None, None, None, there))
        held = None if held == s.layer else held
    out += [("COMPUTE_MLP", row, turn % s.cores, turn // s.cores, 0) for turn, row in enumerate(computing)]
    out += [("REPLAY_COPY", row, None, None, 0) for row in rows if replays[row]]
    following = 0 if s.layer == layers - 1 else s.layer + 1
    if not computing and s.prefetch[s.layer] > 0 and held != following:
        out.append(("PREFETCH_NEXT", None, None, None, s.prefetch[s.layer]))
        held = following
    out.append(("BARRIER", None, None, None, 0))
    chain = [s.chain[row] + 1 if replays[row] else 0 for row in rows]
    return Answer([not r for r in replays], out, held, chain)
