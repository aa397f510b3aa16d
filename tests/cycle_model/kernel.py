"""The simulator: processes that flow at constant rates from one event to the next.

Between two events every pipelined loop runs at a constant rate: one iteration every `ii` clocks, or slower where a
FIFO is empty (then at the rate of its tokens), full (then at the rate of its reader) or a memory is shared. Events are
starts and ends of loops, FIFOs that become empty or full, blocks that change hands, and refreshes. So the work grows
with the tiles of a product, not with its clocks, and constant rates are exact: iteration k of a loop starts k * ii
clocks after the first.
"""

import heapq
from math import inf

from cycle_model.network import Network, ProcessResult, Result, Run
from cycle_model.state import MOMENT, TOKEN, FifoState, MemoryState, ProcessState, Showing, water_fill
from fastcar_compile.errors import InternalError

RATE = 1e-9
"""The difference of two rates that counts as none."""

MOST_EVENTS = 50_000_000
"""More than any step has: a network that never ends would otherwise not end here either."""


def simulate_network(network: Network) -> Result:
    """Return what a network does until every process is done.

    Raises:
        InternalError: processes wait on each other; the text names them.
    """
    return _Simulator(network).run()


Flow = tuple[ProcessState, Run]
"""A process and the loop that it runs."""


class _Simulator:
    def __init__(self, network: Network) -> None:
        self.now = 0.0
        self.fifos = {name: FifoState(name, fifo) for name, fifo in network.fifos.items()}
        self.free = {name: blocks.copies for name, blocks in network.blocks.items()}
        self.full = dict.fromkeys(network.blocks, 0)
        self.memories = {name: MemoryState(name, memory) for name, memory in network.memories.items()}
        self.processes = {name: ProcessState(name, actions) for name, actions in network.processes.items()}
        self._live = list(self.processes.values())
        self.network = network
        self._later: list[Showing] = []
        self._count = 0

    def run(self) -> Result:
        """Run until every process is done."""
        self._settle()
        for _event in range(MOST_EVENTS):
            if not self._live:
                break
            self._set_rates()
            step = self._horizon()
            if step == inf:
                raise self._deadlock()
            self._advance(step)
            self._settle()
        else:
            raise InternalError(f"a network did not end in {MOST_EVENTS} events")
        results = {name: ProcessResult(dict(p.starts), p.end) for name, p in self.processes.items()}
        words = {name: memory.moved for name, memory in self.memories.items()}
        return Result(max((p.end for p in self.processes.values()), default=0.0), results, words)

    # What happens at one moment.

    def _settle(self) -> None:
        """Let everything happen that takes no time."""
        while self._later and self._later[0].time <= self.now + MOMENT:
            showing = heapq.heappop(self._later)
            fifo = self.fifos[showing.fifo]
            fifo.shown = fifo.shown if showing.total is None else showing.total
            fifo.shown_rate = showing.rate
        moved = True
        while moved:
            moved = False
            for process in self._live:
                while process.action is not None and not process.sleeps() and self._step(process):
                    moved = True
        self._live = [process for process in self._live if process.action is not None]

    def _step(self, process: ProcessState) -> bool:
        """Let a process go on; return whether it did."""
        if process.run is not None:
            return self._end_of_run(process)
        if process.until is not None:
            if process.until > self.now + MOMENT:
                return False
            process.until = None
            process.next_action(self.now)
            return True
        return process.begin(self)

    def _end_of_run(self, process: ProcessState) -> bool:
        run = process.run
        if run is None or process.left > TOKEN:
            return False
        for name in run.reads:
            self.fifos[name].taken = round(self.fifos[name].taken)
        for name in run.writes:
            self.fifos[name].put = round(self.fifos[name].put)
        self._set_rate(process, 0.0, whole=True)
        process.run = None
        process.until = self.now + (run.ii if run.flat else run.latency)
        return True

    def start_run(self, process: ProcessState) -> bool:
        """Start a loop with its first iteration; False: it has to wait."""
        run = process.wanted_run
        if any(self.fifos[name].ready < 1 - TOKEN for name in run.reads):
            return False
        if any(self.fifos[name].used > self._capacity(name, run) - 1 + TOKEN for name in run.writes):
            return False
        for name in run.reads:
            self.fifos[name].taken += 1
        for name in run.writes:
            self.fifos[name].put += 1
        if run.memory is not None:
            self.memories[run.memory].moved += run.words
        process.run, process.left, process.rate = run, float(run.trips - 1), 0.0
        process.starts.setdefault(run.loop, self.now)
        self._tell(process, whole=True)
        return True

    def _capacity(self, name: str, run: Run) -> float:
        """Return the tokens that a FIFO and the pipeline of the loop that fills it hold."""
        flight = run.latency / run.ii if run.memory is None else self.memories[run.memory].memory.window
        return self.fifos[name].fifo.depth + flight

    # Rates.

    def _set_rates(self) -> None:
        """Find the highest rates that every FIFO and memory allows."""
        flowing = [(p, p.run) for p in self._live if p.run is not None]
        rates = {p.name: 1 / run.ii for p, run in flowing}
        for _round in range(len(flowing) + 2):
            before = dict(rates)
            for process, run in flowing:
                self._limit(process, run, rates)
            for memory in self.memories.values():
                self._share(memory, flowing, rates)
            if rates == before:
                break
        for process, _run in flowing:
            if rates[process.name] != process.rate:
                self._set_rate(process, rates[process.name])

    def _limit(self, process: ProcessState, run: Run, rates: dict[str, float]) -> None:
        for name in run.reads:
            fifo = self.fifos[name]
            if fifo.ready <= TOKEN and fifo.shown_rate < rates[process.name] - RATE:
                rates[process.name] = fifo.shown_rate
        for name in run.writes:
            fifo = self.fifos[name]
            if fifo.used < self._capacity(name, run) - TOKEN:
                continue
            reader = self.processes[fifo.fifo.reader]
            reads = reader.run is not None and name in reader.run.reads
            limit = rates.get(reader.name, 0.0) if reads else 0.0
            if limit < rates[process.name] - RATE:
                rates[process.name] = limit

    def _share(self, memory: MemoryState, flowing: list[Flow], rates: dict[str, float]) -> None:
        users = [flow for flow in flowing if flow[1].memory == memory.name]
        if not users:
            return
        limit = memory.memory.window / memory.memory.latency if memory.memory.latency else inf
        wishes = [min(rates[p.name] * run.words, limit * run.words) for p, run in users]
        for (process, run), given in zip(users, water_fill(wishes, memory.rate), strict=True):
            rate = given / run.words
            if rate < rates[process.name] - RATE:
                rates[process.name] = rate

    def _set_rate(self, process: ProcessState, rate: float, *, whole: bool = False) -> None:
        run = process.wanted_run
        for name in run.reads:
            self.fifos[name].read_rate = rate
        for name in run.writes:
            self.fifos[name].write_rate = rate
        process.rate = rate
        self._tell(process, whole=whole)

    def _tell(self, process: ProcessState, *, whole: bool) -> None:
        """Show a loop's results to their readers, a latency later. `whole`: the tokens so far are a whole number."""
        run = process.wanted_run
        for name in run.writes:
            self._count += 1
            total = self.fifos[name].put if whole else None
            heapq.heappush(self._later, Showing(self.now + run.latency, self._count, name, total, process.rate))

    # From one event to the next.

    def _horizon(self) -> float:
        """Return the clocks until something changes."""
        times = [self._later[0].time - self.now] if self._later else []
        for process in self._live:
            if process.until is not None:
                times.append(process.until - self.now)
            elif process.run is not None and process.rate > 0:
                times.append(process.left / process.rate)
        for name, fifo in self.fifos.items():
            times.append(fifo.horizon(self._capacity_of_writer(name)))
        if any(p.run is not None and p.run.memory is not None for p in self._live):
            times += [memory.horizon(self.now) for memory in self.memories.values()]
        return max(min(times, default=inf), 0.0)

    def _capacity_of_writer(self, name: str) -> float:
        writer = self.processes[self.network.fifos[name].writer]
        if writer.action is None or not writer.has_run:
            return inf
        return self._capacity(name, writer.run or writer.wanted_run)

    def _advance(self, step: float) -> None:
        for process in self._live:
            if process.asleep is not None:
                continue
            process.advance(step)
            if process.run is not None and process.run.memory is not None:
                self.memories[process.run.memory].moved += process.rate * process.run.words * step
        for fifo in self.fifos.values():
            fifo.advance(step)
        self.now += step
        for memory in self.memories.values():
            memory.at(self.now)

    def _deadlock(self) -> InternalError:
        return InternalError(f"deadlock at clock {self.now:.0f}: {', '.join(p.name for p in self._live)} wait")
