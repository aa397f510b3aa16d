"""A step is one function: its layers' statements in order, with buffers that no later layer can overwrite."""

# pyright: reportInvalidTypeForm=false
# TVMScript annotates tensors with calls.

from typing import Any, cast

import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.script import ir as I
from tvm.script import relax as R

from fastcar_compile.codegen.tvm.flatten import flatten
from fastcar_compile.codegen.tvm.pipeline import check_of
from fastcar_compile.codegen.tvm.target import host_target

from .programs import Case, lowered_whole

ENTRY = "run"
CHECK = check_of(ENTRY)


@I.ir_module
class Layers:
    """Two layers; one returns a buffer, and its argument where the flag is set."""

    @R.function
    def run(x: R.Tensor((4,), "float32"), flag: R.Tensor((), "bool")):
        cls = Layers
        a = cls.layer(x, flag)
        first, same = a[0], a[1]
        b = cls.layer(first, flag)
        second, again = b[0], b[1]
        return (first, second, same, again)

    @R.function
    def layer(x: R.Tensor((4,), "float32"), flag: R.Tensor((), "bool")) -> R.Tuple(
        R.Tensor((4,), "float32"), R.Tensor((4,), "float32")
    ):
        cls = Layers
        doubled = R.add(x, x)
        exponential = R.exp(R.permute_dims(R.reshape(doubled, (2, 2))))
        if flag:
            found = cls.branch(x)
            chosen = found
        else:
            chosen = R.sqrt(doubled)
        total = R.add(R.reshape(exponential, (4,)), R.const(1.0))
        return (total, chosen)

    @R.function
    def branch(x: R.Tensor((4,), "float32")) -> R.Tensor((4,), "float32"):
        return x


def _built(module: tvm.IRModule, flat: bool) -> tuple[Any, Any]:
    default = relax.backend.cpu_generic.get_default_pipeline(host_target())
    passes = [default, *([flatten({ENTRY: CHECK})] if flat else [])]
    executable = tvm.compile(module, target=host_target(), relax_pipeline=tvm.transform.Sequential(passes))
    return executable, relax.VirtualMachine(executable, cast("Any", tvm.cpu()))


def _tensor(values: Any, dtype: str) -> Any:
    return tvm.runtime.tensor(np.array(values, dtype))


def _functions(executable: Any) -> dict[str, str]:
    """Text of the virtual machine's instructions by function."""
    return dict(part.split(":\n", 1) for part in executable.as_text().split("@") if ":\n" in part)


@pytest.mark.parametrize("flag", [True, False])
def test_a_flat_step_computes_the_same(flag: bool) -> None:
    """With results of both layers held, and arguments untouched."""
    x = np.array([0.5, -1.0, 0.25, 2.0], np.float32)
    results = []
    for flat in (False, True):
        argument = _tensor(x, "float32")
        _, machine = _built(Layers, flat)
        results.append([r.numpy() for r in machine[ENTRY](argument, _tensor(flag, "bool"))])
        np.testing.assert_array_equal(argument.numpy(), x)
    for found, expected in zip(*results, strict=True):
        np.testing.assert_array_equal(found, expected)
    first, second, same, _ = results[1]
    np.testing.assert_allclose(first, np.exp(2 * x.reshape(2, 2).T).reshape(-1) + 1, rtol=1e-6)
    assert not np.array_equal(first, second)
    assert np.array_equal(same, x) == flag


def test_only_what_a_layer_returns_is_made_anew() -> None:
    """TVM makes all of them in each call."""
    (flat, _), (called, _) = _built(Layers, True), _built(Layers, False)
    assert set(_functions(flat)) == {ENTRY, CHECK}
    assert set(_functions(called)) > {ENTRY, "layer"}
    made = _functions(called)["layer"].count("vm.builtin.alloc_tensor")
    returned = 2
    assert _functions(flat)[ENTRY].count("vm.builtin.alloc_tensor") == (made - returned) + 2 * returned


def test_the_check_refuses_what_the_step_would_not_notice() -> None:
    _, machine = _built(Layers, True)
    machine[CHECK](_tensor([0, 0, 0, 0], "float32"), _tensor(True, "bool"))
    with pytest.raises((ValueError, RuntimeError), match=r"ErrorContext\(fn=run"):
        machine[CHECK](_tensor([0, 0, 0, 0], "float16"), _tensor(True, "bool"))
    with pytest.raises((ValueError, RuntimeError), match=r"ErrorContext\(fn=run"):
        machine[CHECK](_tensor([0, 0, 0], "float32"), _tensor(True, "bool"))


def test_every_program_is_one_function() -> None:
    """Of a real decoder, with branches for replay; its layers make only what they hand on."""
    functions = _functions(lowered_whole(Case()).executable)
    assert set(functions) == {"decode", "check_decode", "prefill", "check_prefill"}
    for name in ("decode", "prefill"):
        for check in ("check_tensor_info", "match_shape"):
            assert check in functions[check_of(name)]
            assert check not in functions[name]
