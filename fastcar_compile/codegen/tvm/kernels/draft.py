"""The draft of an MLP: what its gain leaves of sums and of the cached output, bit for bit as ir/ops/gates.py has it.

No product is contracted with a sum.
"""

import math

from tvm.script import tirx as T
from tvm.tirx import PrimFunc

from fastcar_compile.codegen.tvm.isa import PORTABLE, InstructionSet
from fastcar_compile.codegen.tvm.kernels import script
from fastcar_compile.codegen.tvm.kernels.linear.activations import multiply_row, quantize_row, read_knots
from fastcar_compile.codegen.tvm.kernels.vectors import broadcast, fence, ramp, vector_lanes, vector_type
from fastcar_compile.ir.ops.linear import KNOTS


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
                # A change is not negative, and no comparison with a NaN holds. TVM takes x == x as true.
                y[i] = T.Select(change[i] >= T.float32(0), gains[place[0]], T.float32(0))

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
def draft_features_quantize(
    rows: int, neurons: int, rank: int, activation: str, isa: InstructionSet = PORTABLE
) -> PrimFunc:
    """Return q int8 [B, n + k] and scale float32 [B] of `draft_difference` of features [gate * factor * up ; inner].

    gate, up float32 [2 B, n], inner float32 [2 B, k], gain float32 [B], and the activation's table int32 [513].
    """
    width, twice, knots, read = neurons + rank, 2 * rows, KNOTS, read_knots(isa)
    lanes = vector_lanes(math.gcd(neurons, rank))
    kind = vector_type("float32", lanes)

    @script.prim_func(private=True, s_tir=True)
    def draft_features_i8(
        g: T.Buffer((twice, neurons), "float32"),
        up: T.Buffer((twice, neurons), "float32"),
        inner: T.Buffer((twice, rank), "float32"),
        gain: T.Buffer((rows,), "float32"),
        table: T.Buffer((knots,), "int32"),
        q: T.Buffer((rows, width), "int8"),
        s: T.Buffer((rows,), "float32"),
    ):
        for i in range(rows):
            with T.sblock("row"):
                script.access([g, up, inner, gain, table], [q, s])
                # The features of the input, which become the difference, and those of the cached input.
                a = T.alloc_buffer((1, width), "float32")
                b = T.alloc_buffer((1, neurons), "float32")
                multiply_row(g, up, table, a, i, neurons, activation, read)
                multiply_row(g, up, table, b, rows + i, neurons, activation, read)
                for c in range(neurons // lanes):
                    at = T.meta_var(ramp(c * lanes, lanes))
                    # The feature is a product too, whose store LLVM would forward into a contracted difference.
                    a[0, at] = fence(kind, a[0, at]) - fence(kind, broadcast(gain[i], lanes) * b[0, at])
                for c in range(rank // lanes):
                    at = T.meta_var(ramp(c * lanes, lanes))
                    kept = T.meta_var(fence(kind, broadcast(gain[i], lanes) * inner[rows + i, at]))
                    a[0, ramp(neurons + c * lanes, lanes)] = inner[i, at] - kept
                quantize_row(a, 0, q, s, i, width)

    return draft_features_i8


@script.kernel
def draft_sum(rows: int, width: int) -> PrimFunc:
    """Return bias + gain * (cached - bias) + left; float32 [B, H], bias [H], gain [B]."""
    lanes = vector_lanes(width)
    kind = vector_type("float32", lanes)

    @script.prim_func(private=True, s_tir=True)
    def draft_output(
        left: T.Buffer((rows, width), "float32"),
        cached: T.Buffer((rows, width), "float32"),
        bias: T.Buffer((width,), "float32"),
        gain: T.Buffer((rows,), "float32"),
        y: T.Buffer((rows, width), "float32"),
    ):
        for i in range(rows):
            with T.sblock("row"):
                script.access([left, cached, bias, gain], [y])
                for c in range(width // lanes):
                    at = T.meta_var(ramp(c * lanes, lanes))
                    kept = T.meta_var(fence(kind, broadcast(gain[i], lanes) * (cached[i, at] - bias[at])))
                    y[i, at] = (bias[at] + kept) + left[i, at]

    return draft_output
