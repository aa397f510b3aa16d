"""How much of a memory's peak bandwidth sequential bursts reach: refresh, activations and bank conflicts.

No constant here is fitted to a measured system; the timings are the standards' (dram.toml). A measurement of the board,
where its target file has one, caps what the model says.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.resources import files
from math import ceil
from typing import Protocol

from fastcar_compile.artifact.engine import WORD_BYTES
from fastcar_compile.codegen.hls.design.design import Design
from fastcar_compile.codegen.hls.design.loops import STREAM_DEPTH
from fastcar_compile.codegen.hls.design.step_loops import AttendWork, attend_loops
from fastcar_compile.codegen.hls.design.usage import READS
from fastcar_compile.config.formats import ACCELERATED, QUANT_FORMATS
from fastcar_compile.config.targets import Connection, Memory, Target
from fastcar_compile.errors import CompileError
from fastcar_compile.ir.types import ATTENTION_ROLES, CONTEXT_ROLES, StateRole

STREAM_BITS = 128
"""Bits per clock of one weight stream."""


@dataclass(frozen=True)
class DramTiming:
    """Timing of one technology, nanoseconds; `banks` and `row_bytes` of one channel."""

    t_rfc: float
    t_refi: float
    t_rp: float
    t_rcd: float
    t_faw: float
    banks: int
    row_bytes: int
    source: str

    def efficiency(self, burst_bytes: int, streams: int, channel_bandwidth: float) -> float:
        """Return the share of a channel's peak that `streams` interleaved sequential readers reach.

        Each burst opens at least one row. Activations of other banks hide behind transfers, as far as the four-activate
        window allows; one that meets a bank in use does not. With several streams, a burst follows one of another
        stream and meets its bank once in `banks`.

        Args:
            burst_bytes: bytes that one stream reads in sequence before another has its turn.
            streams: readers that share the channel.
            channel_bandwidth: bytes per second of one channel.
        """
        transfer = burst_bytes / channel_bandwidth * 1e9
        # A burst within one row still opens that row once.
        activations = max(1.0, burst_bytes / self.row_bytes)
        # The four-activate window lets one activation in every t_faw / 4 on average.
        busy = max(transfer, activations * self.t_faw / 4)
        conflict = (streams - 1) / streams / self.banks * (self.t_rp + self.t_rcd)
        # During refresh, t_rfc of every t_refi, the channel moves nothing.
        return (1 - self.t_rfc / self.t_refi) * transfer / (busy + conflict)


def timing_of(memory: Memory) -> DramTiming:
    """Return the timing of a board's memory."""
    table = tomllib.loads((files("fastcar_compile.codegen.hls.design") / "dram.toml").read_text())
    return DramTiming(**table[memory.technology])


def memory_rate(target: Target, ports: int) -> float:
    """Return the bytes per second that `ports` sequential weight streams get from the target's weight memories together.

    Streams are spread over the memories and their channels; a channel without a stream gives nothing. A controller that
    reorders gives each stream an equal part of its queue, so that a run in one row is at least that long.

    Args:
        ports: weight streams of 128 bits per clock; a wider AXI port carries several.
    """
    memories = target.weight_memories
    return sum(_rate_of(memory, ceil(ports / len(memories))) for memory in memories)


