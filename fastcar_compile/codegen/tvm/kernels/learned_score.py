"""Score of the gate `learned`: a network with one hidden layer over the MLP's input and its change."""

from tvm.script import tirx as T
from tvm.tirx import PrimFunc

from fastcar_compile.codegen.tvm.kernels import script, vectors
from fastcar_compile.codegen.tvm.kernels.cache import power_of_two
from fastcar_compile.codegen.tvm.kernels.linear.tiles import PARALLEL_WEIGHTS
from fastcar_compile.codegen.tvm.kernels.tas import finite_or_nan, limited
from fastcar_compile.codegen.tvm.kernels.tas import units as fixed_units
from fastcar_compile.codegen.tvm.kernels.vectors import Expr, cast, magnitude_bits, ramp, vector_lanes
from fastcar_compile.gates.scores import LEAST_EXPONENT, SCALE_FIELD, TAS_FRACTION_BITS
from fastcar_compile.ir.ops.operator import MANTISSA_BITS

SUM_LANES = 16
"""Partial sums of a unit. They are exact, so any number gives the same bits."""

UNIT_BLOCKS = (2, 1)
"""Units that are summed together: features are read once for all of them."""

LINE_WEIGHTS = vectors.LINE // 2
"""bfloat16 weights in a cache line."""


