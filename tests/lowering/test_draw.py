"""The compiled draw is that of `Sampling`, bit for bit."""

import numpy as np
import pytest
import tvm
from conftest import first_often

from fastcar_compile.codegen.tvm.isa import InstructionSet
from fastcar_compile.codegen.tvm.kernels.draw import draw
from fastcar_compile.codegen.tvm.pipeline import kernel_context
from fastcar_compile.codegen.tvm.target import host_target
from fastcar_compile.ir.draws import table
from fastcar_compile.runtime.sampling import Sampling

from .kernel_runs import HERE, named

ROWS, VOCABULARY = 6, 90


def rows_of(random: np.random.Generator, case: int, width: int) -> np.ndarray:
    """Logits float32 [ROWS, width]: sharp and flat ones, ties, zeros of both signs, and few that are not -inf."""
    rows = (random.standard_normal((ROWS, width)) * (0.1, 1, 6)[case % 3]).astype(np.float32)
    rows = np.round(rows) if case % 4 == 0 else rows
    if case % 5 == 0:
        rows[random.random(rows.shape) < 0.9] = -np.inf
        rows[:, :2] = -0.0, 0.0
    return rows


@pytest.mark.parametrize("isa", first_often(HERE), ids=lambda isa: isa.name)
def test_a_compiled_draw_is_that_of_python(isa: InstructionSet) -> None:
    """Among all and among few tokens, of the whole vocabulary and a part, of one and of several sequences."""
    random = np.random.default_rng(5)
    with kernel_context():
        function = named(draw(ROWS, VOCABULARY), "draw").with_attr("tirx.noalias", True)
        run = tvm.tirx.build(tvm.IRModule({"draw": function}), target=host_target(isa))["draw"]
    logits, drawn = np.zeros((ROWS, 1, VOCABULARY), np.float32), set[int]()
    for case in range(120):
        top_k, first, width = [(0, 0, VOCABULARY), (7, 0, VOCABULARY), (7, 11, 43), (200, 3, 50)][case % 4]
        seed, position = int(random.integers(0, 2**63)), int(random.integers(0, 2**20))
        sequences, code, temperature = (1, 2, 3)[case % 3], case % 2, (1.0, 0.3, 1e-30, 2e5)[case % 7 % 4]
        rows, count = rows_of(random, case, width), ROWS // sequences
        logits[:, 0, first : first + width] = rows
        numbers = [ROWS, count, position, code, seed & 0xFFFFFFFF, seed >> 32, top_k, first, width]
        given = (logits, np.array(numbers), np.array([temperature]), table(), np.zeros(ROWS, np.int64))
        tensors = [tvm.runtime.tensor(array) for array in given]
        run(*tensors)
        choose = Sampling(temperature, top_k or None, seed=seed).start(np.zeros((sequences, 1), np.int64))
        read = np.zeros((sequences, count), np.int64)
        expected = choose.several(rows.reshape(sequences, count, width), position, read, code)
        np.testing.assert_array_equal(tensors[-1].numpy(), expected.reshape(-1))
        drawn |= set(expected.reshape(-1).tolist())
    assert len(drawn) > VOCABULARY / 2


def test_what_is_not_finite_is_left_to_python() -> None:
    inf, nan = np.inf, np.nan
    rows = np.array([[0, 1, nan, 2], [0, 1, inf, 2], [-inf] * 4, [-nan, 0, 0, 0], [-inf, 3, -inf, -inf]], np.float32)
    with kernel_context():
        function = named(draw(6, 4), "draw").with_attr("tirx.noalias", True)
        run = tvm.tirx.build(tvm.IRModule({"draw": function}), target=host_target(HERE[0]))["draw"]
    logits = np.zeros((6, 1, 4), np.float32)
    logits[:5, 0] = rows
    given = (logits, np.array([5, 5, 0, 0, 1, 0, 2, 0, 4]), np.ones(1), table(), np.zeros(6, np.int64))
    tensors = [tvm.runtime.tensor(array) for array in given]
    run(*tensors)
    assert tensors[-1].numpy().tolist() == [-1, -1, -1, -1, 1, -1]
