"""The call from a host graph to the accelerator's TAS unit, which decides the replays."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.library import custom_op

from fastcar_compile.errors import BackendError
from fastcar_compile.ops.cached import loaded


@dataclass(frozen=True)
class GateDecision:
    """A decision for one layer: replay bool [B], score float32 [B], chain int32 [B] with this forward counted."""

    replay: Tensor
    score: Tensor
    chain: Tensor


class GateUnit(Protocol):
    """A TAS unit that a session binds."""

    def __call__(self, layer: int, query: Tensor, key: Tensor, chain: Tensor, step: int) -> GateDecision:
        """Decide for one layer.

        Args:
            query: float32 [B, Hq, D]. key: float32 [B, Hkv, D], the cached key one frame earlier.
            chain: int32 [B], replays in a row at slot step mod F. step: decode forward number t.
        """
        ...


_unit: ContextVar[GateUnit | None] = ContextVar("fastcar_gate_unit", default=None)


@contextmanager
def bound_gate_unit(unit: GateUnit) -> Iterator[None]:
    """Let `unit` decide offloaded gates within this context."""
    token = _unit.set(unit)
    try:
        yield
    finally:
        _unit.reset(token)


def decide(
    query: Tensor, key_cache: Tensor, chain: Tensor, position: int, step: int, stride: int, layer: int
) -> GateDecision:
    """Return the bound unit's decision for q and the key row `position - stride` (clamped to 0).

    The arguments are those of `offloaded_gate`.

    Raises:
        BackendError: no unit is bound.
    """
    unit = _unit.get()
    if unit is None:
        raise BackendError(
            "an offloaded gate was reached, but no accelerator is bound",
            hint="run the host graph through session(backend='hls-csim')",
        )
    key = loaded(key_cache[:, :, max(position - stride, 0)], query.shape[3])
    return unit(layer, query[:, :, 0], key, chain, step)


@custom_op("fastcar::offloaded_gate", mutates_args=())
def offloaded_gate(
    query: Tensor, key_cache: Tensor, chain: Tensor, position: Tensor, step: Tensor, stride: int, layer: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the accelerator's decision for one layer. Threshold, chain limit and coupling are in its table.

    Args:
        query: float32 [B, Hq, 1, D]. key_cache: [B, Hkv, S, D] as `stored` defines.
        chain: int32 [B], the counts of this slot.
        position: int64 [1], sequence position of the query. step: int64 [1], decode forward number t.
        stride: tokens per frame F. layer: index of the decoder layer.

    Returns:
        replay bool [B], score float32 [B], chain int32 [B] with this forward counted.
    """
    decision = decide(query, key_cache, chain, int(position), int(step), stride, layer)
    return decision.replay, decision.score, decision.chain


@offloaded_gate.register_fake
def _(
    query: Tensor, key_cache: Tensor, chain: Tensor, position: Tensor, step: Tensor, stride: int, layer: int
) -> tuple[Tensor, Tensor, Tensor]:
    rows = query.new_empty((query.shape[0],))
    return torch.empty_like(rows, dtype=torch.bool), rows, torch.empty_like(chain)
