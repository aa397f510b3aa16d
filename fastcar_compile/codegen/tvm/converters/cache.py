"""Key and value caches, ring caches, and the slots that hold one frame."""

from __future__ import annotations

import torch
from tvm import relax

from fastcar_compile.codegen.tvm.call import Call, Value
from fastcar_compile.codegen.tvm.converters.registry import converts
from fastcar_compile.codegen.tvm.kernels.attention.window import ring_row
from fastcar_compile.codegen.tvm.kernels.cache.frame_slot import (
    chain_read,
    chain_write,
    slot_read,
    slot_write,
    slots_write,
)
from fastcar_compile.codegen.tvm.relax_api import Shape

fastcar = torch.ops.fastcar


@converts(fastcar.cache_write.default)
def _cache_write(call: Call) -> Value:
    kernel = call.dispatch("cache_write", *_appended(call), call.dtype)
    return call.in_place(kernel, call.values("cache", "value", "position"))


@converts(fastcar.ring_write.default)
def _ring_write(call: Call) -> Value:
    kernel = call.dispatch("ring_write", *_appended(call), call.integer("sinks"), call.dtype)
    return call.in_place(kernel, call.values("cache", "value", "position"))


def _appended(call: Call) -> tuple[Shape, int]:
    """Return the cache's shape [B, Hkv, S, D], D that of a head, and how many rows it gets."""
    value = call.tensor("value").shape
    return (*call.shape[:3], value[3]), value[2]


@converts(fastcar.ring_row.default)
def _ring_row(call: Call) -> Value:
    kernel = ring_row(call.integer("back"), call.integer("sinks"), call.integer("ring"))
    return call.kernel(kernel, call.values("position"))


@converts(fastcar.limit.default)
def _limit(call: Call) -> Value:
    return call.emit(relax.op.minimum(call.tensor("positions").value, relax.const(call.integer("most"), "int64")))


@converts(fastcar.slot_read.default)
def _slot_read(call: Call) -> Value:
    slots, batch, *width = call.tensor("cache").shape
    kernel = slot_read((slots, batch, width[0])) if width else chain_read(slots, batch)
    return call.kernel(kernel, call.values("cache", "step"))


@converts(fastcar.slot_write.default)
def _slot_write(call: Call) -> Value:
    slots, batch, *width = call.shape
    # A chain counter [F, B] has no width, and a kernel of its own.
    kernel = slot_write((slots, batch, width[0])) if width else chain_write(slots, batch)
    return call.in_place(kernel, call.values("cache", "value", "step"))


@converts(fastcar.keep_frame.default)
def _keep_frame(call: Call) -> Value:
    slots, batch, width = call.tensor("cache").shape
    # Both caches are written in place: results 0 and 1 are arguments 0 and 1.
    kernel = slots_write((slots, batch, width))
    return call.partly_in_place(kernel, call.values("cache", "inputs", "y", "x", "replay", "step"), (0, 1))