def _rate_of(memory: Memory, ports: int) -> float:
    physical = ceil(STREAM_BITS * ports / memory.width_bits)
    channel = memory.peak_bandwidth / memory.channels
    used, streams = min(memory.channels, physical), ceil(physical / memory.channels)
    # The reorder queue is shared, so more streams have shorter runs in one row.
    run = max(memory.burst_bytes, memory.reorder_bytes // streams)
    share = timing_of(memory).efficiency(run, streams, channel)
    return used * channel * min(share, memory.measured.share if memory.measured else 1.0)


def measured_cap(target: Target) -> float:
    """Return the bytes per second that were measured of the weight memories; of one without a measurement, its peak."""
    return sum(m.peak_bandwidth * (m.measured.share if m.measured else 1.0) for m in target.weight_memories)


def peak_bandwidth(target: Target) -> float:
    """Return the bytes per second of the weight memories, theoretical."""
    return sum(memory.peak_bandwidth for memory in target.weight_memories)


# Which port or bank of the board's memory every AXI port of the kernels is connected to.


_NUMBERED = re.compile(r"(.+)\[(\d+)\]")


@dataclass(frozen=True)
class BankMap:
    """What the linker connects.

    Attributes:
        weights: one tag per weight port, `HBM[a:b]` for several banks.
        bank_bytes: bytes behind every weight port; None: all of them lead to the same memory.
        others: tags for the other ports, which take them in turn.
    """

    weights: tuple[str, ...]
    bank_bytes: int | None
    others: tuple[str, ...]


def bank_map(target: Target, ports: int) -> BankMap | None:
    """Return where `ports` weight ports (AXI ports, of the memory's width) are connected; None: the linker chooses.

    Where the memory has banks, a weight port gets as many neighbouring ones as there are for each, and no other port
    shares them. Else weight ports are spread over the ports of the memory controller before two share one.

    Raises:
        CompileError: the board has fewer connections than weight ports.
    """
    memory = target.weight_memories[0]
    if len(target.weight_memories) > 1 or not memory.connections:
        return None
    if ports > len(memory.connections):
        raise CompileError(
            f"{ports} weight ports are more than the {len(memory.connections)} ports of {memory.name} on {target.name}",
            hint="choose fewer weight ports",
        )
    if memory.bank_bytes is None:
        # Streams on one port of the memory controller share it, so they are spread over these ports first.
        order = [connection.tag for connection in spread(memory)]
        return BankMap(tuple(order[:ports]), None, _others(order[ports:], order, target))
    # Neighbouring banks go to one port, because the linker takes a range of banks and no list.
    tags, each = [connection.tag for connection in memory.connections], len(memory.connections) // max(ports, 1)
    weights = tuple(tag_range(tags[each * port], tags[each * port + each - 1]) for port in range(ports))
    return BankMap(weights, each * memory.bank_bytes, _others(tags[each * ports :], tags, target))


def spread(memory: Memory) -> list[Connection]:
    """Return the connections in the order that weight ports take them: first one per port of the memory controller."""
    seen: set[str] = set()
    first: list[Connection] = []
    again: list[Connection] = []
    for connection in memory.connections:
        (again if connection.controller in seen else first).append(connection)
        seen.add(connection.controller)
    return first + again


def tag_range(first: str, last: str) -> str:
    """Return the linker's word for the banks from one tag to another: `HBM[4:7]`, or the tag itself."""
    if first == last:
        return first
    low, high = _NUMBERED.fullmatch(first), _NUMBERED.fullmatch(last)
    if low is None or high is None or low[1] != high[1]:
        what = f"the banks {first} to {last} have no common name with numbers"
        raise CompileError(what, hint='name the connections of a target\'s banks "NAME[0]", "NAME[1]", ...')
    return f"{low[1]}[{low[2]}:{high[2]}]"


def _others(spare: list[str], tags: list[str], target: Target) -> tuple[str, ...]:
    """Return what is spare; else the memories without weights, else the last connection of the weights."""
    elsewhere = [c.tag for m in target.memories if m not in target.weight_memories for c in m.connections]
    return tuple(spare or elsewhere or tags[-1:])


# Whether a decoder fits the board's memory, all of it and every bank.


HOST_RESERVE = 128 * 2**20
"""Bytes left to the operating system and the program on a board whose memory is shared with the host. Estimate."""

GB = 1e9


class Tensor(Protocol):
    """A state tensor, of a program or of an artifact."""

    @property
    def role(self) -> StateRole: ...
    @property
    def nbytes(self) -> int: ...


@dataclass(frozen=True)
class Footprint:
    """Bytes of a decoder that are in memory at the same time; the weights of a gate are among the weights."""

    weights: int
    kv_cache: int
    mlp_cache: int
    gate_cache: int = 0

    @classmethod
    def of(cls, weights: int, state: Iterable[Tensor]) -> Footprint:
        """Return the bytes of a decoder with these weights and state tensors."""
        sizes = dict.fromkeys(StateRole, 0)
        for tensor in state:
            sizes[tensor.role] += tensor.nbytes
        kv, gate = sum(sizes[role] for role in (*ATTENTION_ROLES, *CONTEXT_ROLES)), sizes[StateRole.GATE_CACHE]
        return cls(weights, kv, sum(sizes.values()) - kv - gate, gate)

    @property
    def total(self) -> int:
        """All of it, bytes."""
        return self.weights + self.kv_cache + self.mlp_cache + self.gate_cache


def held(decoder: Footprint, target: Target, *, attends: bool = False) -> Footprint:
    """Return what of a decoder the weight memories hold, for `compile`, its dry run and `estimate` alike.

    That is all of it where the host has the same memory. A card holds the weights: attention and replay run on the
    host, and their caches are in its memory.

    Args:
        attends: the accelerator computes attention too, so that the caches are beside the weights.
    """
    return decoder if attends or target.shares_memory else Footprint(decoder.weights, 0, 0)


def capacity(target: Target) -> int:
    """Return the bytes of the weight memories that a decoder may fill."""
    whole = sum(m.capacity_bytes for m in target.weight_memories)
    return whole - (HOST_RESERVE if target.shares_memory else 0)


def require_fit(footprint: Footprint, target: Target, *, quant: str, positions: int) -> None:
    """Raise CompileError for what the board cannot hold.

    Args:
        positions: of the KV cache, tokens.

    Raises:
        CompileError: it does not fit; the text has the numbers and the options.
    """
    room = capacity(target)
    if footprint.total <= room:
        return
    narrowest = min(ACCELERATED, key=lambda name: QUANT_FORMATS[name].weight_bits)
    options = [] if quant == narrowest else [f'quant="{narrowest}" ({QUANT_FORMATS[narrowest].summary})']
    if footprint.kv_cache > footprint.total // 20:
        options.append(f"a shorter cache than {positions} positions, or attention over sinks and a sliding window")
    if footprint.gate_cache:
        options.append("a gate without a cache of its own, such as tas")
    options.append(f"a board with at least {footprint.total / GB:.2f} GB")
    gate = f"gate cache {footprint.gate_cache / GB:.2f} GB, " if footprint.gate_cache else ""
    raise CompileError(
        f"the decoder does not fit the memory of {target.name}: weights {footprint.weights / GB:.2f} GB ({quant}), "
        f"KV cache {footprint.kv_cache / GB:.2f} GB ({positions} positions), "
        f"MLP cache {footprint.mlp_cache / GB:.2f} GB, {gate}together {footprint.total / GB:.2f} GB; "
        f"the board has room for {room / GB:.2f} GB",
        hint="; or ".join(options),
    )


def bank_excess(target: Target, *, ports: int, stream_bytes: int) -> str | None:
    """Return how the banks behind a weight port fall short of its part of the weight streams; None: they do not.

    Args:
        ports: AXI ports that read weights, of the memory's width. stream_bytes: of all streams together, padding included.
    """
    memories = target.weight_memories
    if len(memories) == 1 and 0 < len(memories[0].connections) < ports:
        return f"{ports} weight ports, and {memories[0].name} has {len(memories[0].connections)} connections"
    banks = bank_map(target, ports)
    if banks is None or banks.bank_bytes is None:
        return None
    # Every port reads an equal section of each stream, so the banks behind one port hold its part of all.
    section = -(-stream_bytes // ports)
    if section <= banks.bank_bytes:
        return None
    return (
        f"each of {ports} weight ports has {section / GB:.3f} GB, the banks behind it hold {banks.bank_bytes / GB:.3f} GB "
        f"({banks.weights[0]} behind the first)"
    )


def require_banks(target: Target, excess: Sequence[str | None]) -> None:
    """Raise CompileError where every number of weight ports that was tried has an excess (`bank_excess`).

    Raises:
        CompileError: they do not fit; the text has all numbers and the options.
    """
    short = [text for text in dict.fromkeys(excess) if text is not None]
    if None in excess or not short:
        return
    what = f"the weight streams do not fit the banks of {target.name}: {'; '.join(short)}"
    raise CompileError(what, hint="use fewer bits or layers, or a board whose banks are larger")


# The memory behind the weight ports as the engine waits for it, and how long attention takes at its pace.


READ_SECONDS = {"ddr4": 300e-9, "hbm2": 140e-9}
"""From a request of the fabric to its first word. ddr4: estimate for the PS's memory behind its interconnect.
hbm2: a page miss on a U280, 138 ns (Shuhai, Wang et al., FCCM 2020)."""


@dataclass(frozen=True)
class EngineMemory:
    """A memory controller, or several that are used alike.

    Args:
        rate: words per clock that all its users together get, refresh included. latency: clocks from a request to its
            first word. window: words that one weight port may have under way (outstanding requests times burst, shared by
            those of an AXI port).
        refresh_interval, refresh: clocks from one refresh to the next, and clocks of one, in which nothing moves.
        rows_apart: rows of x come from another memory.
    """

    rate: float
    latency: int
    window: int
    refresh_interval: float = 0.0
    refresh: float = 0.0
    rows_apart: bool = False

    @property
    def burst(self) -> float:
        """Words of one request."""
        return self.window / READS.outstanding

    @property
    def refreshing(self) -> float:
        """Share of the time in which it refreshes, and a port that takes a word per clock gets none."""
        return self.refresh / self.refresh_interval if self.refresh else 0.0


def memory_of(design: Design, target: Target) -> EngineMemory:
    """Return the memory that a design's weight ports read."""
    clock, memory = design.budget.clock_mhz * 1e6, target.weight_memories[0]
    timing = timing_of(memory)
    return EngineMemory(
        rate=memory_rate(target, design.ports) / WORD_BYTES / clock,
        latency=round(READ_SECONDS[memory.technology] * clock),
        window=READS.length * READS.outstanding // (WORD_BYTES * design.axi_words),
        refresh_interval=timing.t_refi * 1e-9 * clock,
        refresh=timing.t_rfc * 1e-9 * clock,
        rows_apart=memory.bank_bytes is not None,
    )


def attend_clocks(work: AttendWork, memory: EngineMemory) -> float:
    """Return the clocks: of each pass its turns at the pace of the cache, the softmax or the queries, and the last one's end."""
    layout, own = work.layout, attend_loops(work)
    rate = min(1 - memory.refreshing, memory.rate / work.ports)
    keys = memory.latency + max(layout.key_words / rate, own.logits.clocks)
    tile = max(
        layout.value_tile_words / rate, *(loop.clocks for loop in (own.weigh, own.limbs, own.multiply_values, own.add))
    )
    values = memory.latency + layout.value_tiles * tile
    softmax = own.keep.cycles + own.soften.cycles + own.invert.cycles
    split = sum(loop.cycles for loop in own.split)
    # The values of the last turn wait until its softmax is done, and nothing else is read meanwhile.
    wait = max(0.0, own.logits.depth + own.keep.depth + own.soften.cycles - memory.latency)
    first = max(0.0, split - memory.latency)
    last = own.weigh.depth + own.limbs.depth + own.multiply_values.depth + own.add.depth
    turns = max(
        # Keys come to the ports while the first queries are split, as many as are asked for.
        max(0.0, first - memory.window / rate) + work.turns * (keys + values) + wait,
        first + keys + work.turns * softmax + values,
        first + (work.turns - 1) * split + keys + values,
    )
    return work.passes * (STREAM_DEPTH + turns + last + work.lanes * own.finish.cycles)
