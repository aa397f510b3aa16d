"""The packed functions that an offload library calls, bound to the session that is stepping."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

from numpy.typing import NDArray

from fastcar_compile.artifact.offload import GATE_FUNCTION, LINEAR_FUNCTION, MLP_FUNCTION
from fastcar_compile.errors import BackendError
from fastcar_compile.formats import kv_type
from fastcar_compile.runtime.tvm_runtime import as_array, fill, register

Array = NDArray[Any]


class Offloaded(Protocol):
    """What runs offloaded gates, MLPs and linears."""

    def gate(self, layer: int, query: Array, key: Array, chain: Array) -> tuple[Array, Array, Array]:
        """Return replay bool [B], score float32 [B] and chain int32 [B] of one layer.

        Args:
            query: float32 [B, Hq, D]. key: float32 [B, Hkv, D], the cached key one frame earlier.
            chain: int32 [B], replays in a row at this slot.
        """
        ...

    def mlp(self, layer: int, x: Array, replay: Array, cached: Array) -> Array:
        """Return float32 [B, H]: row b of MLP(x), or cached[b] where replay[b]."""
        ...

    def linear(self, name: str, x: Array) -> Array:
        """Return float32 [B, N] of x float32 [B, K] through the linears of call `name`."""
        ...


_current: ContextVar[Offloaded | None] = ContextVar("fastcar_accelerator_backend", default=None)
"""What the running library is bound to: TVM's functions are global, sessions are not."""


@contextmanager
def stepping(backend: Offloaded) -> Generator[None]:
    """Bind offload libraries to `backend` within this context."""
    token = _current.set(backend)
    try:
        yield
    finally:
        _current.reset(token)


def _backend() -> Offloaded:
    backend = _current.get()
    if backend is None:
        raise BackendError("an offload library runs outside of its session", hint="open it with session(backend=…)")
    return backend


def _offloaded_mlp(x: Any, replay: Any, cached: Any, layer: int, out: Any) -> None:
    fill(out, _backend().mlp(layer, as_array(x), as_array(replay), as_array(cached)))


def _offloaded_gate(
    query: Any, keys: Any, chain: Any, position: Any, _step: Any, stride: int, layer: int, *results: Any
) -> None:
    """Decide one layer; the unit gets the key row `position - stride` (clamped to 0), the cache is not copied."""
    q = as_array(query)
    row = as_array(keys)[:, :, max(int(as_array(position)[0]) - stride, 0)]
    key = kv_type(row.dtype).widened(row, q.shape[3])
    decision = _backend().gate(layer, q[:, :, 0], key, as_array(chain))
    for result, value in zip(results, decision, strict=True):
        fill(result, value)


def _offloaded_linear(x: Any, name: Any, out: Any) -> None:
    fill(out, _backend().linear(str(name), as_array(x)))


def register_functions() -> None:
    """Register the packed functions that offload libraries call."""
    register(MLP_FUNCTION, _offloaded_mlp)
    register(GATE_FUNCTION, _offloaded_gate)
    register(LINEAR_FUNCTION, _offloaded_linear)
