"""PyTorch's own operators where TVM's converter is missing, unsafe or slow."""

from __future__ import annotations

import math

import torch
from tvm import relax

from fastcar_compile.codegen.tvm.call import Call, Value
from fastcar_compile.codegen.tvm.converters.registry import converts
from fastcar_compile.codegen.tvm.kernels.cache.concat import MAX_ROWS, concat_rows, split_rows
from fastcar_compile.codegen.tvm.relax_api import broadcast

aten = torch.ops.aten


@converts(aten.all.default)
def _all(call: Call) -> Value:
    """Emit `all` of a bool vector as the minimum over int8: TVM has no converter for it. One element is a view."""
    x = call.tensor("self")
    # At batch 1 the one decision is its own conjunction.
    if math.prod(x.shape) == 1:
        return call.reshape(x.value, ())
    smallest = relax.op.min(relax.op.astype(call.tensor("self").value, "int8"))
    return call.emit(relax.op.astype(call.emit(smallest), "bool"))


@converts(aten.transpose.int)
def _transpose(call: Call) -> Value:
    """Emit a view where no element moves: at most one axis from the first to the last is longer than 1."""
    x = call.tensor("self")
    first, last = sorted(call.integer(name) % len(x.shape) for name in ("dim0", "dim1"))
    if sum(n > 1 for n in x.shape[first : last + 1]) <= 1:
        return call.reshape(x.value, call.shape)
    axes = list(range(len(x.shape)))
    axes[first], axes[last] = last, first
    return call.emit(relax.op.permute_dims(x.value, axes))


@converts(aten.embedding.default)
def _embedding(call: Call) -> Value:
    """Emit a clipping lookup: TVM's own reads out of bounds for an id outside the vocabulary."""
    return call.emit(relax.op.take(*call.values("weight", "indices"), axis=0, mode="clip"))


@converts(aten.full.default)
def _full(call: Call) -> Value:
    """Emit a constant, spread over the shape, for infinities: TVM's own fails for them."""
    value = call.number("fill_value")
    if not math.isinf(value):
        return call.stock()
    return call.emit(broadcast(relax.const(value, call.dtype), call.shape))


@converts(aten.masked_fill.Scalar)
def _masked_fill(call: Call) -> Value:
    """Emit a choice for infinities, for the same reason."""
    value = call.number("value")
    if not math.isinf(value):
        return call.stock()
    filling = relax.const(value, call.dtype)
    return call.emit(relax.op.where(call.tensor("mask").value, filling, call.tensor("self").value))


@converts(aten.select.int)
def _select(call: Call) -> Value:
    """Emit a clipping lookup, as for the embedding: TVM's own does not check the index."""
    index = relax.const(call.integer("index"), "int64")
    return call.emit(relax.op.take(call.tensor("self").value, index, axis=call.integer("dim"), mode="clip"))


@converts(aten.index.Tensor)
def _index(call: Call) -> Value:
    """Emit a clipping lookup for one index of int64, such as rows by position; else TVM's own."""
    x, given = call.tensor("self"), call.optionals("indices")
    axes = [axis for axis, index in enumerate(given) if index is not None]
    index = given[axes[0]] if len(axes) == 1 else None
    if index is None or index.dtype != "int64":
        return call.stock()
    return call.emit(relax.op.take(x.value, index.value, axis=axes[0], mode="clip"))


@converts(aten.cat.default)
def _cat(call: Call) -> Value:
    """Emit a tree of joins for many vectors, such as the decisions of all layers; else TVM's own."""
    parts = call.tensors("tensors")
    if len(parts) <= MAX_ROWS or len(call.shape) != 1 or any(part.dtype != call.dtype for part in parts):
        return call.stock()
    # A kernel takes at most MAX_ROWS vectors, so joins of joins are made until one vector is left.
    rows = [(part.value, part.shape[0]) for part in parts]
    while len(rows) > 1:
        rows = [_joined(call, rows[i : i + MAX_ROWS]) for i in range(0, len(rows), MAX_ROWS)]
    return rows[0][0]


def _joined(call: Call, rows: list[tuple[relax.Expr, int]]) -> tuple[relax.Expr, int]:
    sizes = tuple(size for _, size in rows)
    kernel = concat_rows(sizes, call.dtype)
    return call.kernel(kernel, [row for row, _ in rows], (sum(sizes),)), sum(sizes)


@converts(aten.split.Tensor)
def _split(call: Call) -> Value:
    """Emit a tree of splits for a vector of many equal parts, such as the thresholds; else TVM's own."""
    parts = [tuple(int(d) for d in part.shape) for part in call.results]
    if len(parts) <= MAX_ROWS or any(shape != parts[0] or len(shape) != 1 for shape in parts):
        return call.stock()
    whole = call.tensor("self")
    return tuple(_parted(call, whole.value, len(parts), parts[0][0], whole.dtype))


def _parted(call: Call, whole: relax.Expr, count: int, size: int, dtype: str) -> list[relax.Expr]:
    """Return `count` parts of `size` elements. Each kernel makes at most MAX_ROWS parts, which are split in turn."""
    if count == 1:
        return [whole]
    inner = next((n for n in range(min(MAX_ROWS, count - 1), 0, -1) if count % n == 0), 1) if count > MAX_ROWS else 1
    outer = count // inner
    rows = call.kernels(split_rows(outer, inner * size, dtype), [whole], [((inner * size,), dtype)] * outer)
    return [part for row in rows for part in _parted(call, row, inner, size, dtype)]
