"""The instruction ATTEND as a network: the processes of fastcar_{attention,value}_processes.hpp with their FIFOs.

A token of a FIFO behind the ports is a word of every port, or what becomes of one: a row of a tile gives several
logits, and the weights of four positions serve several words. So a loop over something else has an interval that is no
whole number of clocks.
"""

from collections.abc import Iterator
from dataclasses import replace

from cycle_model.network import Action, Blocks, Claim, Fifo, Free, Network, Post, Run, Take
from fastcar_compile.codegen.hls.design.loops import STREAM_DEPTH, Loop
from fastcar_compile.codegen.hls.design.step_loops import QUADS, AttendWork, attend_loops
from fastcar_compile.codegen.hls.design.step_usage import VALUE_FIFO_WORDS
from fastcar_compile.codegen.hls.model.engine import EngineMemory

MEMORY = "memory"
SMALL_FIFO = 16
KEY_SUMS, LOGITS, WEIGHTS, LIMBS, VALUE_SUMS, TURNS = 4, 16, 32, 16, 4, 2
"""Entries of the FIFOs (FASTCAR_FIFO in fastcar_step.cpp.j2): sums of a row of keys, logits, weights of four positions,
limbs of sixteen, sums of an element; and turns whose queries wait."""


def attend_network(work: AttendWork, memory: EngineMemory) -> Network:
    """Return the network of a pass of ATTEND; passes follow each other."""
    return _Attention(work, memory).network()


class _Attention:
    def __init__(self, work: AttendWork, memory: EngineMemory) -> None:
        self.work, self.memory = work, memory
        self.loops, self.layout = attend_loops(work), work.layout
        self.tiles, self.block_words = self.layout.value_tiles, work.value_words // work.blocks

    def network(self) -> Network:
        """Return all processes."""
        processes = {
            "read_cache": self._read(),
            "route_cache": self._route(),
            "split_queries": self._split(),
            "multiply_keys": self._multiply_keys(),
            "scale_logits": self._logits(),
            "soften": self._soften(),
            "weigh_values": self._weigh(),
            "split_weights": self._limbs(),
            "multiply_values": self._multiply_values(),
            "add_values": self._add(),
        }
        blocks = {
            "queries": Blocks(TURNS, "split_queries", "multiply_keys"),
            "inverses": Blocks(2 * TURNS, "soften", "add_values"),
        }
        return Network(processes, self._fifos(), blocks, {MEMORY: self.memory})

    def _fifos(self) -> dict[str, Fifo]:
        row = self.layout.blocks * 2  # words of a key on its port
        key, quad = row / self.work.ports, self.block_words / QUADS
        positions = self.tiles * QUADS + SMALL_FIFO
        return {
            "ports": Fifo(SMALL_FIFO, "read_cache", "route_cache"),
            "keys": Fifo(SMALL_FIFO, "route_cache", "multiply_keys"),
            "value exponents": Fifo(SMALL_FIFO, "route_cache", "weigh_values"),
            "values": Fifo(VALUE_FIFO_WORDS, "route_cache", "multiply_values"),
            "key sums": Fifo(KEY_SUMS * row, "multiply_keys", "scale_logits"),
            "logits": Fifo(_at_least(LOGITS * key), "scale_logits", "soften"),
            "numerators": Fifo(_at_least(positions * quad), "soften", "weigh_values"),
            "weights": Fifo(_at_least(WEIGHTS * quad), "weigh_values", "split_weights"),
            "limbs": Fifo(_at_least(LIMBS * 4 * quad), "split_weights", "multiply_values"),
            "value sums": Fifo(VALUE_SUMS * 2, "multiply_values", "add_values"),
        }

    def _read(self) -> Iterator[Action]:
        ports, latency = self.work.ports, self.memory.latency
        for turn in range(self.work.turns + 1):
            if turn < self.work.turns:
                yield Run("keys", self.layout.key_words, 1, latency, (), ("ports",), MEMORY, ports)
            if turn > 0:
                yield Run("values", self.layout.value_words, 1, latency, (), ("ports",), MEMORY, ports)

    def _route(self) -> Iterator[Action]:
        head, reads = self.layout.value_head_words, ("ports",)
        for turn in range(self.work.turns + 1):
            if turn < self.work.turns:
                yield Run("keys", self.layout.key_words, 1, STREAM_DEPTH, reads, ("keys",), flat=True)
            for _tile in range(self.tiles if turn > 0 else 0):
                yield Run("exponents", head, 1, STREAM_DEPTH, reads, ("value exponents",), flat=True)
                yield Run("values", self.work.value_words, 1, STREAM_DEPTH, reads, ("values",), flat=True)

    def _split(self) -> Iterator[Action]:
        for _turn in range(self.work.turns):
            yield Claim("queries")
            yield from (_run(loop) for loop in self.loops.split)
            yield Post("queries")

    def _multiply_keys(self) -> Iterator[Action]:
        for _turn in range(self.work.turns):
            yield Take("queries")
            yield Free("queries")
            yield _run(self.loops.multiply_keys, self.layout.key_words, ("keys",), ("key sums",))

    def _logits(self) -> Iterator[Action]:
        for _turn in range(self.work.turns):
            yield _run(self.loops.logits, self.layout.key_words, ("key sums",), ("logits",))

    def _soften(self) -> Iterator[Action]:
        for _turn in range(self.work.turns):
            yield _run(self.loops.keep, self.layout.key_words, ("logits",))
            yield _run(self.loops.soften, self.tiles * self.block_words, (), ("numerators",))
            yield Claim("inverses")
            yield _run(self.loops.invert)
            yield Post("inverses")

    def _weigh(self) -> Iterator[Action]:
        loop, head = self.loops.weigh, self.layout.value_head_words
        words, pace = self.block_words, loop.interval * QUADS / self.block_words
        latency = loop.depth + 1 + QUADS  # a block's exponent is known when its last positions are
        for _tile in range(self.work.turns * self.tiles):
            yield Run(loop.label, head, loop.interval, latency, ("value exponents",), flat=True)
            yield Run(loop.label, words, pace, latency, ("numerators",), ("weights",), flat=True)
            if self.work.blocks > 1:
                yield Run(loop.label, (self.work.blocks - 1) * words, pace, latency, (), ("weights",), flat=True)

    def _limbs(self) -> Iterator[Action]:
        words, fifos = self.tiles * self.work.value_words, (("weights",), ("limbs",))
        for _turn in range(self.work.turns):
            yield replace(_run(self.loops.limbs, words, *fifos, times=self.tiles), flat=True)

    def _multiply_values(self) -> Iterator[Action]:
        reads = ("values", "limbs")
        for _turn in range(self.work.turns):
            words = self.tiles * self.work.value_words
            yield _run(self.loops.multiply_values, words, reads, ("value sums",), times=self.tiles)

    def _add(self) -> Iterator[Action]:
        for _turn in range(self.work.turns):
            yield _run(self.loops.add, self.tiles * self.work.value_words, ("value sums",), times=self.tiles)
            yield Take("inverses")
            for _head in range(self.work.lanes):
                yield _run(self.loops.finish)
            yield Free("inverses")


def _run(
    loop: Loop, tokens: int = 0, reads: tuple[str, ...] = (), writes: tuple[str, ...] = (), *, times: int = 1
) -> Run:
    """Return a loop of the table, `times` times, as so many tokens; 0: as its iterations."""
    count = tokens or loop.trips * times
    return Run(loop.label, count, loop.interval * loop.trips * times / count, loop.depth + 1, reads, writes)


def _at_least(tokens: float) -> int:
    return max(1, int(tokens))
