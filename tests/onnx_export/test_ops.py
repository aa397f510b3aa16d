"""Every ONNX operator definition against the eager one."""

import ctypes
import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from conftest import first_often
from lowering.kernel_runs import name_of
from lowering.test_cached import many_floats, many_rows
from torch import Tensor, nn

from fastcar_compile.codegen.onnx.linear import ZERO_POINT
from fastcar_compile.codegen.onnx.segments import quiet_exporter
from fastcar_compile.codegen.onnx.translate import translate, translation_table
from fastcar_compile.ir.ops import linear as quant
from fastcar_compile.ir.ops.linear import FACTORS
from fastcar_compile.ir.ops.operator import stored
from fastcar_compile.ir.weights import to_numpy, to_torch

fastcar = torch.ops.fastcar


class _Call(nn.Module):
    def __init__(self, op: Callable[..., Tensor], options: tuple[Any, ...]) -> None:
        super().__init__()
        self.op, self.options = op, options

    def forward(self, *tensors: Tensor) -> Tensor:
        return self.op(*tensors, *self.options)


def export(op: Callable[..., Tensor], tensors: tuple[Tensor, ...], options: tuple[Any, ...], path: Path) -> None:
    """Write the operator alone as a model."""
    exported = torch.export.export(_Call(op, options), tensors, strict=False)
    with quiet_exporter():
        onnx.save(translate(exported), path)


def run_onnx(op: Callable[..., Tensor], tensors: tuple[Tensor, ...], options: tuple[Any, ...], path: Path) -> Tensor:
    """The operator alone, exported and run by onnxruntime."""
    return run_all(op, [tensors], options, path)[0]


def run_all(
    op: Callable[..., Tensor], calls: Sequence[tuple[Tensor, ...]], options: tuple[Any, ...], path: Path
) -> list[Tensor]:
    """The operator alone, exported once and run with the tensors of each call, whose shapes are alike."""
    export(op, calls[0], options, path)
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    names = [i.name for i in session.get_inputs()]
    feeds = [{name: _value(t) for name, t in zip(names, tensors, strict=True)} for tensors in calls]
    output = [session.get_outputs()[0].name]
    return [_tensor(session.run_with_ort_values(output, feed)[0]) for feed in feeds]


def _value(tensor: Tensor) -> Any:
    """By way of bytes: onnxruntime takes and gives no arrays of bfloat16."""
    array = to_numpy(tensor)
    kind = onnx.helper.np_dtype_to_tensor_dtype(array.dtype)
    return onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(array, kind)


def _tensor(value: Any) -> Tensor:
    raw = ctypes.string_at(value.data_ptr(), value.tensor_size_in_bytes())
    return to_torch(np.frombuffer(bytearray(raw), onnx.helper.tensor_dtype_to_np_dtype(value.element_type()))).reshape(
        value.shape()
    )


def same(path: Path, op: Any, calls: Sequence[tuple[Tensor, ...]], *options: Any) -> list[Tensor]:
    """Return what onnxruntime gives: the bits of the eager operator."""
    actual = run_all(op.default, calls, options, path)
    for found, tensors in zip(actual, calls, strict=True):
        assert torch.equal(found, op(*tensors, *options))
    return actual


def at(position: int) -> Tensor:
    return torch.tensor([position])


