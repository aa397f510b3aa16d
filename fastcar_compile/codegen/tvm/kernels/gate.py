"""Scores of the gates beside `tas`: float32 [B], of exact sums as ops/gates.py defines them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tvm import tirx
from tvm.script import tirx as T
from tvm.tirx import PrimFunc

from fastcar_compile.codegen.tvm.kernels import script, tas
from fastcar_compile.codegen.tvm.kernels.cache import number_of, slot_of
from fastcar_compile.codegen.tvm.kernels.tas import finite_or_nan
from fastcar_compile.codegen.tvm.kernels.vectors import magnitude_bits, ramp, vector_lanes
from fastcar_compile.gates.scores import HASH_BITS, HASH_FACTORS, HASH_PRIME, HASH_ROUNDS
from fastcar_compile.ir.types import INACTIVE


@script.kernel
def input_delta(rows: int, width: int) -> PrimFunc:
    """Return ||x - cached|| / ||x|| of every row in the 1-norm, x and cached float32 [B, H], bit for bit."""
    lanes = vector_lanes(width)

    @script.inlined
    def add_vector(x, cached, i, c, change, sums, largest):
        change[ramp(0, lanes)] = T.fabs(x[i, ramp(c * lanes, lanes)] - cached[i, ramp(c * lanes, lanes)])
        largest[ramp(0, lanes)] = T.max(largest[ramp(0, lanes)], magnitude_bits(change[ramp(0, lanes)], lanes))
        sums[ramp(0, lanes)] += tas.fixed_magnitude(change[ramp(0, lanes)], lanes)
        sums[ramp(lanes, lanes)] += tas.fixed_magnitude(T.fabs(x[i, ramp(c * lanes, lanes)]), lanes)

    @script.prim_func(private=True, s_tir=True)
    def relative_change(
        x: T.Buffer((rows, width), "float32"),
        cached: T.Buffer((rows, width), "float32"),
        y: T.Buffer((rows,), "float32"),
    ):
        for i in range(rows):
            with T.sblock("row"):
                script.access([x, cached], [y])
                change = T.alloc_buffer((lanes,), "float32")
                largest = T.alloc_buffer((lanes,), "int32")
                sums = T.alloc_buffer((2 * lanes,), "int64")  # of the changes, and of x
                for v in T.vectorized(lanes):
                    largest[v] = 0
                for v in T.vectorized(2 * lanes):
                    sums[v] = T.int64(0)
                # c: vectors of the row. The maxima and both sums stay in registers.
                for c in range(width // lanes):
                    add_vector(x, cached, i, c, change, sums, largest)
                # Integer sums and maxima are exact, so the order of the lanes is free.
                for v in T.unroll(lanes - 1):
                    sums[0] += sums[v + 1]
                    sums[lanes] += sums[lanes + v + 1]
                    largest[0] = T.max(largest[0], largest[v + 1])
                # A row of zeros is divided by 1 and not by 0.
                size: T.let = T.max(T.Cast("float32", sums[lanes]), T.float32(1))
                y[i] = finite_or_nan(largest[0], T.Cast("float32", sums[0]) / size)

    return relative_change


@script.inlined
def _hash_round(x, p, added, _number):
    """Write x[0]^5 + added modulo p to x[0]."""
    # p is below 2^31, so the product of two residues fits int64.
    x[1] = x[0] * x[0] % p
    x[0] = (x[1] * x[1] % p * x[0] + T.int64(added)) % p


@script.kernel
def random_score(rows: int, layer: int, share: int = 0) -> PrimFunc:
    """Return the hash of (step, layer, row) as a number in (0, 1], by the integer steps of `ops.gates.random_score`.

    With `share` every row has a step of its own, and `share` neighbours are hashed as one row: they are of one video.
    """
    steps = rows if share else 1
    among = share or 1
    by_step, by_row, by_layer = HASH_FACTORS
    offset = (layer + 1) * by_layer
    low_bits = 2 ** (31 - HASH_BITS)

    @script.prim_func(private=True, s_tir=True)
    def hashed_score(step: T.Buffer((steps,), "int64"), y: T.Buffer((rows,), "float32")):
        for i in range(rows):
            with T.sblock("row"):
                script.access([step], [y])
                x = T.alloc_buffer((2,), "int64")
                p: T.let = T.int64(HASH_PRIME)
                row: T.let = (T.Cast("int64", i // among) + T.int64(1)) * T.int64(by_row)
                forward: T.let = T.max(number_of(step, i) + T.int64(1), T.int64(0))
                x[0] = (forward * T.int64(by_step) + row + T.int64(offset)) % p
                script.each(_hash_round, HASH_ROUNDS, x, p)
                # The upper 24 of 31 bits, plus 1: from 1 to 2^24, exact in float32.
                y[i] = T.Cast("float32", x[0] // T.int64(low_bits) + T.int64(1)) * T.float32(2.0**-HASH_BITS)

    return hashed_score


@dataclass(frozen=True)
class GateRules:
    """When a row replays: from step `stride` on, where its score passes the threshold, the frame is no refresh and its
    chain is below `max_chain` (negative: no limit).

    Args:
        couple: rows i and i + B/2 replay only together. at_most: scores up to the threshold pass, else from it on.
    """

    stride: int
    max_chain: int
    couple: bool
    refresh_every: int = 0
    at_most: bool = False

    @classmethod
    def of(cls, call: Any) -> "GateRules":
        """Return those of a call of the operator `gate`."""
        names = ("stride", "max_chain", "couple_cfg", "refresh_every", "at_most")
        return cls(*(call[name] for name in names))

    def pair(self, i: Any, batch: int) -> Any:
        """Return the row that replays together with row i: itself, without `couple`."""
        return (i + (batch // 2 if self.couple else 0)) % batch

    def signed(self, number: Any) -> Any:
        """Return a score or threshold with the sign that turns "at most" into "at least"."""
        return number * T.float32(-1.0 if self.at_most else 1.0)

    def hold(self, now: Any, scores: Sequence[Any], least: Sequence[Any], chains: Sequence[Any]) -> Any:
        """Return whether step `now` replays a row; scores, signed thresholds and counters: its own and its pair's."""
        found = [now >= self.stride]
        if self.refresh_every > 0:  # a frame is `stride` steps, and every so many are computed whole
            found.append(now // self.stride % self.refresh_every != 0)
        # A NaN fails the comparison, so its row is computed.
        found += [self.signed(score) >= limit for score, limit in zip(scores, least, strict=True)]
        if self.max_chain >= 0:
            found.append(tirx.all(*(chain < self.max_chain for chain in chains)))
        return tirx.all(*found)


@script.kernel
def gate(
    batch: int, slots: int, rules: GateRules, steps: tuple[int, int] | None = None, counts: bool = False
) -> PrimFunc:
    """Return bool [B]: whether a row replays, by the rules.

    Args:
        steps: (videos, steps); None: a row of each video, and one step.
        counts: write the chain counters of this step, in place: one more, or 0 for rows that do not replay.
    """
    videos, count = steps or (batch, 1)
    share = batch // videos

    @script.prim_func(private=True, s_tir=True)
    def decide(
        chain: T.Buffer((slots, videos), "int32"),
        score: T.Buffer((batch,), "float32"),
        threshold: T.Buffer((count,), "float32"),
        step: T.Buffer((count,), "int64"),
        y: T.Buffer((batch,), "bool"),
    ):
        for i in range(batch):
            with T.sblock("row"):
                script.access([score, threshold, step, chain], [y])
                now: T.let = T.Cast("int32", number_of(step, i))
                pair: T.let = rules.pair(i, batch)
                least: T.let = rules.signed(number_of(threshold, i))
                other: T.let = rules.signed(number_of(threshold, pair))
                own, its = T.meta_var((slot_of(slots, share, step, (i,)), slot_of(slots, share, step, (pair,))))
                # A row that is not there takes no part in the launch: the rows beside it decide whether the MLP runs.
                y[i] = (count > 1 and now == INACTIVE) or rules.hold(
                    now, (score[i], score[pair]), (least, other), (chain[own], chain[its])
                )
        # A second loop: a row reads its pair's counter before it changes.
        if counts:
            for i in range(batch):
                with T.sblock("count"):
                    script.access([y, step, chain], [chain])
                    # The counter is the number of replays in succession: a computed row begins again at 0.
                    if count == 1 or number_of(step, i) >= 0:
                        at = T.meta_var(slot_of(slots, share, step, (i,)))
                        chain[at] = T.if_then_else(y[i], chain[at] + 1, 0)

    return decide