@script.inlined
def _round_features(width, lanes, x, cached, i, feature, largest, field, change, bits):
    """Round row i to integers of one exponent: feature[i, 0 .. width - 1] of x, feature[i, width ..] of its change.

    largest[i] becomes the magnitude bits of the largest feature, field[i] its exponent field.
    """
    one = T.meta_var(ramp(0, lanes))
    for v in T.vectorized(lanes):
        bits[v] = 0
    # c: vectors of the row.
    # First pass: the largest magnitude of x and of its change. change and bits are one vector each.
    for c in range(width // lanes):
        change[one] = T.fabs(x[i, ramp(c * lanes, lanes)] - cached[i, ramp(c * lanes, lanes)])
        bits[one] = T.max(bits[one], magnitude_bits(change[one], lanes))
        bits[one] = T.max(bits[one], magnitude_bits(x[i, ramp(c * lanes, lanes)], lanes))
    largest[i] = bits[0]
    for v in T.unroll(lanes - 1):
        largest[i] = T.max(largest[i], bits[v + 1])
    # The least exponent field keeps both powers of two, that of the features and its inverse, normal.
    field[i] = T.max(T.shift_right(largest[i], MANTISSA_BITS), LEAST_EXPONENT)
    # Features are finite here, or the score is NaN whatever they are.
    # Second pass: integers of at most 2^22 as float64, x in the first half of the row, its change in the second.
    for c in range(width // lanes):
        change[one] = T.fabs(x[i, ramp(c * lanes, lanes)] - cached[i, ramp(c * lanes, lanes)])
        change[one] = change[one] * power_of_two(SCALE_FIELD - field[i])
        feature[i, ramp(width + c * lanes, lanes)] = T.nearbyint(cast("float64", change[one], lanes))
        change[one] = x[i, ramp(c * lanes, lanes)] * power_of_two(SCALE_FIELD - field[i])
        feature[i, ramp(c * lanes, lanes)] = T.nearbyint(cast("float64", change[one], lanes))


SCALED_BITS, KEPT_BITS = 45, -(1 << 63) | 0x0FFFE00000000000
"""A bfloat16, sign extended and shifted by SCALED_BITS, has bits where a float64 has exponent and mantissa; KEPT_BITS
clears the copies of the sign. It is the weight times 2^-896, exactly, as float64's exponent field is larger by 896."""

WEIGHT_SCALE_BITS = 1023 + 896 << 52
"""The bits of 2^896, as TVM takes no such literal."""


def _scaled_weight(value: Expr) -> Expr:
    """Return a bfloat16 times 2^-896 as float64: two vector instructions, where conversions take four."""
    # The sign is copied to all upper bits by the extension. The mask leaves bit 63 of these copies.
    wide = T.Cast("int64", T.reinterpret("int16", value))
    return T.reinterpret("float64", T.bitwise_and(T.shift_left(wide, T.int64(SCALED_BITS)), T.int64(KEPT_BITS)))


@script.inlined
def _add_units(width, block, feature, w, i, u, acc):
    """Write the sums of units u .. u + block - 1 for row i, times 2^-896.

    Unit u + n is in acc[n * SUM_LANES]; acc is float64 [block * SUM_LANES].
    """
    steps, rows_ahead = T.meta_var((2 * width // SUM_LANES, vectors.prefetch_distance(2, 4 * width)[0]))
    # The sums are exact in float64 whatever their order: at most 53 bits.
    for v in T.vectorized(block * SUM_LANES):
        acc[v] = T.float64(0)
    # c: vectors of the row. n: units, which share the loads of features. v: one vector, in registers.
    for c in range(steps):
        # One prefetch per cache line of 32 weights.
        # Only the first batch row prefetches: the others find the line in the cache.
        if i == 0 and c % (LINE_WEIGHTS // SUM_LANES) == 0:
            for n in T.unroll(block):
                T.evaluate(vectors.prefetch(w[u + n + rows_ahead, c * SUM_LANES]))
        for n in T.unroll(block):
            for v in T.vectorized(SUM_LANES):
                acc[n * SUM_LANES + v] += feature[i, c * SUM_LANES + v] * _scaled_weight(w[u + n, c * SUM_LANES + v])
    for n in T.unroll(block):
        for t in range(2 * width % SUM_LANES):
            acc[n * SUM_LANES + t] += feature[i, steps * SUM_LANES + t] * _scaled_weight(
                w[u + n, steps * SUM_LANES + t]
            )
        for v in T.unroll(SUM_LANES - 1):
            acc[n * SUM_LANES] += acc[n * SUM_LANES + v + 1]


@script.kernel
def learned_score(rows: int, width: int, units: int) -> PrimFunc:
    """Return float32 [B] = b2 + sum_u relu(b1[u] + <w1[u], [x, |x - cached|]>) * w2[u], bit for bit as the operator.

    x, cached float32 [B, H], w1 bfloat16 [units, 2 H], b1, w2 float32 [units], b2 float32 [1]. The sums of the first
    layer are exact in float64, fused or not and in any order. Parallel over units.
    """
    loop = T.parallel if units * 2 * width * rows >= PARALLEL_WEIGHTS else T.serial
    lanes, block = vector_lanes(width), next(n for n in UNIT_BLOCKS if units % n == 0)

    @script.prim_func(private=True, s_tir=True)
    def gate_network(
        x: T.Buffer((rows, width), "float32"),
        cached: T.Buffer((rows, width), "float32"),
        w1: T.Buffer((units, 2 * width), "bfloat16"),
        b1: T.Buffer((units,), "float32"),
        w2: T.Buffer((units,), "float32"),
        b2: T.Buffer((1,), "float32"),
        y: T.Buffer((rows,), "float32"),
    ):
        # All features are kept: every pair of units reads them again.
        feature = T.alloc_buffer((rows, 2 * width), "float64")
        largest = T.alloc_buffer((rows,), "int32")
        field = T.alloc_buffer((rows,), "int32")
        hidden = T.alloc_buffer((rows, units), "float32")
        for i in range(rows):
            with T.sblock("features"):
                script.access([x, cached], [feature, largest, field])
                change = T.alloc_buffer((lanes,), "float32")
                bits = T.alloc_buffer((lanes,), "int32")
                _round_features(width, lanes, x, cached, i, feature, largest, field, change, bits)
        # u: units in pairs, parallel. i: batch rows, which meet the pair's weights in the cache. n: unrolled units.
        for u in loop(units // block):
            with T.sblock("units"):
                script.access([feature, field, w1, b1], [hidden])
                acc = T.alloc_buffer((block * SUM_LANES,), "float64")
                for i in range(rows):
                    _add_units(width, block, feature, w1, i, u * block, acc)
                    for n in T.unroll(block):
                        # Both products are exact, so that they may be contracted.
                        hidden[i, u * block + n] = T.max(
                            T.Cast("float32", acc[n * SUM_LANES] * T.reinterpret("float64", T.int64(WEIGHT_SCALE_BITS)))
                            * power_of_two(field[i] - SCALE_FIELD)
                            + b1[u * block + n],
                            T.float32(0),
                        )
        # Second layer: products in fixed point, summed in int64. most catches a hidden unit that is not finite.
        for i in range(rows):
            with T.sblock("row"):
                script.access([hidden, largest, w2, b2], [y])
                total = T.alloc_buffer((1,), "int64")
                most = T.alloc_buffer((1,), "int32")
                total[0] = T.int64(0)
                most[0] = largest[i]
                for u in range(units):
                    most[0] = T.max(most[0], magnitude_bits(hidden[i, u], 1))
                    total[0] += limited(fixed_units(hidden[i, u], 1) * T.Cast("float64", w2[u]), 1)
                y[i] = finite_or_nan(most[0], T.Cast("float32", total[0]) * T.float32(2.0**-TAS_FRACTION_BITS) + b2[0])

    return gate_network
