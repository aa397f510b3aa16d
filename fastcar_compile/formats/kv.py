"""KV types: what a cache stores of keys and values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastcar_compile.errors import InputError


@dataclass(frozen=True)
class KvType:
    """The layout of one cached row: one key or value of one head.

    `ops/cached.py` defines the values bit for bit. An operator recognises the type by the dtype of the cache, so two
    types never share one.

    Args:
        dtype: of the cache tensor, as torch, numpy and TVM name it; also the type's own name.
        bits: of one element.
        block: elements that share one exponent byte behind the row (MX formats); 0: the row has no exponents.
    """

    dtype: str
    bits: int
    block: int = 0

    def exponents(self, dim: int) -> int:
        """Return the exponent bytes behind a row of `dim` elements."""
        return -(-dim // self.block) if self.block else 0

    def row_size(self, dim: int) -> int:
        """Return the elements of a cached row for a head of `dim`."""
        return dim + self.exponents(dim)

    def head_dim(self, row: int) -> int:
        """Return the head dimension of a cached row of `row` elements; the inverse of `row_size`."""
        return row - -(-row // (self.block + 1)) if self.block else row

    def row_bytes(self, dim: int) -> int:
        """Return the bytes of a cached row for a head of `dim`."""
        return dim * self.bits // 8 + self.exponents(dim)

    def widened(self, rows: NDArray[Any], dim: int) -> NDArray[np.float32]:
        """Return the float32 [..., dim] that cached rows stand for, exactly, as `ops.cached.loaded` does.

        The exponent -128 becomes the bits of minus infinity; times its mantissas, which are 0, it is a NaN.
        """
        if not self.block:
            return rows.astype(np.float32)
        scales = (rows[..., dim:].astype(np.int32) + 127 << 23).view(np.float32).repeat(self.block, -1)
        with np.errstate(invalid="ignore"):
            return rows[..., :dim] * scales[..., :dim]


KV_TYPES = {t.dtype: t for t in (KvType("float32", 32), KvType("float16", 16), KvType("int8", 8, block=32))}
"""Value of `compile(kv=…)` -> KV type; int8 is MXINT8 of OCP's Microscaling Formats 1.0, its exponent as int8."""


def kv_type(dtype: object) -> KvType:
    """Return the KV type of a cache.

    Args:
        dtype: its dtype, as text or as a torch or numpy dtype.

    Raises:
        InputError: no KV type is stored in this dtype.
    """
    name = str(dtype).removeprefix("torch.")
    if name not in KV_TYPES:
        raise InputError(f"no KV cache has the type {name!r}", hint=f"use one of: {', '.join(KV_TYPES)}")
    return KV_TYPES[name]
