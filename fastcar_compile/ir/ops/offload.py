"""The calls from a host graph to the accelerator: MLPs, gates, and the linears outside of the MLPs."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from fastcar_compile.errors import BackendError
from fastcar_compile.gates.base import GateInputs
from fastcar_compile.ir.ops.operator import loaded, operator

Accelerator = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(layer, x float32 [B, H], replay bool [B], cached float32 [B, H]) -> float32 [B, H]."""

LinearAccelerator = Callable[[str, Tensor], Tensor]
"""(name of the call, x float32 [B, K]) -> float32 [B, N]."""


@dataclass(frozen=True)
class GateDecision:
    """A decision for one layer: replay bool [B], score float32 [B], chain int32 [B] with this forward counted."""

    replay: Tensor
    score: Tensor
    chain: Tensor


GateUnit = Callable[[int, GateInputs[Tensor], Tensor, int], GateDecision]
"""(layer, what its gate reads, chain int32 [B], step) -> the decision. chain: replays in a row at slot step mod F."""

_bound: ContextVar[Mapping[str, Callable[..., Any]]] = ContextVar("fastcar_accelerator", default={})  # noqa: B039


@contextmanager
def bound(kind: Literal["MLP", "gate", "linear"], unit: Callable[..., Any]) -> Iterator[None]:
    """Let `unit`, an `Accelerator`, a `GateUnit` or a `LinearAccelerator`, compute offloaded operators of this kind."""
    token = _bound.set({**_bound.get(), kind: unit})
    try:
        yield
    finally:
        _bound.reset(token)


def _current(kind: str) -> Callable[..., Any]:
    """Return what is bound for this kind of operator.

    Raises:
        BackendError: nothing is.
    """
    unit = _bound.get().get(kind)
    if unit is None:
        what = f"an offloaded {kind} was reached, but no accelerator is bound"
        raise BackendError(what, hint="run the host graph through session(backend='hls-csim')")
    return unit


@operator("The accelerator computes the MLP of the rows that do not replay.")
def offloaded_mlp(x: Tensor, replay: Tensor, cached: Tensor, layer: int) -> Tensor:
    """Return row b of MLP(x) from the accelerator, or cached[b] where replay[b].

    Args:
        x: float32 [B, H], normalised. replay: bool [B]. cached: float32 [B, H]. layer: index of the decoder layer.

    Returns:
        float32 [B, H].
    """
    return _current("MLP")(layer, x, replay, cached)


def _decision_of(chain: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return three tensors of the counters' shape [B], of three types."""
    return (
        chain.new_empty(chain.shape, dtype=torch.bool),
        chain.new_empty(chain.shape, dtype=torch.float32),
        chain.new_empty(chain.shape),
    )


@operator("The accelerator computes score, limits and decision.", _decision_of)
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
    inputs = GateInputs(None, None, x, cached)
    # A gate over the MLP's input alone reads no query.
    if query is not None and key_cache is not None:
        row = key_cache[:, :, max(int(position) - stride, 0)]
        inputs = GateInputs(query[:, :, 0], loaded(row, query.shape[3]), x, cached)
    decision = _current("gate")(layer, inputs, chain, int(step))
    return decision.replay, decision.score, decision.chain


@operator(
    "The accelerator computes linears that share their input.", lambda x, channels: x.new_empty((x.shape[0], channels))
)
def offloaded_linear(x: Tensor, name: str, channels: int) -> Tensor:
    """Return one linear, or several of the same input with their channels concatenated, from the accelerator.

    Args:
        x: float32 [B, K]. name: of the call, such as `layer_0.qkv`. channels: N, the channels of all linears.

    Returns:
        float32 [B, N].
    """
    return _current("linear")(name, x)
