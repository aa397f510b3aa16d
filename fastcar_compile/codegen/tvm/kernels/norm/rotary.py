"""Rotary position embedding of queries or keys."""

# The annotations of a T.prim_func are calls, which TVMScript evaluates.
# pyright: reportInvalidTypeForm=false

from __future__ import annotations

from tvm.script import tirx as T
from tvm.tirx import PrimFunc

from fastcar_compile.codegen.tvm.kernels import OPAQUE, HeadShape, script
from fastcar_compile.codegen.tvm.kernels.script import kernel

PARALLEL_ROTARY_ELEMENTS = 1 << 17
"""Elements from which a second thread pays for launching and awaiting a parallel region."""


@kernel
def rotary(shape: HeadShape, tables: int) -> PrimFunc:
    """Return x * cos + cat(-x[..., D/2:], x[..., :D/2]) * sin, x float32 [B, H, T, D].

    cos and sin are float32 [tables, 1, T, D], tables 1 or B. Parallel over heads.
    """
    b, h, t, d = shape
    half = d // 2
    lanes = next(v for v in (16, 8, 4, 2, 1) if half % v == 0)
    loop = T.parallel if b * h > 1 and b * h * t * d >= PARALLEL_ROTARY_ELEMENTS else T.serial

    @script.prim_func(private=True, s_tir=True)
    def rotate(
        x: T.Buffer((b, h, t, d), "float32"),
        cos: T.Buffer((tables, 1, t, d), "float32"),
        sin: T.Buffer((tables, 1, t, d), "float32"),
        y: T.Buffer((b, h, t, d), "float32"),
    ):
        T.func_attr({"op_pattern": OPAQUE})
        for head in loop(b * h):
            # i: query rows. c: vectors of half a head. v: one vector; both halves of a pair are computed together.
            for i, c in T.grid(t, half // lanes):
                with T.sblock("lanes"):
                    T.reads(x[0:b, 0:h, 0:t, 0:d], cos[0:tables, 0:1, 0:t, 0:d], sin[0:tables, 0:1, 0:t, 0:d])
                    T.writes(y[0:b, 0:h, 0:t, 0:d])
                    bi: T.let = head // h
                    hi: T.let = head % h
                    # One table of angles serves the whole batch, or every batch row has its own.
                    e: T.let = bi % tables
                    at: T.let = c * lanes
                    # First half: x1 * cos - x2 * sin, with x1 and x2 the halves of a head.
                    for v in T.vectorized(lanes):
                        y[bi, hi, i, at + v] = (
                            x[bi, hi, i, at + v] * cos[e, 0, i, at + v]
                            - x[bi, hi, i, half + at + v] * sin[e, 0, i, at + v]
                        )
                    for v in T.vectorized(lanes):
                        y[bi, hi, i, half + at + v] = (
                            x[bi, hi, i, half + at + v] * cos[e, 0, i, half + at + v]
                            + x[bi, hi, i, at + v] * sin[e, 0, i, half + at + v]
                        )

    return rotate
