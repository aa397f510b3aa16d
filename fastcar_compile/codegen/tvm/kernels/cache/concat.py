"""Vectors, one per layer, concatenated and split a few at a time: a kernel of many arguments compiles slowly."""

from __future__ import annotations

from functools import cache
from typing import Any

from tvm import te, topi
from tvm.tirx import PrimFunc

from fastcar_compile.codegen.tvm.kernels import OPAQUE

MAX_ROWS = 8
"""Vectors that one kernel concatenates or splits."""


@cache
def concat_rows(sizes: tuple[int, ...], dtype: str) -> PrimFunc:
    """Return the concatenation of vectors of these sizes."""
    rows = [te.placeholder((size,), dtype, f"row_{i}") for i, size in enumerate(sizes)]
    return _opaque([*rows, topi.concatenate(rows, 0)], "concat_rows")


@cache
def split_rows(count: int, size: int, dtype: str) -> PrimFunc:
    """Return a vector of count * size elements as `count` vectors."""
    whole = te.placeholder((count * size,), dtype, "whole")
    return _opaque([whole, *topi.split(whole, count, 0)], "split_rows")


def _opaque(tensors: list[Any], name: str) -> PrimFunc:
    # Without the mark TVM would fuse several of them into one.
    kernel: Any = te.create_prim_func(tensors).without_attr("global_symbol").with_attr({"op_pattern": OPAQUE})
    kernel.__name__ = name
    return kernel
