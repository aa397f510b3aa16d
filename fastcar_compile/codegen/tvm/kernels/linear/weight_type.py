"""How a kernel reads a float weight."""

from __future__ import annotations

from typing import Any, Literal

from tvm.script import tirx as T

WeightType = Literal["float32", "bfloat16"]


def widen_weight(value: Any, dtype: WeightType) -> Any:
    """Return a loaded weight as float32. The bits of a bfloat16 are the upper half of those of the same float32."""
    if dtype == "float32":
        return value
    return T.reinterpret("float32", T.shift_left(T.Cast("uint32", T.reinterpret("uint16", value)), T.uint32(16)))
