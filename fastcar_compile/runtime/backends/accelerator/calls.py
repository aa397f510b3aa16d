"""The packed functions that the offload program of a library calls, bound to the session that is stepping."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

from numpy.typing import NDArray

from fastcar_compile.artifact.offload import GATE_FUNCTION, LINEAR_FUNCTION, MLP_FUNCTION
from fastcar_compile.drs.inputs import GateInputs
from fastcar_compile.errors import BackendError
from fastcar_compile.formats import kv_type
from fastcar_compile.runtime.tvm_runtime import as_array, fill, register

Array = NDArray[Any]


class Offloaded(Protocol):
    """What runs offloaded gates, MLPs and linears."""

    def gate(self, layer: int, inputs: GateInputs[Array], chain: Array) -> tuple[Array, Array, Array]:
        """Return replay bool [B], score float32 [B] and chain int32 [B] of one layer.

        Args:
            inputs: what the layer's gate reads. chain: int32 [B], replays in a row at this slot.
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
    """Bind offload programs to `backend` within this context."""
    token = _current.set(backend)
    try:
        yield
    finally:
        _current.reset(token)


def _backend() -> Offloaded:
    backend = _current.get()
    if backend is None:
        raise BackendError("an offload program runs outside of its session", hint="open it with session(backend=…)")
    return backend


def _offloaded_mlp(x: Any, replay: Any, cached: Any, layer: int, out: Any) -> None:
    fill(out, _backend().mlp(layer, as_array(x), as_array(replay), as_array(cached)))


def _offloaded_gate(query: Any, keys: Any, x: Any, cached: Any, chain: Any, *rest: Any) -> None:
    """Decide one layer; the unit gets the key row `position - stride` (clamped to 0), the cache is not copied."""
    position, _step, stride, layer, *results = rest
    own, key = (None, None) if _absent(query) else _earlier(query, keys, int(as_array(position)[0]) - stride)
    inputs = GateInputs(own, key, *(None if _absent(value) else as_array(value) for value in (x, cached)))
    decision = _backend().gate(layer, inputs, as_array(chain))
    for result, value in zip(results, decision, strict=True):
        fill(result, value)


def _absent(operand: Any) -> bool:
    """Return whether the gate does not read an operand: it is the integer 0 then."""
    return isinstance(operand, int)


def _earlier(query: Any, keys: Any, row: int) -> tuple[Array, Array]:
    """Return q [B, Hq, D] and one row of the key cache [B, Hkv, D], both float32."""
    # The first frame has no earlier key. Row 0 stands in, and its score is ignored: every row computes there.
    own, key = as_array(query), as_array(keys)[:, :, max(row, 0)]
    return own[:, :, 0], kv_type(key.dtype).widened(key, own.shape[3])


def _offloaded_linear(x: Any, name: Any, out: Any) -> None:
    fill(out, _backend().linear(str(name), as_array(x)))


def register_functions() -> None:
    """Register the packed functions that offload programs call. TVM looks for them when it loads the library."""
    register(MLP_FUNCTION, _offloaded_mlp)
    register(GATE_FUNCTION, _offloaded_gate)
    register(LINEAR_FUNCTION, _offloaded_linear)
