"""The call from a host graph to the accelerator's score unit, which decides the replays."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from fastcar_compile.drs.inputs import GateInputs
from fastcar_compile.errors import BackendError
from fastcar_compile.ops.cached import loaded
from fastcar_compile.ops.operator import operator


@dataclass(frozen=True)
class GateDecision:
    """A decision for one layer: replay bool [B], score float32 [B], chain int32 [B] with this forward counted."""

    replay: Tensor
    score: Tensor
    chain: Tensor


class GateUnit(Protocol):
    """A score unit that a session binds."""

    def __call__(self, layer: int, inputs: GateInputs[Tensor], chain: Tensor, step: int) -> GateDecision:
        """Decide for one layer.

        Args:
            inputs: what the layer's gate reads.
            chain: int32 [B], replays in a row at slot step mod F. step: decode forward number t.
        """
        ...


@dataclass(frozen=True)
class GateCall:
    """The tensor arguments of `offloaded_gate`, and its constants."""

    query: Tensor | None
    key_cache: Tensor | None
    x: Tensor | None
    cached: Tensor | None
    chain: Tensor
    position: int
    step: int
    stride: int
    layer: int

    @property
    def inputs(self) -> GateInputs[Tensor]:
        """What the gate reads: of the key cache the row `position - stride`, clamped to 0."""
        # A gate over the MLP's input alone reads no query.
        if self.query is None or self.key_cache is None:
            return GateInputs(None, None, self.x, self.cached)
        row = self.key_cache[:, :, max(self.position - self.stride, 0)]
        return GateInputs(self.query[:, :, 0], loaded(row, self.query.shape[3]), self.x, self.cached)


_unit: ContextVar[GateUnit | None] = ContextVar("fastcar_gate_unit", default=None)


@contextmanager
def bound_gate_unit(unit: GateUnit) -> Iterator[None]:
    """Let `unit` decide offloaded gates within this context."""
    token = _unit.set(unit)
    try:
        yield
    finally:
        _unit.reset(token)


def decide(call: GateCall) -> GateDecision:
    """Return the bound unit's decision.

    Raises:
        BackendError: no unit is bound.
    """
    unit = _unit.get()
    if unit is None:
        raise BackendError(
            "an offloaded gate was reached, but no accelerator is bound",
            hint="run the host graph through session(backend='hls-csim')",
        )
    return unit(call.layer, call.inputs, call.chain, call.step)


@operator("offloaded_gate", reason="The accelerator computes score, limits and decision.")
def offloaded_gate(
    query: Tensor | None,
    key_cache: Tensor | None,
    x: Tensor | None,
    cached: Tensor | None,
    chain: Tensor,
    position: Tensor,
    step: Tensor,
    stride: int,
    layer: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the accelerator's decision for one layer. Threshold, chain limit, refresh and coupling are in its table.

    Args:
        query: float32 [B, Hq, 1, D]. key_cache: [B, Hkv, S, D] as `stored` defines. None: the gate compares no query.
        x: float32 [B, H], the MLP's input. cached: that of the slot's last computed visit. None: neither is read.
        chain: int32 [B], the counts of this slot.
        position: int64 [1], row of the key cache that the query belongs to. step: int64 [1], decode forward number t.
        stride: rows from the earlier key to that one. layer: index of the decoder layer.

    Returns:
        replay bool [B], score float32 [B], chain int32 [B] with this forward counted.
    """
    call = GateCall(query, key_cache, x, cached, chain, int(position), int(step), stride, layer)
    decision = decide(call)
    return decision.replay, decision.score, decision.chain


@offloaded_gate.register_fake
def _(
    query: Tensor | None,
    key_cache: Tensor | None,
    x: Tensor | None,
    cached: Tensor | None,
    chain: Tensor,
    position: Tensor,
    step: Tensor,
    stride: int,
    layer: int,
) -> tuple[Tensor, Tensor, Tensor]:
    # Three tensors of the counters' shape [B], of three types.
    rows = chain.new_empty(chain.shape)
    return torch.empty_like(rows, dtype=torch.bool), torch.empty_like(rows, dtype=torch.float32), rows
