"""The passes on TVM's modules."""

# pyright: reportInvalidTypeForm=false
# TVMScript annotates tensors with calls.

from typing import Any, cast

import numpy as np
import pytest
import tvm
from hypothesis import given
from hypothesis import strategies as st
from tvm import relax, te, topi

from fastcar_compile.codegen.tvm.isa import PORTABLE, host_instruction_set
from fastcar_compile.codegen.tvm.kernels.linear.floats import float_gemm
from fastcar_compile.codegen.tvm.kernels.linear.tiles import SMALL_BATCH
from fastcar_compile.codegen.tvm.kernels.registry import LINEARS, combine, combined_linears
from fastcar_compile.codegen.tvm.passes import PARALLEL_ELEMENTS, schedule_elementwise
from fastcar_compile.codegen.tvm.target import host_target
from fastcar_compile.errors import InternalError

from .kernel_runs import few
from .programs import Case, lowered

# Linears of one input in one kernel: bit for bit those of the single kernels, and found in real decode steps.


def _weights(kind: str, n: int, k: int, random: np.random.Generator) -> list[Any]:
    if kind == "linear_w8a8":
        return [random.integers(-128, 128, (n, k), np.int8), random.random(n, np.float32)]
    if kind == "linear_w4a8":
        groups = -(-k // 128)
        packed = random.integers(0, 256, (n, 64 * groups), np.uint8)
        return [packed, (random.random((n, groups)) + 0.1).astype(np.float16)]
    w = random.standard_normal((n, k), np.float32)
    return [{"linear_float32": w, "linear_float16": w.astype(np.float16)}.get(kind, _bfloat16(w))]


def _bfloat16(values: np.ndarray) -> Any:
    cut = tvm.runtime.empty(values.shape, "bfloat16")
    return cut.copyfrom((values.view(np.uint32) >> 16).astype(np.uint16).view(cut.numpy().dtype))


def _rows(kind: str, active: list[bool], k: int, random: np.random.Generator) -> list[np.ndarray]:
    kept = np.array(active)[:, None]
    if LINEARS[kind].activations == 2:
        return [random.integers(-127, 128, (len(active), k), np.int8) * kept, random.random(len(active), np.float32)]
    return [random.standard_normal((len(active), k), np.float32) * kept]


def _check(kind: str, active: list[bool], ns: list[int], k: int, best: bool, seed: int) -> None:
    """One module with the kernel of all, and the kernel of each."""
    random, m = np.random.default_rng(seed), len(active)
    isa = host_instruction_set() if best else PORTABLE
    functions = {"all": combined_linears(kind, m, tuple(ns), k, isa)}
    functions |= {f"one_{i}": LINEARS[kind].kernel(m, n, k, isa=isa) for i, n in enumerate(ns)}
    module = tvm.IRModule({name: f.with_attr("global_symbol", name) for name, f in functions.items()})
    library = tvm.compile(module, target=host_target())
    rows = [tvm.runtime.tensor(a) for a in _rows(kind, active, k, random)]
    weights = [[tvm.runtime.tensor(a) for a in _weights(kind, n, k, random)] for n in ns]
    found, expected = ([tvm.runtime.tensor(np.full((m, n), np.nan, np.float32)) for n in ns] for _ in range(2))
    library["all"](*rows, *(a for own in weights for a in own), *found)
    for i, own in enumerate(weights):
        library[f"one_{i}"](*rows, *own, expected[i])
        np.testing.assert_array_equal(found[i].numpy(), expected[i].numpy())
        assert np.isfinite(found[i].numpy()).all()


@few
@given(
    st.sampled_from(sorted(LINEARS)),
    st.lists(st.booleans(), min_size=1, max_size=SMALL_BATCH),
    st.lists(st.integers(1, 40), min_size=2, max_size=3),
    st.integers(1, 300),
    st.booleans(),
    st.integers(0, 99),
)
def test_any_shape_is_exact(kind: str, active: list[bool], ns: list[int], k: int, best: bool, seed: int) -> None:
    """Among them rows that are zero, which no kernel multiplies."""
    _check(kind, active, ns, k, best, seed)


@pytest.mark.parametrize("kind", ["linear_float32", "linear_bfloat16", "linear_float16"])
def test_parallel_loops_are_exact(kind: str) -> None:
    """Loops of different lengths in one, behind a linear that is too small for a loop of its own; the integer kinds are
    in test_integer_kernels.py."""
    ns = (13, 257, 300)
    _check(kind, [True, False, True], list(ns), 1031, True, 0)
    loops = [LINEARS[kind].kernel(3, n, 1031).script().count("T.parallel(") for n in ns]
    assert loops == [0, 1, 1]
    assert combined_linears(kind, 3, ns, 1031).script().count("T.parallel(") == 1


def test_a_kernel_with_more_parallel_loops_is_refused() -> None:
    with pytest.raises(InternalError, match="3 parallel loops cannot be combined"):
        combine([float_gemm(512, 64, 512), float_gemm(512, 64, 512)], 1)


def _calls(module: Any) -> list[tuple[str, int]]:
    """(kernel without its number, results) of every call of a linear kernel in the layer and its branches."""
    calls = []
    for variable, function in module.functions_items():
        if not isinstance(function, relax.Function) or not variable.name_hint.startswith("segment_1"):
            continue
        assert isinstance(function.body, relax.SeqExpr)
        for binding in (b for block in function.body.blocks for b in block.bindings):
            value = cast("Any", binding).value
            if isinstance(value, relax.Call) and value.op == tvm.ir.Op.get("relax.call_tir"):
                name = module[value.args[0]].attrs.get("fastcar.kernel", "")
                if str(name).startswith("linear"):
                    kind = value.ty_args[0]
                    calls.append((str(name), len(cast("Any", kind).fields) if isinstance(kind, relax.TupleType) else 1))
    return sorted(calls)


def test_a_layer_has_one_call_for_q_k_v_and_one_for_gate_and_up() -> None:
    """And one for each of the other two linears; grouped-query, so that q is wider than k and v."""
    calls = _calls(lowered(Case(quant="w8a8")).ir_module)
    assert calls == [("linear_w8a8", 1)] * 2 + [("linears", 2), ("linears", 3)]


# TVM's elementwise kernels: no temporaries, parallel where large, and the same bits.


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


@pytest.mark.parametrize("count", [2, 3])
def test_every_result_of_several_stays(count: int) -> None:
    x = te.placeholder((count * PARALLEL_ELEMENTS,), name="x")
    split: Any = te.create_prim_func([x, *topi.split(x, count, 0)])
    assert _scheduled(split).script().count('T.sblock("T_split') == count
