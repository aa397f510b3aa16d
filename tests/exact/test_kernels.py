"""The TVM kernels against the operators, bit for bit."""

import platform

import numpy as np
import pytest
import torch
import tvm
from tvm.tirx import PrimFunc

from fastcar_compile.codegen.tvm.isa import INSTRUCTION_SETS, InstructionSet, cpu_flags, runnable
from fastcar_compile.codegen.tvm.kernels.attention.exact import exact_attention
from fastcar_compile.codegen.tvm.kernels.attention.exact_rows import exact_rows_attention
from fastcar_compile.codegen.tvm.kernels.norm import (
    exact_layer_norm,
    exact_layer_norm_quantize,
    exact_norm,
    exact_norm_quantize,
    exact_rotary,
)
from fastcar_compile.codegen.tvm.target import host_target
from fastcar_compile.ir import exact
from fastcar_compile.ir.ops.linear import quantize_rows

from .cases import KINDS, Array, cache, same, values

fastcar = torch.ops.fastcar
BEST, *OTHERS = runnable(INSTRUCTION_SETS, platform.machine(), cpu_flags())
SECOND, LEAST = [*OTHERS, BEST][0], [BEST, *OTHERS][-1]
EIGHT = next((isa for isa in OTHERS if isa.float_lanes == 8), LEAST)
"""The instruction sets that this CPU runs: the best, one below it, the smallest, and one of eight lanes (AVX2)."""


class Library:
    """A compiled kernel."""

    def __init__(self, kernel: PrimFunc, isa: InstructionSet | None = None) -> None:
        module = tvm.IRModule({"main": kernel.with_attr("global_symbol", "main")})
        self.function = tvm.compile(module, target=host_target(isa))["main"]

    def __call__(self, *arrays: Array, results: int = 1) -> list[Array]:
        """Return the last arrays as they are afterwards."""
        tensors = [tvm.runtime.tensor(np.ascontiguousarray(a)) for a in arrays]
        self.function(*tensors)
        return [t.numpy() for t in tensors[-results:]]


@pytest.mark.parametrize("layer", [False, True])
@pytest.mark.parametrize("width", [5, 64, 129])
def test_norm(width: int, layer: bool) -> None:
    made = (exact_layer_norm, exact_layer_norm_quantize) if layer else (exact_norm, exact_norm_quantize)
    plain, quantized = (Library(kernel(4, width, 1e-6)) for kernel in made)
    for seed, kind in enumerate(KINDS):
        random = np.random.default_rng(seed)
        x, own = values(kind, (4, width), random), values("normal", (1 + layer, width), random)
        x[1] += np.float32(64 * layer)
        (y,) = plain(x, *own, np.zeros_like(x))
        expected = (exact.layer_norm if layer else exact.rms_norm)(x, *own, 1e-6)
        assert same(y, expected), kind
        if np.isfinite(expected).all():
            rows, scales = quantized(x, *own, np.zeros(x.shape, np.int8), np.zeros(4, np.float32), results=2)
            own = [t.numpy() for t in quantize_rows(torch.from_numpy(expected))]
            assert all(np.array_equal(*pair) for pair in zip((rows, scales), own, strict=True)), kind


def test_rotary() -> None:
    random = np.random.default_rng(0)
    x, table = values("wide", (2, 3, 4, 40), random), values("normal", (9, 32), random)
    library = Library(exact_rotary(x.shape, table.shape))
    for position in (0, 4, 7, 100):
        (y,) = library(x, table, np.array([position]), np.zeros_like(x))
        assert same(y, exact.rotary(x, table, position))


@pytest.mark.parametrize(
    ("query", "rows", "window", "isa"),
    [
        ((2, 4, 1, 64), (2, 70), None, BEST),
        ((1, 4, 3, 40), (1, 40), None, LEAST),
        ((1, 2, 2, 32), (1, 51), (3, 20), LEAST),
        ((1, 1, 1, 64), (1, 37), None, SECOND),
        ((1, 1, 1, 8), (1, 12), (0, 12), BEST),
    ],
)
def test_attention(
    query: tuple[int, int, int, int], rows: tuple[int, int], window: tuple[int, int] | None, isa: InstructionSet
) -> None:
    """One row and several, whole blocks and not, an odd row, grouped heads, rings; of several instruction sets."""
    batch, _, steps, dim = query
    heads, size = rows
    library = Library(exact_attention(query, (batch, heads, size, dim), 0.3, window, isa=isa), isa)
    table = exact.EXP_TABLE.astype(np.int32)
    for seed, kind in enumerate([*KINDS, *KINDS]):
        random = np.random.default_rng(seed)
        q, other = values(kind, query, random), str(random.choice(KINDS))
        keys, held = cache(other, (batch, heads, size), dim, random), cache(kind, (batch, heads, size), dim, random)
        position = int(random.integers(0, size - steps + 1 if window is None else 3 * size))
        (y,) = library(q, keys, held, np.array([position]), table, np.zeros_like(q))
        operands = [*(torch.from_numpy(a) for a in (q, keys, held)), torch.tensor([position]), 0.3]
        operator = fastcar.exact_attention if window is None else fastcar.exact_window_attention
        assert same(y, operator(*operands, *(window or ())).numpy()), (kind, other, position)


@pytest.mark.parametrize(
    ("query", "rows", "isa"),
    [
        ((12, 4, 1, 64), (1, 1, 70), BEST),
        ((9, 2, 1, 32), (1, 1, 37), EIGHT),
        ((4, 4, 1, 40), (2, 2, 45), LEAST),
        ((3, 1, 1, 8), (1, 1, 12), BEST),
    ],
)
def test_attention_of_rows_of_a_video(
    query: tuple[int, int, int, int], rows: tuple[int, int, int], isa: InstructionSet
) -> None:
    """Positions of their own, a row that is not there, and NaNs that some rows see; tiles that are full and not."""
    batch, dim = query[0], query[3]
    library = Library(exact_rows_attention(query, (*rows, dim), 0.3, None, isa), isa)
    for seed, kind in enumerate([*KINDS, *KINDS]):
        random = np.random.default_rng(seed)
        q, other = values(kind, query, random), str(random.choice(KINDS))
        keys, held = cache(other, rows, dim, random), cache(kind, rows, dim, random)
        places = random.integers(0, rows[2], batch)
        places[1], places[2] = -1, 0
        operands = [torch.from_numpy(a) for a in (q, keys, held, places)]
        expected = fastcar.exact_attention(*operands, 0.3).numpy()
        (y,) = library(q, keys, held, places, exact.EXP_TABLE.astype(np.int32), np.zeros_like(q))
        assert same(y, expected), (kind, other)
        assert not y[1].any()
