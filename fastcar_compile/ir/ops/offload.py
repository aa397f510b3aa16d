"""The call from a host graph to the accelerator that computes the MLPs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from fastcar_compile.errors import BackendError
from fastcar_compile.gates.base import GateInputs
from fastcar_compile.ir.ops.operator import loaded, operator

Accelerator = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(layer, x float32 [B, H], replay bool [B], cached float32 [B, H]) -> float32 [B, H]."""

_accelerator: ContextVar[Accelerator | None] = ContextVar("fastcar_accelerator", default=None)


@contextmanager
def bound_accelerator(accelerator: Accelerator) -> Iterator[None]:
    """Run offloaded MLPs on `accelerator` within this context."""
    token = _accelerator.set(accelerator)
    try:
        yield
    finally:
        _accelerator.reset(token)


def current_accelerator() -> Accelerator:
    """Return the bound accelerator.

    Raises:
        BackendError: no accelerator is bound.
    """
    accelerator = _accelerator.get()
    if accelerator is None:
        raise BackendError(
            "an offloaded MLP was reached, but no accelerator is bound",
            hint="run the host graph through session(backend='hls-csim')",
        )
    return accelerator


@operator("offloaded_mlp", reason="The accelerator computes the MLP of the rows that do not replay.")
def offloaded_mlp(x: Tensor, replay: Tensor, cached: Tensor, layer: int) -> Tensor:
    """Return row b of MLP(x) from the accelerator, or cached[b] where replay[b].

    Args:
        x: float32 [B, H], normalised. replay: bool [B]. cached: float32 [B, H]. layer: index of the decoder layer.

    Returns:
        float32 [B, H].
    """
    return current_accelerator()(layer, x, replay, cached)


@offloaded_mlp.register_fake
def _(x: Tensor, replay: Tensor, cached: Tensor, layer: int) -> Tensor:
    return torch.empty_like(x)


# The call from a host graph to the accelerator's score unit, which decides the replays.


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


# The call from a host graph to the accelerator that computes the linears outside of the MLPs.


LinearAccelerator = Callable[[str, Tensor], Tensor]
"""(name of the call, x float32 [B, K]) -> float32 [B, N]."""

_offload_linear_accelerator: ContextVar[LinearAccelerator | None] = ContextVar(
    "fastcar_linear_accelerator", default=None
)


@contextmanager
def bound_linears(accelerator: LinearAccelerator) -> Iterator[None]:
    """Run offloaded linears on `accelerator` within this context."""
    token = _offload_linear_accelerator.set(accelerator)
    try:
        yield
    finally:
        _offload_linear_accelerator.reset(token)


def current_linears() -> LinearAccelerator:
    """Return the bound accelerator.

    Raises:
        BackendError: no accelerator is bound.
    """
    accelerator = _offload_linear_accelerator.get()
    if accelerator is None:
        raise BackendError(
            "an offloaded linear was reached, but no accelerator is bound",
            hint="run the host graph through session(backend='hls-csim')",
        )
    return accelerator


@operator("offloaded_linear", reason="The accelerator computes linears that share their input.")
def offloaded_linear(x: Tensor, name: str, channels: int) -> Tensor:
    """Return one linear, or several of the same input with their channels concatenated, from the accelerator.

    Args:
        x: float32 [B, K]. name: of the call, such as `layer_0.qkv`. channels: N, the channels of all linears.

    Returns:
        float32 [B, N].
    """
    return current_linears()(name, x)


@offloaded_linear.register_fake
def _(x: Tensor, name: str, channels: int) -> Tensor:
    return x.new_empty((x.shape[0], channels))
