"""The call from a host graph to the accelerator that computes the MLPs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

from fastcar_compile.errors import BackendError
from fastcar_compile.ops.operator import operator

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
