"""The TAS unit in C simulation: scores and decisions against the PyTorch operators and exact rational arithmetic."""

import math
from fractions import Fraction

import numpy as np
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import fastcar_compile.ir.ops  # noqa: F401  (registers the operators)
from drs.tables import LATER, ONE, Controller, numbers, table_for
from fastcar_compile.codegen.hls.control_table.builder import build_table
from fastcar_compile.codegen.hls.control_table.simulator import LayerCall
from fastcar_compile.codegen.hls.control_table.table import AttentionShape, pack_rows
from fastcar_compile.gates.tas import tas_sums

fastcar = torch.ops.fastcar
few = settings(
    max_examples=80, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
UNIT = 2.0**24
"""A scale with which the score is the integer sum itself, rounded to float32."""

SPECIAL_BITS = (
    *(0x00000000, 0x80000000, 0x00000001, 0x007FFFFF, 0x00800000, 0x3F800000, 0x7F7FFFFF, 0xFF7FFFFF, 0x7F800000),
    *(0xFF800000, 0x7FC00000, 0x7F800001, 0x3F800001, 0x33800000, 0x33000000, 0xB3000000, 0x4A800000, 0x4B000001),
)
SPECIAL = np.array(SPECIAL_BITS, np.uint32).view(np.float32)
"""Zeros, denormals, limits of the format, what is not finite, and values whose products are ties of the rounding."""


def product(a: float, b: float) -> int:
    """One product in units of 2^-24, in rational arithmetic."""
    if not (math.isfinite(a) and math.isfinite(b)):
        return -(2**46)
    return max(-(2**46), min(2**46, round(Fraction(a) * Fraction(b) * 2**24)))


def pairs() -> tuple[np.ndarray, np.ndarray]:
    """Every pair of SPECIAL, random bit patterns, and random numbers near the range that matters."""
    rng = np.random.default_rng(2)
    special = np.array(np.meshgrid(SPECIAL, SPECIAL)).reshape(2, -1)
    bits = rng.integers(0, 2**32, (2, 4000), np.uint32).view(np.float32)
    near = (rng.normal(size=(2, 4000)) * 10.0 ** rng.uniform(-5, 5, (2, 4000))).astype(np.float32)
    ties = (rng.integers(1, 2**12, (2, 1000)) * 2.0**-12.5).astype(np.float32)
    halves = np.stack([rng.integers(-999, 999, 1000) + 0.5, np.full(1000, 2.0**-24)]).astype(np.float32)
    left, right = np.concatenate([special, bits, near, ties, halves], 1)
    return left, right


def test_one_product_is_exact(controller: Controller) -> None:
    """32 products a call, with and without the limit, of both signs; the sum of one product is the product."""
    table = table_for(32, scales=[UNIT] * 3)
    left, right = pairs()
    spare = -len(left) % 32
    left, right = np.pad(left, (0, spare)), np.pad(right, (0, spare))
    for at in range(0, len(left), 32):
        a, b = left[at : at + 32], right[at : at + 32]
        call = LayerCall(0, LATER, numbers(a), numbers(b), np.zeros(32, np.int32))
        scores = controller.agreed(table, call).scores
        expected = [float(np.float32(product(float(x), float(y)))) for x, y in zip(a, b, strict=True)]
        assert list(scores) == expected, (a, b)


@few
@given(
    rows=st.integers(1, 8),
    heads=st.sampled_from([(1, 1), (4, 4), (6, 2), (8, 1), (12, 4)]),
    dim=st.integers(1, 70),
    size=st.floats(-3, 5),
    seed=st.integers(0, 2**32 - 1),
)
@example(rows=2, heads=(8, 4), dim=64, size=0.0, seed=0)
def test_scores_and_decisions_are_those_of_the_operators(
    controller: Controller, rows: int, heads: tuple[int, int], dim: int, size: float, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    shape = AttentionShape(*heads, min(dim, 256 // heads[1]))
    query = torch.from_numpy((rng.normal(size=(rows, shape.heads, 1, shape.head_dim)) * 10**size).astype(np.float32))
    cache = torch.from_numpy(rng.normal(size=(rows, shape.kv_heads, 9, shape.head_dim)).astype(np.float32))
    scale, position, stride = float(rng.uniform(0.01, 2)), 8, 3
    score = fastcar.tas(query, cache, torch.tensor([position]), stride, scale)
    threshold = float(score[rng.integers(rows)])  # one row is exactly at the threshold
    chain = torch.from_numpy(rng.integers(0, 4, (stride, rows)).astype(np.int32))
    couple, limit = bool(rows % 2 == 0 and rng.random() < 0.5), None if rng.random() < 0.5 else 2
    step = int(rng.integers(0, 9))
    options = {"attention": shape, "scales": [scale], "couple_cfg": couple, "max_chain": limit}
    table = build_table(1, rows, 2, stride, [threshold], **options)
    call = LayerCall(
        *(0, step, pack_rows(query[:, :, 0].numpy()), pack_rows(cache[:, :, position - stride].numpy())),
        chain[step % stride].numpy(),
    )
    trace = controller.agreed(table, call)
    assert list(trace.scores) == score.tolist()
    gated = (torch.tensor([threshold]), torch.tensor([step]), chain, stride, -1 if limit is None else limit, couple)
    replay = fastcar.gate(score, *gated)
    assert [not trace.index_register >> row & 1 for row in range(rows)] == replay.tolist()
    assert list(trace.chain) == torch.where(replay, chain[step % stride] + 1, 0).tolist()


def test_the_largest_sum_does_not_overflow() -> None:
    """65,536 products at the limit."""
    heads = np.full((1, 512, 128), 1e30, np.float32)
    assert tas_sums(heads, heads).tolist() == [2**62]
    assert tas_sums(heads, -heads).tolist() == [-(2**62)]


def test_heads_begin_a_word() -> None:
    rows = np.arange(12, dtype=np.float32).reshape(1, 2, 6)
    assert pack_rows(rows).tolist() == [[0, 1, 2, 3], [4, 5, 0, 0], [6, 7, 8, 9], [10, 11, 0, 0]]
    assert (ONE.head_words, AttentionShape(4, 2, 6).query_words, AttentionShape(4, 2, 6).key_words) == (1, 8, 4)
