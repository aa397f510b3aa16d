"""The state of one process, FIFO and memory between two events."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING

from cycle_model.network import Action, Claim, Fifo, Free, Post, Run, Take
from fastcar_compile.codegen.hls.model.engine import EngineMemory

if TYPE_CHECKING:
    from cycle_model.kernel import _Simulator

MOMENT = 1e-6
"""Clocks that count as none: times go up to 1e8 clocks, which doubles hold to 1e-8."""

TOKEN = 1e-4
"""The part of a token that counts as none. Totals are made whole where a loop begins or ends."""


class FifoState:
    """Tokens of a FIFO since the beginning: put in by iterations that began, shown to the reader, and taken by it."""

    def __init__(self, name: str, fifo: Fifo) -> None:
        self.name, self.fifo = name, fifo
        self.put = self.shown = self.taken = 0.0
        self.write_rate = self.read_rate = self.shown_rate = 0.0

    @property
    def used(self) -> float:
        """Tokens that take room, in the FIFO or in the pipeline that fills it."""
        return self.put - self.taken

    @property
    def ready(self) -> float:
        """Tokens that the reader can take."""
        return self.shown - self.taken

    def advance(self, step: float) -> None:
        """Let tokens flow for some clocks."""
        self.put += self.write_rate * step
        self.shown += self.shown_rate * step
        self.taken += self.read_rate * step

    def horizon(self, capacity: float) -> float:
        """Return the clocks until it becomes empty or full, or until a token or a place that is waited for is there."""
        times = []
        gain, fill = self.shown_rate - self.read_rate, self.write_rate - self.read_rate
        if gain < 0 and self.ready > TOKEN:
            times.append(self.ready / -gain)
        if gain > 0 and self.ready < 1 - TOKEN:
            times.append((1 - self.ready) / gain)
        if fill > 0 and self.used < capacity - TOKEN:
            times.append((capacity - self.used) / fill)
        if fill < 0 and self.used > capacity - 1 + TOKEN:
            times.append((self.used - capacity + 1) / -fill)
        return min(times, default=inf)


@dataclass(frozen=True, order=True)
class Showing:
    """What a FIFO's reader sees from a clock on: a total of tokens (None: as it is) and a rate."""

    time: float
    number: int
    fifo: str
    total: float | None
    rate: float


class MemoryState:
    """A memory and its refreshes."""

    def __init__(self, name: str, memory: EngineMemory) -> None:
        self.name, self.memory = name, memory
        self.moved = 0.0
        self.rate = self._free_rate = memory.rate / (1 - memory.refreshing)  # words per clock between two refreshes
        self._next = memory.refresh_interval if memory.refresh else inf
        self._refreshing = False

    def horizon(self, now: float) -> float:
        """Return the clocks until a refresh begins or ends."""
        return max(self._next - now, 0.0)

    def at(self, now: float) -> None:
        """Begin and end refreshes up to this clock."""
        while self._next <= now + MOMENT:
            self._refreshing = not self._refreshing
            memory = self.memory
            self._next += memory.refresh if self._refreshing else memory.refresh_interval - memory.refresh
            self.rate = 0.0 if self._refreshing else self._free_rate


class ProcessState:
    """A process: its action, what it waits for, and what it did so far."""

    def __init__(self, name: str, actions: Iterable[Action]) -> None:
        self.name = name
        self._actions = iter(actions)
        self.action: Action | None = next(self._actions, None)
        self.run: Run | None = None
        self.last_run: Run | None = None
        self.left = self.rate = 0.0
        self.until: float | None = None
        self.asleep: tuple[dict[str, int], str] | None = None
        self.end = 0.0
        self.starts: dict[str, float] = {}

    @property
    def has_run(self) -> bool:
        """Whether the action is a loop, or one has been."""
        return isinstance(self.action, Run) or self.last_run is not None

    @property
    def wanted_run(self) -> Run:
        """The loop that runs, wants to run, or ran last."""
        run = self.action if isinstance(self.action, Run) else self.last_run
        assert run is not None, "a process without a loop is asked for it"
        return run

    def next_action(self, now: float) -> None:
        """Go to the next action."""
        if isinstance(self.action, Run):
            self.last_run = self.action
        self.action = next(self._actions, None)
        if self.action is None:
            self.end = now

    def begin(self, simulator: _Simulator) -> bool:
        """Begin the action; False: it has to wait."""
        match self.action:
            case Run():
                return simulator.start_run(self)
            case Claim(name) if simulator.free[name] == 0:
                self.asleep = simulator.free, name
                return False
            case Take(name) if simulator.full[name] == 0:
                self.asleep = simulator.full, name
                return False
            case Claim(name):
                simulator.free[name] -= 1
            case Take(name):
                simulator.full[name] -= 1
            case Post(name):
                simulator.full[name] += 1
            case Free(name):
                simulator.free[name] += 1
        self.next_action(simulator.now)
        return True

    def sleeps(self) -> bool:
        """Return whether it waits for a block that is not there."""
        if self.asleep is None:
            return False
        counts, name = self.asleep
        if counts[name] == 0:
            return True
        self.asleep = None
        return False

    def advance(self, step: float) -> None:
        """Let its loop flow for some clocks."""
        if self.run is not None:
            self.left = max(0.0, self.left - self.rate * step)


def water_fill(wishes: Sequence[float], supply: float) -> list[float]:
    """Return what each user gets of a supply: what it wishes, at most an equal share of what the others leave."""
    if len(wishes) == 1:
        return [min(wishes[0], supply)]
    given = [0.0] * len(wishes)
    left = supply
    for number, index in enumerate(sorted(range(len(wishes)), key=lambda i: wishes[i])):
        given[index] = min(wishes[index], left / (len(wishes) - number))
        left -= given[index]
    return given