@pytest.fixture
def path(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    return tmp_path / "op.onnx"


def test_cache_write(path: Path) -> None:
    cache, rows = torch.randn(2, 2, 9, 4), torch.randn(2, 2, 1, 4)
    same(path, fastcar.cache_write, [(cache, rows, at(position)) for position in (0, 3, 8)])


@pytest.mark.parametrize("dtype", first_often([torch.int8, torch.float32, torch.float16, torch.bfloat16], 2))
def test_rows_of_two_videos(path: Path, dtype: torch.dtype) -> None:
    """Written side by side, one of them nowhere, and attended to; the same with a ring of six rows behind one sink."""
    cache, rows, query = stored(torch.randn(2, 2, 7, 40), dtype), torch.randn(4, 2, 1, 40), torch.randn(4, 4, 1, 40)
    for position in (torch.tensor([3, 4, 0, -1]), torch.tensor([5, 6, 2, 3])):
        (written,) = same(path, fastcar.cache_write, [(cache, rows, position)])
        (ring,) = same(path, fastcar.ring_write, [(cache, rows, position + 4 * (position >= 0))], 1)
        for kept, call in ((written, fastcar.attention), (ring, fastcar.window_attention)):
            more = (0.4,) if call is fastcar.attention else (0.4, 1, 4)
            (found,) = run_all(call.default, [(query, kept, kept, position)], more, path)
            torch.testing.assert_close(found, call(query, kept, kept, position, *more))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_attention_sees_the_filled_part_only(path: Path, dtype: torch.dtype) -> None:
    calls = []
    for position in (0, 5, 8):
        caches = torch.randn(2, 2, 2, 9, 40)
        caches[..., position + 1 :, :] = torch.nan
        calls.append((torch.randn(2, 6, 1, 40), *(stored(cache, dtype) for cache in caches), at(position)))
    for actual, tensors in zip(run_all(fastcar.attention.default, calls, (0.4,), path), calls, strict=True):
        torch.testing.assert_close(actual, fastcar.attention(*tensors, 0.4))


@pytest.mark.parametrize("steps", [1, 3])
def test_attention_to_a_context(path: Path, steps: int) -> None:
    mask = torch.where(torch.rand(2, 1, 1, 7) < 0.5, torch.finfo(torch.float32).min, 0.0)
    tensors = (torch.randn(2, 6, steps, 8), torch.randn(2, 2, 7, 8), torch.randn(2, 2, 7, 8))
    for given, softcap in ((None, None), (mask, 0.7)):

        def call(*args: Tensor, given: Tensor | None = given, softcap: float | None = softcap) -> Tensor:
            return fastcar.context_attention(*args[:3], 0.4, args[3] if given is not None else None, softcap)

        inputs = tensors if given is None else (*tensors, given)
        torch.testing.assert_close(run_onnx(call, inputs, (), path), call(*inputs))


def test_tas(path: Path) -> None:
    """Of any position; of one query that is denormal, and of others whose products are too large, or NaN."""
    calls = [(torch.randn(2, 6, 1, 8), torch.randn(2, 2, 9, 8), at(position)) for position in (2, 7, 8)]
    same(path, fastcar.tas, calls, 5, 0.3)
    query = torch.tensor([1e-40, 3e38, float("inf"), float("nan")]).reshape(4, 1, 1, 1)
    (actual,) = same(path, fastcar.tas, [(query, torch.full((4, 1, 9, 1), 3e4), at(8))], 5, 0.5)
    assert actual.tolist() == [0.0, 2.0**21, -(2.0**21), -(2.0**21)]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rows_of_16_bits(path: Path, dtype: torch.dtype) -> None:
    """Every value, ties, subnormals and infinities: written as PyTorch writes them, and scored alike."""
    rows = many_floats(name_of(dtype)).reshape(512, 1, 1, 128)
    cache, known = stored(torch.zeros_like(rows), dtype), torch.where(rows.isnan(), 1, rows)
    (written,) = same(path, fastcar.cache_write, [(cache, known, at(0))])
    same(path, fastcar.tas, [(torch.randn(512, 2, 1, 128), written, at(0))], 5, 0.3)
    (written,) = run_all(fastcar.cache_write.default, [(cache, rows, at(0))], (), path)
    assert torch.equal(written.isnan(), rows.isnan())


def test_int8_rows(path: Path) -> None:
    """Every exponent, zeros, infinities and NaN: written as PyTorch writes them, and scored alike."""
    rows = many_rows(512, 40)[:, None, None]
    cache = stored(torch.zeros_like(rows), torch.int8)
    (written,) = same(path, fastcar.cache_write, [(cache, rows, at(0))])
    same(path, fastcar.tas, [(torch.randn(512, 2, 1, 40), written, at(0))], 5, 0.3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int32])
def test_slots(path: Path, dtype: torch.dtype) -> None:
    shape = (5, 2, 3) if dtype == torch.float32 else (5, 2)
    cache = torch.arange(int(np.prod(shape)), dtype=dtype).reshape(shape)
    same(path, fastcar.slot_read, [(cache, at(step)) for step in (0, 6, 13)])
    same(path, fastcar.slot_write, [(cache, -cache[1], at(step)) for step in (0, 6, 13)])


@pytest.mark.parametrize(("rows", "inner", "outer"), [(1, 352, 128), (3, 70, 33)])
def test_linear_w8a8_accumulates_exactly(path: Path, rows: int, inner: int, outer: int) -> None:
    """Extreme weights: 16-bit intermediate sums would saturate. onnxruntime fuses the scaling, so not bit for bit."""
    x = torch.randn(rows, inner)
    x[0] = 1.0
    weight = torch.full((outer, inner), 127, dtype=torch.int8)
    weight[1::2] = torch.randint(-127, 128, weight[1::2].shape, dtype=torch.int8)
    scale, bias = torch.rand(outer), torch.randn(outer)
    unsigned = (weight.to(torch.int16) + ZERO_POINT).to(torch.uint8)
    for last, tensors, options in ((None, (), (None,)), (bias, (bias,), ())):
        actual = run_onnx(fastcar.linear_w8a8.default, (x, unsigned, scale, *tensors), options, path)
        torch.testing.assert_close(actual, quant.linear_w8a8(x, weight, scale, last), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("rows", "inner", "outer"), [((1,), 352, 128), ((2, 3), 70, 33), ((3,), 256, 5)])
def test_linear_w4a8_accumulates_exactly(path: Path, rows: tuple[int, ...], inner: int, outer: int) -> None:
    """Every weight is 7 or -8 in half of the channels: the largest sums there are."""
    x, scale = torch.randn(*rows, inner), torch.rand(outer, quant.group_count(inner)).to(torch.float16)
    weight = torch.randint(-8, 8, (outer, quant.GROUP * scale.shape[1]), dtype=torch.int8)
    weight[::2] = torch.where(torch.rand(weight[::2].shape) < 0.5, 7, -8)
    packed, bias = quant.pack_int4(weight), torch.randn(outer)
    same(path, fastcar.linear_w4a8, [(x, packed, scale)], None)
    same(path, fastcar.linear_w4a8, [(x, packed, scale, bias)])


@pytest.mark.parametrize("activation", sorted(FACTORS))
def test_activation_factor_is_exact(path: Path, activation: str) -> None:
    x = torch.cat([torch.linspace(-20, 20, 4001), torch.tensor([-16.0, 16.0, 0.0, -0.0])])
    same(path, fastcar.activation_factor, [(x,)], activation)


def test_every_definition_takes_its_operators_arguments() -> None:
    """By the names of the schema, and with its defaults: the exporter binds arguments by name."""
    for operator, definition in translation_table().items():
        parameters = inspect.signature(definition).parameters.values()
        found = [(p.name, None if p.default is p.empty else p.default) for p in parameters]
        declared = operator._schema.arguments
        assert found == [(a.name, a.default_value if a.has_default_value() else None) for a in declared], operator
