"""One registry entry per element type, quantisation format and KV type: facts that every part of the compiler needs.

The entries hold names and sizes only and import no heavy package, so that the runtime, the command line and the
hardware model read the same facts as the passes and the back ends. docs/extending.md lists the files that add one.
"""

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from fastcar_compile.errors import InputError, InternalError, names_text


@dataclass(frozen=True)
class DType:
    """One element type.

    Args:
        name: name in the manifest; also the attribute of `torch` and of `tvm`.
        safetensors: name in the header of a safetensors file.
        numpy: the numpy type of the same bytes.
    """

    name: str
    safetensors: str
    numpy: np.dtype[Any]

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return self.numpy.itemsize


_FLOATS = {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16"}
_INTEGERS = {"int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8", "uint8": "U8", "bool": "BOOL"}
DTYPES = {n: DType(n, s, np.dtype(getattr(ml_dtypes, n, n))) for n, s in (_FLOATS | _INTEGERS).items()}
"""Name -> element type."""

BY_SAFETENSORS: dict[str, DType] = {dtype.safetensors: dtype for dtype in DTYPES.values()}


def dtype_of(array: np.ndarray[Any, Any]) -> DType:
    """Return the entry of an array's type.

    Raises:
        InternalError: the type is in no table.
    """
    name = array.dtype.name
    if name not in DTYPES:
        raise InternalError(f"no format is registered for arrays of {name}")
    return DTYPES[name]


@dataclass(frozen=True)
class KvType:
    """The layout of one cached row: one key or value of one head.

    `ir/ops/operator.py` defines the values bit for bit. An operator recognises the type by the dtype of the cache, so
    two types never share one.

    Args:
        dtype: element type of the cache tensor, as torch, numpy and TVM name it; also the type's own name.
        bits: bits of one element.
        block: elements that share one exponent byte behind the row (MX formats); 0: the row has no exponents.
    """

    dtype: str
    bits: int
    block: int = 0

    def exponents(self, dim: int) -> int:
        """Return the exponent bytes behind a row of `dim` elements."""
        return -(-dim // self.block) if self.block else 0

    def row_size(self, dim: int) -> int:
        """Return the elements of a cached row for a head of `dim`, exponents included."""
        return dim + self.exponents(dim)

    def row_bytes(self, dim: int) -> int:
        """Return the bytes of a cached row for a head of `dim`."""
        return dim * self.bits // 8 + self.exponents(dim)

    def widened(self, rows: NDArray[Any], dim: int) -> NDArray[np.float32]:
        """Return the float32 [..., dim] that cached rows stand for, exactly, as `ir.ops.operator.loaded` does.

        The exponent -128 becomes the bits of minus infinity; times its mantissas, which are 0, it is a NaN.
        """
        if not self.block:
            return rows.astype(np.float32)
        scales = (rows[..., dim:].astype(np.int32) + 127 << 23).view(np.float32).repeat(self.block, -1)
        with np.errstate(invalid="ignore"):
            return rows[..., :dim] * scales[..., :dim]


_KV_TYPES = (KvType("float32", 32), KvType("float16", 16), KvType("bfloat16", 16), KvType("int8", 8, block=32))
KV_TYPES = {t.dtype: t for t in _KV_TYPES}
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
        raise InputError(f"no KV cache has the type {name!r}", hint=f"use one of: {names_text(KV_TYPES, name)}")
    return KV_TYPES[name]


GROUP = 128
"""Weights along the reduction that share one scale in w4a8."""

ROW_BYTES = 16
"""A memory word: the accelerator pads the weights of one output channel to whole words."""


@dataclass(frozen=True)
class QuantFormat:
    """One value of `compile(quant=…)`; `ir/ops/linear.py` defines the numbers bit for bit.

    Args:
        name: name of the format.
        summary: one line for people.
        weight_bits: bits of one stored weight.
        suffix: end of the name of the attribute that holds the stored weights; empty: weights stay as they are.
        group: weights along the reduction that share a scale; 0: one scale per output channel, if there are scales.
        scale_bytes: bytes of one scale; 0: the format has no scales.
        integer: activations are int8 per row and sums are exact integers.
        accelerated: HLS kernels compute the format.
        tolerance: largest difference between the logits of two back ends. In integer formats a last-bit difference in
            attention may move an activation by one int8 step.
    """

    name: str
    summary: str
    weight_bits: int
    suffix: str = ""
    group: int = 0
    scale_bytes: int = 0
    integer: bool = False
    accelerated: bool = False
    tolerance: float = 1e-3

    def linear_bytes(self, outputs: int, inputs: int) -> int:
        """Return the bytes that one call of a linear reads: weights and scales, padded as in the weight stream."""
        if not self.integer:
            return outputs * inputs * self.weight_bits // 8
        if self.group:
            return outputs * -(-inputs // self.group) * (self.group * self.weight_bits // 8 + self.scale_bytes)
        return outputs * (ROW_BYTES * -(-inputs * self.weight_bits // (8 * ROW_BYTES)) + self.scale_bytes)


_INTEGER: dict[str, Any] = {"integer": True, "accelerated": True, "tolerance": 5e-2}

QUANT_FORMATS = {
    f.name: f
    for f in (
        QuantFormat("none", "float32 weights", 32),
        QuantFormat("bf16", "bfloat16 weights, float32 sums", 16, suffix="bf16"),
        QuantFormat("fp16", "float16 weights, float32 sums", 16, suffix="fp16"),
        QuantFormat("w8a8", "int8 weights per output channel", 8, suffix="int8", scale_bytes=4, **_INTEGER),
        QuantFormat("w4a8", "int4 weights in groups of 128", 4, suffix="int4", group=GROUP, scale_bytes=2, **_INTEGER),
    )
}
"""Value of `compile(quant=…)` -> format."""

ACCELERATED = tuple(f.name for f in QUANT_FORMATS.values() if f.accelerated)
"""Formats with HLS kernels, widest weights first."""


def quant_format(name: str) -> QuantFormat:
    """Return the format of this name.

    Raises:
        InputError: no format has this name.
    """
    if name not in QUANT_FORMATS:
        raise InputError(f"unknown quantisation {name!r}", hint=f"use one of: {names_text(QUANT_FORMATS, name)}")
    return QUANT_FORMATS[name]
