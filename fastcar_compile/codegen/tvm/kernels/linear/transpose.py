"""Sixteen rows of float32, transposed in registers."""

from __future__ import annotations

from typing import Any

from tvm.script import tirx as T

from fastcar_compile.codegen.tvm.kernels.script import inlined
from fastcar_compile.codegen.tvm.kernels.simd.vectors import Expr, ramp, vector

LANES = 16
HALF = LANES // 2


def _zip(low: Any, high: Any, number: Expr, half: int) -> Expr:
    """Return the lanes of one half of two vectors in turn: of vector `number` of both buffers."""
    lanes = range(half * HALF, half * HALF + HALF)
    order = [which * LANES + lane for lane in lanes for which in (0, 1)]
    return T.Shuffle([low[vector(number, LANES)], high[vector(number, LANES)]], order)


@inlined
def _round(low, high, first, second):
    """Zip vectors 0 to 7 (low) with 8 to 15 (high); the results are `first` and `second`, eight each."""
    for p in T.unroll(4):
        first[vector(2 * p, LANES)] = _zip(low, high, p, 0)
        first[vector(2 * p + 1, LANES)] = _zip(low, high, p, 1)
        second[vector(2 * p, LANES)] = _zip(low, high, 4 + p, 0)
        second[vector(2 * p + 1, LANES)] = _zip(low, high, 4 + p, 1)


@inlined
def transpose_rows(x, xt, active, o, step):
    """Write inputs 16 step .. of the 16 active rows from 16 o on to xt[o, 16 step ..], a vector per input.

    Four rounds transpose 16 x 16. A buffer of all vectors would be too large for registers.
    """
    a = T.alloc_buffer((HALF * LANES,), "float32")
    b = T.alloc_buffer((HALF * LANES,), "float32")
    c = T.alloc_buffer((HALF * LANES,), "float32")
    d = T.alloc_buffer((HALF * LANES,), "float32")
    # a and b: eight rows each, one vector of 16 inputs per row.
    for i in T.unroll(HALF):
        a[vector(i, LANES)] = x[active.rows[T.min(o * LANES + i, active.count[0] - 1)], ramp(step * LANES, LANES)]
        b[vector(i, LANES)] = x[
            active.rows[T.min(o * LANES + HALF + i, active.count[0] - 1)], ramp(step * LANES, LANES)
        ]
    # A round interleaves row i with row i + 8. Four rounds exchange the numbers of rows and of inputs.
    _round(a, b, c, d)
    _round(c, d, a, b)
    _round(a, b, c, d)
    _round(c, d, a, b)
    for i in T.unroll(HALF):
        xt[o, step * LANES + i, ramp(0, LANES)] = a[vector(i, LANES)]
        xt[o, step * LANES + HALF + i, ramp(0, LANES)] = b[vector(i, LANES)]
