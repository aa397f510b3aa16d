"""The replay gate: which rows replay."""

# The annotations of a T.prim_func are calls, which TVMScript evaluates.
# pyright: reportInvalidTypeForm=false

from __future__ import annotations

from typing import Any

from tvm.script import tirx as T
from tvm.tirx import PrimFunc

from fastcar_compile.codegen.tvm.kernels import OPAQUE, script
from fastcar_compile.codegen.tvm.kernels.script import inlined, kernel


def _decide_row(
    batch: int, slots: int, stride: int, max_chain: int, couple: bool, refresh_every: int, at_most: bool
) -> Any:
    """Return the macro (score, threshold, step, chain, y, i): y[i] is whether row i replays."""
    half = batch // 2 if couple else 0
    limited = 1 if max_chain >= 0 else 0
    period = max(refresh_every, 1)
    refreshed = 1 if refresh_every > 0 else 0
    sign = -1.0 if at_most else 1.0

    @inlined
    def decide_row(score, threshold, step, chain, y, i):
        now: T.let = T.Cast("int32", step[0])
        slot: T.let = now % slots
        # Without `couple`, half is 0 and a row is its own pair.
        pair: T.let = (i + half) % batch
        # The sign turns "at most" into "at least". A NaN fails the comparison, so its row is computed.
        least: T.let = threshold[0] * T.float32(sign)
        y[i] = (
            (now >= stride)
            # A frame is `stride` steps, and every `period`-th frame is computed whole.
            and (refreshed == 0 or now // stride % period != 0)
            and (score[i] * T.float32(sign) >= least)
            and (score[pair] * T.float32(sign) >= least)
            and (limited == 0 or (chain[slot, i] < max_chain and chain[slot, pair] < max_chain))
        )

    return decide_row


@kernel
def gate(
    batch: int, slots: int, stride: int, max_chain: int, couple: bool, refresh_every: int = 0, at_most: bool = False
) -> PrimFunc:
    """Return bool [B]: whether a row replays.

    It does from step `stride` on, where its score passes the threshold, the frame is no refresh and its chain is below
    `max_chain` (negative: no limit). With `couple`, rows i and i + B/2 replay only together. With `at_most`,
    scores up to the threshold pass, else scores from the threshold on.
    """
    decide_row = _decide_row(batch, slots, stride, max_chain, couple, refresh_every, at_most)

    @script.prim_func(private=True, s_tir=True)
    def decide(
        score: T.Buffer((batch,), "float32"),
        threshold: T.Buffer((1,), "float32"),
        step: T.Buffer((1,), "int64"),
        chain: T.Buffer((slots, batch), "int32"),
        y: T.Buffer((batch,), "bool"),
    ):
        T.func_attr({"op_pattern": OPAQUE})
        for i in range(batch):
            with T.sblock("row"):
                T.reads(score[0:batch], threshold[0:1], step[0:1], chain[0:slots, 0:batch])
                T.writes(y[0:batch])
                decide_row(score, threshold, step, chain, y, i)

    return decide


@kernel
def gate_and_count(
    batch: int, slots: int, stride: int, max_chain: int, couple: bool, refresh_every: int = 0, at_most: bool = False
) -> PrimFunc:
    """Return what `gate` does, and write the chain counters of this step, in place: one more, or 0 for other rows.

    Its first argument is the counters.
    """
    decide_row = _decide_row(batch, slots, stride, max_chain, couple, refresh_every, at_most)

    @script.prim_func(private=True, s_tir=True)
    def decide_and_count(
        chain: T.Buffer((slots, batch), "int32"),
        score: T.Buffer((batch,), "float32"),
        threshold: T.Buffer((1,), "float32"),
        step: T.Buffer((1,), "int64"),
        y: T.Buffer((batch,), "bool"),
    ):
        T.func_attr({"op_pattern": OPAQUE})
        for i in range(batch):
            with T.sblock("row"):
                T.reads(score[0:batch], threshold[0:1], step[0:1], chain[0:slots, 0:batch])
                T.writes(y[0:batch])
                decide_row(score, threshold, step, chain, y, i)
        # A second loop: a row reads its pair's counter before it changes.
        for i in range(batch):
            with T.sblock("count"):
                T.reads(y[0:batch], step[0:1], chain[0:slots, 0:batch])
                T.writes(chain[0:slots, 0:batch])
                # The counter is the number of replays in succession: a computed row begins again at 0.
                slot: T.let = T.Cast("int32", step[0]) % slots
                chain[slot, i] = T.if_then_else(y[i], chain[slot, i] + 1, 0)

    return decide_and_count
