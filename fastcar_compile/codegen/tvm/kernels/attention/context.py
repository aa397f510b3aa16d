"""Cross-attention: every query row over all tokens of a context, under a mask."""

from __future__ import annotations

from tvm.script import tirx as T
from tvm.tirx import PrimFunc

from fastcar_compile.codegen.tvm.kernels import script
from fastcar_compile.codegen.tvm.kernels.attention.softmax import LogitRule
from fastcar_compile.codegen.tvm.kernels.vectors import exp_not_positive

# The annotations of a T.prim_func are calls, which TVMScript evaluates.
# pyright: reportInvalidTypeForm=false


LANES = 16
"""Partial sums of a product of query and key."""

PARALLEL_ELEMENTS = 1 << 16
"""Products of elements from which a parallel region pays."""


@script.kernel
def context_attention(
    query: tuple[int, ...], values_of: tuple[int, ...], mask_rows: int, scale: float, softcap: float | None = None
) -> PrimFunc:
    """Return softmax(scale * q k^T + mask) v, grouped-query: float32 [B, Hq, T, Dv].

    query float32 [B, Hq, T, D], keys float32 [B, Hkv, L, D], values float32 [B, Hkv, L, Dv]; mask float32
    [mask_rows, 1, 1, L], of one row for all of the batch or one for each. Parallel over query heads and rows; each
    keeps the logits of its context.
    """
    b, hq, t, d = query
    _, hkv, n, dv = values_of
    group, whole, rule = hq // hkv, d // LANES * LANES, LogitRule(scale, softcap)
    loop = T.parallel if b * hq * t * n * d >= PARALLEL_ELEMENTS else T.serial

    @script.prim_func(private=True, s_tir=True)
    def attend(
        q: T.Buffer((b, hq, t, d), "float32"),
        keys: T.Buffer((b, hkv, n, d), "float32"),
        values: T.Buffer((b, hkv, n, dv), "float32"),
        mask: T.Buffer((mask_rows, 1, 1, n), "float32"),
        y: T.Buffer((b, hq, t, dv), "float32"),
    ):
        with T.sblock("rows"):
            script.access([q, keys, values, mask], [y])
            for item in loop(b * hq * t):
                bi: T.let = item // (hq * t)
                h: T.let = item // t % hq
                row: T.let = item % t
                kh: T.let = h // group
                # The logits of all tokens are kept: maximum, weights and values are three passes.
                logits = T.alloc_buffer((n,), "float32")
                lanes = T.alloc_buffer((LANES,), "float32")
                state = T.alloc_buffer((2,), "float32")  # the maximum; the sum of the weights
                state[0] = T.min_value("float32")
                # j: tokens. c: vectors along D. v: 16 partial sums, in registers.
                for j in range(n):
                    for v in T.vectorized(LANES):
                        lanes[v] = T.float32(0)
                    for c in range(d // LANES):
                        for v in T.vectorized(LANES):
                            lanes[v] += q[bi, h, row, c * LANES + v] * keys[bi, kh, j, c * LANES + v]
                    # The remainder of D goes on in the first lanes.
                    for c in range(d - whole):
                        lanes[c] += q[bi, h, row, whole + c] * keys[bi, kh, j, whole + c]
                    for v in range(1, LANES):
                        lanes[0] += lanes[v]
                    # The mask is added after the soft-cap, which would limit a masked logit too.
                    logits[j] = rule.logit(lanes[0]) + mask[bi % mask_rows, 0, 0, j]
                    state[0] = T.max(state[0], logits[j])
                for j in range(n):
                    logits[j] = exp_not_positive(logits[j] - state[0])
                state[1] = T.float32(0)
                for j in range(n):
                    state[1] += logits[j]
                for c in range(dv):
                    y[bi, h, row, c] = T.float32(0)
                # j: tokens in order. c: columns, which are independent sums in y, so LLVM vectorises them.
                for j in range(n):
                    for c in range(dv):
                        y[bi, h, row, c] += logits[j] * values[bi, kh, j, c]
                for c in range(dv):
                    y[bi, h, row, c] = y[bi, h, row, c] / state[1]

    return attend
