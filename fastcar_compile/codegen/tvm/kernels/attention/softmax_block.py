"""A block of cached rows in online softmax: logits become weights, and what was summed before is corrected."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tvm.script import tirx as T

from fastcar_compile.codegen.tvm.kernels.attention.exponential import exp_not_positive
from fastcar_compile.codegen.tvm.kernels.script import inlined

BLOCK = 32
"""Rows between two corrections of the running maximum; keys and values of one block stay in the first-level cache."""

KEYS = 4
"""Keys whose dot products run together: independent sums that hide the latency of multiplications."""

LOWEST = -3.0e38


@dataclass(frozen=True)
class AttendRows:
    """How a query meets cached rows.

    Attributes:
        ahead: rows by which a caller's `ask` is ahead.
        attend: as `online_softmax.Steps` has it.
        place: of a column of the result in its slot, for the first of `run` consecutive ones.
        run: see `place`; divides the head's dimension.
    """

    ahead: int
    attend: Callable[..., None]
    place: Callable[[Any], Any]
    run: int


@inlined
def weigh(slot, count, tops, weights, stat):
    """The logits weights[0 .. count - 1], whose maximum with tops[slot] is stat[0], become exp(logit - maximum), and
    the rest 0; stat[1] is by what earlier sums must be multiplied."""
    stat[1] = exp_not_positive(tops[slot] - stat[0])
    tops[slot] = stat[0]
    for r in T.vectorized(BLOCK):
        weights[r] = T.Select(r < count, exp_not_positive(weights[r] - stat[0]), T.float32(0))
