"""From a product of query and key to its logit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tvm.script import tirx as T

from fastcar_compile.codegen.tvm.kernels.script import inlined
from fastcar_compile.codegen.tvm.kernels.vectors import Expr, exp_not_positive, prefetch, tanh


@dataclass(frozen=True)
class LogitRule:
    """What a product of query and key becomes: times `scale`, and limited softly to `softcap` where there is one."""

    scale: float
    softcap: float | None = None

    def logit(self, product: Any) -> Any:
        """Return the logit of a product."""
        return self.capped(product * T.float32(self.scale))

    def capped(self, scaled: Any) -> Any:
        """Return softcap * tanh(scaled / softcap); without a soft-cap what is scaled."""
        if self.softcap is None:
            return scaled
        return T.float32(self.softcap) * tanh(scaled * T.float32(1 / self.softcap))


# Online softmax over blocks of cached rows: its state, its operands, and the step from logits to weights.
#
# The names are FlashAttention's: running maximum m, normaliser l, accumulator acc.


KEY_BLOCK = 32
"""Rows between two updates of the running maximum. Keys and values of one block stay in the first-level cache."""

PARALLEL_KEYS = 4
"""Keys whose dot products run together: independent sums that hide the latency of multiplications."""

LOWEST = -3.0e38
"""The running maximum before the first row."""


@dataclass(frozen=True)
class State:
    """Per slot: m and l float32 [slots], acc float32 [slots, D]. l and acc are relative to exp(m)."""

    m: Any
    l: Any  # noqa: E741 (the paper's name)
    acc: Any


@dataclass(frozen=True)
class Operands:
    """q float32 [B, Hq, T, D], keys and values [B, Hkv, S, row size], and the state."""

    q: Any
    keys: Any
    values: Any
    state: State


@dataclass(frozen=True)
class Group:
    """Query heads from number `first` on, which share key/value head h: row i of batch row b.

    Their slots begin at `slot`.
    """

    b: Expr
    h: Expr
    first: Expr
    i: Expr
    slot: Expr


@dataclass(frozen=True)
class Rows:
    """The cached rows at(first) .. at(last - 1).

    Attributes:
        first, last: the range.
        at: number of a row in the range -> row of the cache.
        ahead: number of a row in the range -> row of the cache to prefetch while that row is read. None: no prefetch.
    """

    first: Expr
    last: Expr
    at: Callable[[Expr], Expr]
    ahead: Callable[[Expr], Expr] | None


@dataclass(frozen=True)
class Step:
    """Query head g of a group meets the block of `count` rows from number `start` on."""

    group: Group
    rows: Rows
    g: Expr
    start: Expr
    count: Expr

    @property
    def slot(self) -> Expr:
        """The slot of the query head."""
        return self.group.slot + self.g

    def index(self, number: Expr) -> tuple[Expr, Expr, Expr]:
        """Return the cache index of the block's row of that number."""
        return self.group.b, self.group.h, self.rows.at(self.start + number)

    def clamped(self, number: Expr) -> tuple[Expr, Expr, Expr]:
        """Return the same. The last row stands for those past the range."""
        return self.group.b, self.group.h, self.rows.at(T.min(self.start + number, self.rows.last - 1))

    def prefetch(self, cache: Any, row: Expr, element: Expr) -> Expr:
        """Return the prefetch of a line of the row that is read after row `row` of the range; it has one ahead."""
        assert self.rows.ahead is not None
        return prefetch(cache[self.group.b, self.group.h, self.rows.ahead(row), element])

    def four_rows(self, part: Expr) -> list[tuple[Expr, Expr, Expr]]:
        """Return the clamped indices of rows 4 * part .. 4 * part + 3."""
        return [self.clamped(part * PARALLEL_KEYS + r) for r in range(PARALLEL_KEYS)]


M, DECAY, L = 0, 1, 2
"""Elements of `Block.stat`."""


@dataclass(frozen=True)
class Block:
    """Temporaries of a block: weights float32 [KEY_BLOCK] and stat float32 [3].

    weights holds logits, then exp(logit - m), and 0 past the block's rows. stat[M] is the maximum with this block,
    stat[DECAY] is exp(old m - m), which rescales what was summed before, and stat[L] is the normaliser.
    """

    weights: Any
    stat: Any


@dataclass(frozen=True)
class AttendRows:
    """How a query meets cached rows of one type.

    Attributes:
        ahead: the prefetch distance in rows.
        attend: macro (Operands, Group, Rows) that adds the rows to the group's slots.
        place: column of the result -> where it is in a slot's accumulator, for the first of `run` columns in order.
        run: see `place`; divides the head dimension.
    """

    ahead: int
    attend: Callable[..., None]
    place: Callable[[Any], Any]
    run: int


@inlined
def weigh_block(state, slot, count, block):
    """Replace a block's logits by weights, update the running maximum of the slot, and set the block's decay."""
    # The running maximum never falls, so the argument is not positive.
    block.stat[DECAY] = exp_not_positive(state.m[slot] - block.stat[M])
    state.m[slot] = block.stat[M]
    # r: 32 weights, vectorised. A row past the block's end has a copy of a logit or an old one: its weight is 0.
    for r in T.vectorized(KEY_BLOCK):
        block.weights[r] = T.Select(r < count, exp_not_positive(block.weights[r] - block.stat[M]), T.float32(0))
