"""Rows of many layers: joined and taken apart in steps, each row in its place."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm
from hypothesis import given
from hypothesis import strategies as st

from fastcar_compile.codegen.tvm.kernels.cache import concat_rows, split_rows
from fastcar_compile.codegen.tvm.target import host_target

from .kernel_runs import few
from .programs import FRAME, Case, cpu_backend, eager_backend, export, lowered, tokens

INF = float("inf")


def _run(kernel: tvm.tirx.PrimFunc, arrays: list[np.ndarray]) -> list[np.ndarray]:
    library = tvm.compile(tvm.IRModule({"f": kernel.with_attr("global_symbol", "f")}), target=host_target())
    tensors = [tvm.runtime.tensor(a) for a in arrays]
    library["f"](*tensors)
    return [t.numpy() for t in tensors]


@few
@given(
    sizes=st.lists(st.integers(1, 5), min_size=2, max_size=8),
    dtype=st.sampled_from(["float32", "bool"]),
    seed=st.integers(0, 99),
)
def test_joined_rows_follow_each_other(sizes: list[int], dtype: str, seed: int) -> None:
    random = np.random.default_rng(seed)
    rows = [random.integers(0, 2, n).astype(dtype) for n in sizes]
    *_, joined = _run(concat_rows(tuple(sizes), dtype), [*rows, np.zeros(sum(sizes), dtype)])
    np.testing.assert_array_equal(joined, np.concatenate(rows))


@few
@given(count=st.integers(2, 8), size=st.integers(1, 5))
def test_parts_are_in_order(count: int, size: int) -> None:
    whole = np.arange(count * size, dtype=np.float32)
    blank = [np.full(size, -1, np.float32) for _ in range(count)]
    _, *parts = _run(split_rows(count, size, "float32"), [whole, *blank])
    np.testing.assert_array_equal(np.stack(parts), whole.reshape(count, size))


def many(layers: int) -> Case:
    """The last layer never replays."""
    return Case(thresholds=(0.0,) * (layers - 1) + (None,))


@pytest.mark.parametrize("layers", [11, 26])
def test_every_layer_has_its_own_threshold_and_decision(layers: int, tmp_path: Path) -> None:
    """More layers than one kernel takes, one of which never replays; a prime number of them and others."""
    case = many(layers)
    eager, cpu = eager_backend(case), cpu_backend(case, export(case, tmp_path))
    random = np.random.default_rng(layers)
    seen = np.zeros((layers, 2), bool)
    for i, token in enumerate(tokens(case, 3 * FRAME)):
        limits = np.where(random.random(layers) < 0.5, -INF, INF).astype(np.float32)
        expected, actual = (backend.decode(token, i, i, limits) for backend in (eager, cpu))
        np.testing.assert_array_equal(actual.decisions, expected.decisions)
        np.testing.assert_allclose(actual.scores, expected.scores, atol=1e-4)
        seen |= actual.decisions
    np.testing.assert_array_equal(seen.all(axis=1), np.arange(layers) < layers - 1)


def test_no_kernel_has_an_argument_for_every_layer() -> None:
    """They take seconds to compile; the entry of the library is no kernel."""
    module = lowered(many(26)).ir_module
    kernels: list[Any] = [f for _, f in module.functions_items() if isinstance(f, tvm.tirx.PrimFunc)]
    assert max(len(f.params) for f in kernels) <= 14
