"""Reads and in-place writes of a frame slot: MLP caches float32 [F, B, H] and chain counters int32 [F, B].

The slot of a forward is step mod F.
"""

# The annotations of a T.prim_func are calls, which TVMScript evaluates.
# pyright: reportInvalidTypeForm=false

from __future__ import annotations

from tvm.script import tirx as T
from tvm.tirx import PrimFunc

from fastcar_compile.codegen.tvm.kernels import OPAQUE, script
from fastcar_compile.codegen.tvm.kernels.script import kernel


@kernel
def slot_read(shape: tuple[int, int, int]) -> PrimFunc:
    """Return the slot of `step` of a cache float32 [F, B, H]: float32 [B, H]."""
    slots, rows, width = shape

    @script.prim_func(private=True, s_tir=True)
    def read_slot(
        cache: T.Buffer((slots, rows, width), "float32"),
        step: T.Buffer((1,), "int64"),
        y: T.Buffer((rows, width), "float32"),
    ):
        T.func_attr({"op_pattern": OPAQUE})
        # One contiguous copy of B * H elements, because the slot is the outermost axis.
        for i, c in T.grid(rows, width):
            with T.sblock("copy"):
                T.reads(cache[0:slots, 0:rows, 0:width], step[0:1])
                T.writes(y[0:rows, 0:width])
                y[i, c] = cache[T.Cast("int32", step[0]) % slots, i, c]

    return read_slot


@kernel
def slot_write(shape: tuple[int, int, int]) -> PrimFunc:
    """Write value float32 [B, H] to the slot of `step` of a cache float32 [F, B, H], in place."""
    slots, rows, width = shape

    @script.prim_func(private=True, s_tir=True)
    def write_slot(
        cache: T.Buffer((slots, rows, width), "float32"),
        value: T.Buffer((rows, width), "float32"),
        step: T.Buffer((1,), "int64"),
    ):
        T.func_attr({"op_pattern": OPAQUE})
        for i, c in T.grid(rows, width):
            with T.sblock("copy"):
                T.reads(value[0:rows, 0:width], step[0:1])
                T.writes(cache[0:slots, 0:rows, 0:width])
                cache[T.Cast("int32", step[0]) % slots, i, c] = value[i, c]

    return write_slot


@kernel
def slots_write(shape: tuple[int, int, int]) -> PrimFunc:
    """Write y float32 [B, H] to the slot of `step` of a cache float32 [F, B, H], in place, and the rows of x that do
    not replay to that of another one: `keep_frame`.
    """
    slots, rows, width = shape

    @script.prim_func(private=True, s_tir=True)
    def write_slots(
        cache: T.Buffer((slots, rows, width), "float32"),
        inputs: T.Buffer((slots, rows, width), "float32"),
        y: T.Buffer((rows, width), "float32"),
        x: T.Buffer((rows, width), "float32"),
        replay: T.Buffer((rows,), "bool"),
        step: T.Buffer((1,), "int64"),
    ):
        T.func_attr({"op_pattern": OPAQUE})
        # i: rows of the batch. Outputs are written for every row, also for those that replay.
        for i in range(rows):
            for c in range(width):
                with T.sblock("outputs"):
                    T.reads(y[0:rows, 0:width], step[0:1])
                    T.writes(cache[0:slots, 0:rows, 0:width])
                    cache[T.Cast("int32", step[0]) % slots, i, c] = y[i, c]
            # A row that replays keeps the slot's input: that of the forward whose output it replays.
            if not replay[i]:
                for c in range(width):
                    with T.sblock("inputs"):
                        T.reads(x[0:rows, 0:width], step[0:1])
                        T.writes(inputs[0:slots, 0:rows, 0:width])
                        inputs[T.Cast("int32", step[0]) % slots, i, c] = x[i, c]

    return write_slots


@kernel
def chain_read(slots: int, rows: int) -> PrimFunc:
    """Return the slot of `step` of the counters int32 [F, B]: int32 [B]."""

    @script.prim_func(private=True, s_tir=True)
    def read_chain(
        chain: T.Buffer((slots, rows), "int32"), step: T.Buffer((1,), "int64"), y: T.Buffer((rows,), "int32")
    ):
        T.func_attr({"op_pattern": OPAQUE})
        for i in range(rows):
            with T.sblock("copy"):
                T.reads(chain[0:slots, 0:rows], step[0:1])
                T.writes(y[0:rows])
                y[i] = chain[T.Cast("int32", step[0]) % slots, i]

    return read_chain


@kernel
def chain_write(slots: int, rows: int) -> PrimFunc:
    """Write value int32 [B] to the slot of `step` of the counters int32 [F, B], in place."""

    @script.prim_func(private=True, s_tir=True)
    def write_chain(
        chain: T.Buffer((slots, rows), "int32"), value: T.Buffer((rows,), "int32"), step: T.Buffer((1,), "int64")
    ):
        T.func_attr({"op_pattern": OPAQUE})
        for i in range(rows):
            with T.sblock("copy"):
                T.reads(value[0:rows], step[0:1])
                T.writes(chain[0:slots, 0:rows])
                chain[T.Cast("int32", step[0]) % slots, i] = value[i]

    return write_chain
