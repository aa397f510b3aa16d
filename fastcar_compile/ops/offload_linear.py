"""The call from a host graph to the accelerator that computes the linears outside of the MLPs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from torch import Tensor

from fastcar_compile.errors import BackendError
from fastcar_compile.ops.operator import operator

LinearAccelerator = Callable[[str, Tensor], Tensor]
"""(name of the call, x float32 [B, K]) -> float32 [B, N]."""

_accelerator: ContextVar[LinearAccelerator | None] = ContextVar("fastcar_linear_accelerator", default=None)


@contextmanager
def bound_linears(accelerator: LinearAccelerator) -> Iterator[None]:
    """Run offloaded linears on `accelerator` within this context."""
    token = _accelerator.set(accelerator)
    try:
        yield
    finally:
        _accelerator.reset(token)


def current_linears() -> LinearAccelerator:
    """Return the bound accelerator.

    Raises:
        BackendError: no accelerator is bound.
    """
    accelerator = _accelerator.get()
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
