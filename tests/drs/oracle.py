"""Dynamic Resource Scheduling from docs/reference/drs_table.md and not from the code: plain lists, no bit fields."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate


@dataclass(frozen=True)
class Answer:
    """Per row: whether it computes, its new chain count."""

    computes: list[bool]
    chain: list[int]


@dataclass(frozen=True)
class Situation:
    """Everything that decides one layer of one forward."""

    wants: list[bool]  # per row: its score reaches the threshold
    chain: list[int]
    step: int
    frame: int
    coupled: bool = False
    max_chain: int | None = None
    period: int = 0


def places(computes: Sequence[bool], cores: int) -> list[tuple[int, int] | None]:
    """(core, pass) of every row that computes; None: the row replays."""
    turns = accumulate(computes, initial=0)
    return [(turn % cores, turn // cores) if here else None for here, turn in zip(computes, turns, strict=False)]


def decide(s: Situation) -> Answer:
    """One layer of one forward."""
    rows = range(len(s.wants))
    fresh = s.step < s.frame or (s.period != 0 and s.step % s.period < s.frame)
    free = [s.max_chain is None or s.chain[row] < s.max_chain for row in rows]
    replays = [s.wants[row] and free[row] and not fresh for row in rows]
    if s.coupled:
        half = len(s.wants) // 2
        for first in range(half):
            both = replays[first] and replays[first + half]
            replays[first] = replays[first + half] = both
    return Answer([not r for r in replays], [s.chain[row] + 1 if replays[row] else 0 for row in rows])
