"""TVM's elementwise kernels: no temporaries, parallel where large, and the same bits."""

from typing import Any

import numpy as np
import pytest
import tvm
from tvm import te, topi

from fastcar_compile.codegen.tvm.elementwise import PARALLEL_ELEMENTS, schedule_elementwise
from fastcar_compile.codegen.tvm.isa import host_instruction_set
from fastcar_compile.codegen.tvm.target import host_target


def _kernel(rows: int) -> Any:
    """(x * w) + x of x [rows, 64], then as [rows, 4, 16] with the last two axes exchanged."""
    x, w = te.placeholder((rows, 64), name="x"), te.placeholder((64,), name="w")
    added = topi.add(topi.multiply(topi.reshape(x, (rows, 64)), w), x)
    return te.create_prim_func([x, w, topi.transpose(topi.reshape(added, (rows, 4, 16)), (0, 2, 1))])


def _scheduled(kernel: Any) -> Any:
    return schedule_elementwise()(tvm.IRModule({"main": kernel}))["main"]


def _run(kernel: Any, rows: int) -> np.ndarray[Any, Any]:
    rng = np.random.default_rng(0)
    given = [rng.standard_normal(shape, dtype=np.float32) for shape in ((rows, 64), (64,))]
    y = tvm.runtime.tensor(np.zeros((rows, 16, 4), np.float32))
    module = tvm.IRModule({"main": kernel.with_attr("global_symbol", "main")})
    compiled: Any = tvm.compile(module, target=host_target(host_instruction_set()))
    compiled["main"](*map(tvm.runtime.tensor, given), y)
    return y.numpy()


def test_only_a_product_before_a_sum_is_stored() -> None:
    """LLVM would contract the two. Everything else is computed where it is used."""
    rows = PARALLEL_ELEMENTS // 64
    kernel = _kernel(rows)
    text = _scheduled(kernel).script()
    assert kernel.script().count("sblock_alloc_buffer") == 4
    assert text.count("sblock_alloc_buffer") == 1
    assert text.count("T.parallel(") == 2
    np.testing.assert_array_equal(_run(_scheduled(kernel), rows), _run(kernel, rows))


def test_small_kernels_and_reductions_stay() -> None:
    small = _kernel(4)
    assert _scheduled(small).same_as(small)
    x = te.placeholder((PARALLEL_ELEMENTS, 2), name="x")
    total: Any = te.create_prim_func([x, topi.sum(x, 1)])
    assert _scheduled(total).same_as(total)


@pytest.mark.parametrize("count", [2, 3])
def test_every_result_of_several_stays(count: int) -> None:
    x = te.placeholder((count * PARALLEL_ELEMENTS,), name="x")
    split: Any = te.create_prim_func([x, *topi.split(x, count, 0)])
    assert _scheduled(split).script().count('T.sblock("T_split') == count
