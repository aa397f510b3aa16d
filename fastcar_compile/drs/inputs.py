"""What a gate is decided on, and its memory words as a controller reads them (docs/reference/drs_table.md)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from fastcar_compile.drs.gate import pack_heads
from fastcar_compile.drs.scores import pack_row
from fastcar_compile.drs.table import FLOATS_PER_WORD

Array = NDArray[Any]
T = TypeVar("T")


@dataclass(frozen=True)
class GateInputs(Generic[T]):
    """What a gate compares; None: it does not read it.

    Args:
        query: float32 [B, Hq, D]. key: float32 [B, Hkv, D], the cached key one frame earlier.
        x: float32 [B, H], the MLP's input. cached: float32 [B, H], that of the slot's last computed visit.
    """

    query: T | None = None
    key: T | None = None
    x: T | None = None
    cached: T | None = None


def pack_inputs(inputs: GateInputs[Array]) -> tuple[Array, Array]:
    """Return the memory words of the operands `query` and `key`: q or the key of all rows, then x or the cached x."""
    return _words(inputs.query, inputs.x), _words(inputs.key, inputs.cached)


def _words(heads: Array | None, row: Array | None) -> Array:
    parts = [] if heads is None else [pack_heads(heads)]
    parts += [] if row is None else [pack_row(row)]
    return np.concatenate(parts) if parts else np.zeros((0, FLOATS_PER_WORD), np.float32)
