"""The operators of a draft bit for bit: eager, TVM for every instruction set of this CPU, and onnxruntime."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import tvm
from conftest import first_often
from exact.cases import values
from lowering.kernel_runs import HERE, compiled
from onnx_export.test_ops import run_all
from torch import Tensor

from fastcar_compile.codegen.tvm.isa import InstructionSet
from fastcar_compile.codegen.tvm.kernels import draft, gate

fastcar = torch.ops.fastcar
WIDTHS = (37, 1, 64)
ROWS = 5
KINDS = ("normal", "wide", "tiny", "huge", "bits", "zero")


def bits(tensor: Tensor) -> np.ndarray[Any, Any]:
    """Bits, but all NaN alike."""
    found = tensor.numpy().copy()
    found[np.isnan(found)] = np.nan
    return found.view(np.int32)


def rows_of(kind: str, width: int, seed: int, rows: int = ROWS) -> Tensor:
    """Rows of one kind; the last ones have NaN, infinities, and zeros alone."""
    found = torch.from_numpy(values(kind, (rows, width), np.random.default_rng(seed)))
    found[-3, seed % width], found[-2, -1] = float("nan"), float("inf") * (-1) ** seed
    found[-1] = 0
    return found


def arguments(name: str, kind: str, width: int) -> tuple[Tensor, ...]:
    gain = torch.tensor([0.0, 1.0, 0.3, 0.7, float("nan")])
    if name == "draft_gain":
        x, near = rows_of(kind, width, 0), rows_of(kind, width, 0) * torch.linspace(0, 2, ROWS)[:, None]
        return x, near, torch.linspace(0.25, 1.5, 15), torch.linspace(1, 0.05, 16)
    if name == "draft_difference":
        return torch.cat([rows_of(kind, width, 1), rows_of(kind, width, 2)]), gain
    parts = (rows_of(kind, width, seed) for seed in (3, 4))
    return (*parts, torch.from_numpy(values(kind, (width,), np.random.default_rng(6))), gain)


def by_tvm(name: str, given: tuple[Tensor, ...], isa: InstructionSet) -> Tensor:
    def call(kernel: Any, inputs: tuple[Tensor, ...], like: Tensor) -> Tensor:
        y = tvm.runtime.tensor(np.zeros(tuple(like.shape), np.float32))
        compiled(kernel, isa)["main"](*(tvm.runtime.tensor(t.numpy()) for t in inputs), y)
        return torch.from_numpy(y.numpy())

    width = given[0].shape[1]
    if name == "draft_gain":
        change = call(gate.input_delta(ROWS, width), given[:2], torch.empty(ROWS))
        return call(draft.draft_gain(ROWS, 16), (change, *given[2:]), torch.empty(ROWS))
    return call(getattr(draft, name)(ROWS, width), given, torch.empty(ROWS, width))


@pytest.mark.parametrize("width", first_often(WIDTHS))
@pytest.mark.parametrize("name", ["draft_gain", "draft_difference", "draft_sum"])
def test_every_backend_has_the_same_bits(name: str, width: int, tmp_path: Path) -> None:
    calls = [arguments(name, kind, width) for kind in KINDS]
    operator = getattr(fastcar, name).default
    expected = [operator(*given) for given in calls]
    found = {isa.name: [by_tvm(name, given, isa) for given in calls] for isa in HERE}
    found["onnxruntime"] = run_all(operator, calls, (), tmp_path / "model.onnx")
    for backend, results in found.items():
        for kind, result, wanted in zip(KINDS, results, expected, strict=True):
            np.testing.assert_array_equal(bits(result), bits(wanted), err_msg=f"{backend} {kind}")


def test_gain_of_every_bin() -> None:
    """An edge belongs to the bin above it; a change that is not a number has the gain 0."""
    x = torch.ones(6, 4)
    cached = x * torch.tensor([1.0, 0.75, 0.5, 0.25, 0.0, float("nan")])[:, None]
    edges, gains = torch.tensor([0.25, 0.25, 0.75, 2.0]), torch.tensor([1.0, 0.9, 0.6, 0.3, 0.1])
    assert torch.equal(fastcar.draft_gain(x, cached, edges, gains), torch.tensor([1.0, 0.6, 0.6, 0.3, 0.3, 0.0]))


@pytest.mark.filterwarnings("ignore:invalid value")
def test_every_operation_is_rounded_once() -> None:
    """Against numpy, whose float32 operations are rounded one by one."""
    both, gain = (t.numpy() for t in arguments("draft_difference", "normal", 37))
    wanted = both[:ROWS] - gain[:, None] * both[ROWS:]
    found = fastcar.draft_difference(torch.from_numpy(both), torch.from_numpy(gain))
    np.testing.assert_array_equal(found.numpy(), wanted)
    left, cached, bias, gain = (t.numpy() for t in arguments("draft_sum", "normal", 37))
    wanted = (bias + gain[:, None] * (cached - bias)) + left
    given = (torch.from_numpy(v) for v in (left, cached, bias, gain))
    np.testing.assert_array_equal(fastcar.draft_sum(*given).numpy(), wanted)
