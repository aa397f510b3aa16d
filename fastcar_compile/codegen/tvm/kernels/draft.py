"""The draft of an MLP: what its gain leaves of sums and of the cached output, bit for bit as ir/ops/draft.py has it.

No product is contracted with a sum.
"""

# The annotations of a T.prim_func are calls, which TVMScript evaluates.
# pyright: reportInvalidTypeForm=false

from tvm.script import tirx as T
from tvm.tirx import PrimFunc

from fastcar_compile.codegen.tvm.kernels import script
from fastcar_compile.codegen.tvm.kernels.vectors import broadcast, fence, ramp, vector_lanes, vector_type


@script.kernel
def draft_gain(rows: int, count: int) -> PrimFunc:
    """Return gain float32 [B]: gains[i] where i of the edges float32 [count - 1] are at most change float32 [B]."""
    edges_count = count - 1

    @script.prim_func(private=True, s_tir=True)
    def gain_of_change(
        change: T.Buffer((rows,), "float32"),
        edges: T.Buffer((edges_count,), "float32"),
        gains: T.Buffer((count,), "float32"),
        y: T.Buffer((rows,), "float32"),
    ):
        for i in range(rows):
            with T.sblock("row"):
                script.access([change, edges, gains], [y])
                place = T.alloc_buffer((1,), "int32")
                place[0] = 0
                for e in range(edges_count):
                    place[0] += T.Cast("int32", change[i] >= edges[e])
                # A NaN is not equal to itself.
                y[i] = T.Select(change[i] == change[i], gains[place[0]], T.float32(0))

    return gain_of_change


@script.kernel
def draft_difference(rows: int, width: int) -> PrimFunc:
    """Return both[:B] - gain * both[B:] of both float32 [2 B, K] and gain float32 [B]."""
    lanes, twice = vector_lanes(width), 2 * rows
    kind = vector_type("float32", lanes)

    @script.prim_func(private=True, s_tir=True)
    def what_gain_leaves(
        both: T.Buffer((twice, width), "float32"),
        gain: T.Buffer((rows,), "float32"),
        y: T.Buffer((rows, width), "float32"),
    ):
        for i in range(rows):
            with T.sblock("row"):
                script.access([both, gain], [y])
                for c in range(width // lanes):
                    at = T.meta_var(ramp(c * lanes, lanes))
                    y[i, at] = both[i, at] - fence(kind, broadcast(gain[i], lanes) * both[rows + i, at])

    return what_gain_leaves


@script.kernel
def draft_sum(rows: int, width: int) -> PrimFunc:
    """Return bias + gain * (cached - bias) + neurons + linear; float32 [B, H], bias [H], gain [B]."""
    lanes = vector_lanes(width)
    kind = vector_type("float32", lanes)

    @script.prim_func(private=True, s_tir=True)
    def draft_output(
        neurons: T.Buffer((rows, width), "float32"),
        linear: T.Buffer((rows, width), "float32"),
        cached: T.Buffer((rows, width), "float32"),
        bias: T.Buffer((width,), "float32"),
        gain: T.Buffer((rows,), "float32"),
        y: T.Buffer((rows, width), "float32"),
    ):
        for i in range(rows):
            with T.sblock("row"):
                script.access([neurons, linear, cached, bias, gain], [y])
                for c in range(width // lanes):
                    at = T.meta_var(ramp(c * lanes, lanes))
                    kept = T.meta_var(fence(kind, broadcast(gain[i], lanes) * (cached[i, at] - bias[at])))
                    y[i, at] = ((bias[at] + kept) + neurons[i, at]) + linear[i, at]

    return draft_output
