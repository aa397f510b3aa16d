"""Rows of activations that are not zero: those that replay are, and no kernel multiplies them."""

from __future__ import annotations

from tvm.script import tirx as T

from fastcar_compile.codegen.tvm.kernels.script import inlined
from fastcar_compile.codegen.tvm.kernels.simd.vectors import Expr, pure

LANES = 16


@inlined
def note_int8(q, i, k, seen):
    """seen uint32 [16]: not zero where row i of q int8 [m, k] is not. With k = 0 nothing is."""
    found = T.alloc_buffer((LANES,), "int8")
    found[T.Ramp(0, 1, LANES)] = T.Broadcast(T.int8(0), LANES)
    for c in range(k // LANES):
        found[T.Ramp(0, 1, LANES)] = T.bitwise_or(found[T.Ramp(0, 1, LANES)], q[i, T.Ramp(c * LANES, 1, LANES)])
    for t in range(k % LANES):
        found[0] = T.bitwise_or(found[0], q[i, k // LANES * LANES + t])
    seen[T.Ramp(0, 1, LANES)] = T.Cast(f"uint32x{LANES}", found[T.Ramp(0, 1, LANES)])


@inlined
def note_float32(x, i, k, seen):
    """The same for x float32 [m, k]; both zeros count as zero, so the sign bit is dropped."""
    seen[T.Ramp(0, 1, LANES)] = T.Broadcast(T.uint32(0), LANES)
    for c in range(k // LANES):
        seen[T.Ramp(0, 1, LANES)] = T.bitwise_or(
            seen[T.Ramp(0, 1, LANES)],
            T.shift_left(
                T.reinterpret(f"uint32x{LANES}", x[i, T.Ramp(c * LANES, 1, LANES)]), T.Broadcast(T.uint32(1), LANES)
            ),
        )
    for t in range(k % LANES):
        seen[0] = T.bitwise_or(
            seen[0], T.shift_left(T.reinterpret("uint32", x[i, k // LANES * LANES + t]), T.uint32(1))
        )


def none_seen(seen: Expr) -> Expr:
    """Whether no bit is set."""
    return pure("uint32", f"llvm.vector.reduce.or.v{LANES}i32", seen[T.Ramp(0, 1, LANES)]) == T.uint32(0)


@inlined
def in_tiles(loop, tile, n, rows, count, columns):
    """tile(first weight row, first live row, weight rows, live rows) over n weight rows and `count` live rows.

    A tile of all `rows` meets every live row before the next, so that it is read from memory once.
    """
    for jo in loop(n // rows):
        for io in range(count // columns):
            tile(jo * rows, io * columns, rows, columns)
        if columns > 1:
            for io in range(count % columns):
                tile(jo * rows, count // columns * columns + io, rows, 1)
    if n % rows > 0:
        for io in range(count):
            tile(n // rows * rows, io, n % rows, 1)
