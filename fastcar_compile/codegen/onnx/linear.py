"""Quantisation formats in ONNX: a linear for each, and the activation between two of them.

Each mirrors the eager definition of the same name in ops/.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
from onnx import TensorProto
from onnxscript import opset18

from fastcar_compile.ir.ops import linear as activations
from fastcar_compile.ir.ops import linear as quant
from fastcar_compile.ir.types import INACTIVE

if TYPE_CHECKING:
    from onnxscript.ir import Value
else:
    Value = Any  # torch's exporter reads the annotations, and takes a class with a `dtype` for one tensor type

op: Any = opset18
"""The operators. While a definition is traced, each takes and returns a `Value`, which its annotations do not say."""


def constant(value: object, dtype: type = np.float32) -> Value:
    """Return a constant of this shape and dtype."""
    return op.Constant(value=onnx.numpy_helper.from_array(np.array(value, dtype)))


def ints(*values: int) -> Value:
    """Return an int64 vector."""
    return constant(values, np.int64)


def scalar(value: int) -> Value:
    """Return one int64 without an axis."""
    return constant(value, np.int64)


def int32(value: int) -> Value:
    """Return one int32."""
    return constant(value, np.int32)


def uint8(value: int) -> Value:
    """Return one uint8."""
    return constant(value, np.uint8)


def floats(value: float | Sequence[float]) -> Value:
    """Return float32 values."""
    return constant(value)


def shape(value: Value) -> list[int]:
    """Return the shape of a traced value; every shape is static."""
    assert value.shape is not None
    return list(value.shape.numpy())


def dtype_name(value: Value) -> str:
    """Return numpy's name of the type of a traced value."""
    assert value.dtype is not None
    return value.dtype.numpy().name


def cast(value: Value, to: int) -> Value:
    """Return the value as another type, a member of TensorProto."""
    return op.Cast(value, to=to)


ZERO_POINT = 128
"""Zero point of weights and activations. Both are unsigned here: the unsigned-by-unsigned kernels of onnxruntime are
exact on every x86-64, while signed weights saturate at 16 bits where the CPU has no VNNI (its docs, "Quantization",
U8S8)."""


def _quantized_rows(x: Value) -> tuple[Value, Value, Value]:
    """Return uint8 rows with zero point 128, their scale [..., 1] in float32, and the zero point."""
    amax = op.Max(op.ReduceMax(op.Abs(x), ints(-1), keepdims=1), floats(1e-30))
    # 127 / amax is one division, as in `ir.ops.linear.quantize_rows`: its reciprocal times 127 would round twice.
    rounded = op.Round(op.Mul(x, op.Div(floats(127.0), amax)))
    clipped = op.Clip(rounded, floats(-127.0), floats(127.0))
    # -127 .. 127 becomes 1 .. 255. The integer product takes the zero points off again, so it is the signed one.
    quantized = cast(op.Add(clipped, floats(ZERO_POINT)), TensorProto.UINT8)
    return quantized, op.Mul(amax, floats(quant._INV_127)), uint8(ZERO_POINT)


def linear_half(x: Value, weight: Value, bias: Value | None) -> Value:
    """Return the product with the weights cast to float32, which is exact."""
    y = op.MatMul(x, op.Transpose(cast(weight, TensorProto.FLOAT), perm=[1, 0]))
    return y if bias is None else op.Add(y, bias)


def linear_w8a8(x: Value, qweight: Value, wscale: Value, bias: Value | None) -> Value:
    """Return dynamic int8 rows times int8 weights; `qweight` is uint8 [N, K] with zero point 128 (see `ZERO_POINT`)."""
    quantized, row_scale, zero = _quantized_rows(x)
    acc = op.MatMulInteger(quantized, op.Transpose(qweight, perm=[1, 0]), zero, zero)
    y = op.Mul(cast(acc, TensorProto.FLOAT), op.Mul(row_scale, wscale))
    return y if bias is None else op.Add(y, bias)


def linear_w4a8(x: Value, qweight: Value, wscale: Value, bias: Value | None) -> Value:
    """Return dynamic int8 rows times int4 groups; `qweight` is packed uint8 [N, 64 * G], `wscale` float16 [N, G].

    CumSum adds the groups in ascending order, one rounding each, as the eager definition does.
    """
    (channels, packed), (*rows, inputs) = shape(qweight), shape(x)
    groups, count = packed * 2 // quant.GROUP, int(np.prod(rows))
    quantized, row_scale, zero = _quantized_rows(op.Reshape(x, ints(count, inputs)))
    spare = ints(0, 0, 0, groups * quant.GROUP - inputs)
    # Padded with the zero point, which counts as 0.
    left = op.Reshape(op.Pad(quantized, spare, zero), ints(count, groups, quant.GROUP))
    halves = op.Reshape(qweight, ints(channels, groups, quant.GROUP // 2))
    # Byte i of a group holds element i in its low half, and element 64 + i in its high half.
    low, high = op.BitwiseAnd(halves, uint8(15)), op.BitShift(halves, uint8(4), direction="RIGHT")
    nibbles = op.Concat(low, high, axis=2)
    # Nibble + 8, mod 16, is the weight + 8: with 120 more its zero point is 128 too.
    right = op.Add(op.BitwiseAnd(op.Add(nibbles, uint8(8)), uint8(15)), uint8(ZERO_POINT - 8))
    acc = op.MatMulInteger(op.Transpose(left, perm=[1, 0, 2]), op.Transpose(right, perm=[1, 2, 0]), zero, zero)
    scales = op.Unsqueeze(op.Transpose(cast(wscale, TensorProto.FLOAT), perm=[1, 0]), ints(1))
    sums = op.CumSum(op.Mul(cast(acc, TensorProto.FLOAT), scales), ints(0))
    total = op.Squeeze(op.Slice(sums, ints(groups - 1), ints(groups), ints(0)), ints(0))
    y = op.Reshape(op.Mul(total, row_scale), ints(*rows, channels))
    return y if bias is None else op.Add(y, bias)


def activation_factor(x: Value, activation: str) -> Value:
    """Return the table's factor, made in integers. Every operand is non-negative, so an integer division is a shift."""
    table = constant(activations.factor_table(activation).numpy(), np.int32)
    kind = activations.FACTORS[activation]
    rounded = op.Round(op.Mul(op.Clip(x, floats(-kind.limit), floats(kind.limit)), floats(kind.input_scale)))
    fixed = op.Add(cast(rounded, TensorProto.INT32), int32(activations.INPUT_STEPS))
    index = op.Min(op.Div(fixed, int32(64)), int32(activations.KNOTS - 2))
    fraction = op.Sub(fixed, op.Mul(index, int32(64)))
    low, high = op.Gather(table, index), op.Gather(table, op.Add(index, int32(1)))
    blend = op.Add(op.Mul(low, op.Sub(int32(64), fraction)), op.Mul(high, fraction))
    shifted = op.Div(op.Add(blend, int32(32)), int32(64))
    return op.Mul(cast(shifted, TensorProto.FLOAT), floats(2.0**-activations.FRACTION_BITS))


def gate(
    score: Value,
    threshold: Value,
    step: Value,
    chain: Value,
    stride: int,
    max_chain: int,
    couple_cfg: bool,
    refresh_every: int = 0,
    at_most: bool = False,
) -> Value:
    """Return which rows replay, by threshold, first frame, refresh, chain limit and guidance coupling."""
    passes = op.LessOrEqual(score, threshold) if at_most else op.GreaterOrEqual(score, threshold)
    replay = op.And(passes, op.GreaterOrEqual(step, ints(stride)))
    if refresh_every > 0:
        phase = op.Mod(op.Div(step, ints(stride)), ints(refresh_every))
        replay = op.And(replay, op.Greater(phase, ints(0)))
    if max_chain >= 0:
        # Counters are int32, and ONNX compares equal types only.
        replay = op.And(replay, op.Less(_slots(chain, step, shape(score)[0]), int32(max_chain)))
    if couple_cfg:
        # Rows b and b + B / 2 are a pair, so the conjunction of the halves stands for both.
        half = shape(score)[0] // 2
        both = op.And(op.Slice(replay, ints(0), ints(half)), op.Slice(replay, ints(half), ints(2 * half)))
        replay = op.Concat(both, both, axis=0)
    return op.Or(replay, op.Equal(step, ints(INACTIVE))) if shape(step)[0] > 1 else replay


def _slots(cache: Value, step: Value, rows: int) -> Value:
    """Return the slots of `rows` rows; `rows` / V neighbours are of one video."""
    slot = op.Mod(step, ints(shape(cache)[0]))  # the sign of the divisor: a negative step has a slot too
    if shape(step)[0] == 1:
        return op.Squeeze(op.Gather(cache, slot, axis=0), ints(0))
    videos = ints(*(b // (rows // shape(cache)[1]) for b in range(rows)))
    return op.GatherND(cache, op.Concat(op.Unsqueeze(slot, ints(1)), op.Unsqueeze(videos, ints(1)), axis=1))


def slot_read(cache: Value, step: Value) -> Value:
    """Return row step mod F."""
    return _slots(cache, step, max(shape(step)[0], shape(cache)[1]))


def slot_write(cache: Value, value: Value, step: Value) -> Value:
    """Return the cache with row step mod F replaced."""
    slots = shape(cache)[0]
    slot = op.Mod(step, ints(slots))
    if shape(step)[0] == 1:
        # `ScatterND` with one index of one number replaces a whole row [B, ...].
        return op.ScatterND(cache, op.Reshape(slot, ints(1, 1)), op.Unsqueeze(value, ints(0)))
    # A row that keeps nothing has no slot.
    slot = op.Where(op.Less(step, ints(0)), ints(slots), slot)
    return by_row(cache, value, slot, shape(step)[0], (0, 1))


def by_row(cache: Value, value: Value, place: Value, rows: int, axes: tuple[int, int]) -> Value:
    """Return a cache with the values [B, ...] of its rows written at places int64 [B] along an axis.

    A place outside of the axis writes nothing, which no scatter of ONNX has.

    Args:
        rows: rows B. axes: which axis of the cache has places, and which one has videos.
    """
    at, video = axes
    places, videos = shape(cache)[at], shape(cache)[video]
    share, ones = rows // videos, [1] * (len(shape(cache)) - 2)
    numbers = op.Reshape(constant(np.arange(places), np.int64), ints(*([places, 1] if at == 0 else [1, 1, places, 1])))
    half = dtype_name(cache) == "bfloat16"  # onnxruntime has no `Where` of it
    cache, value = (cast(x, TensorProto.FLOAT) if half else x for x in (cache, value))
    for k in range(share):
        own = ints(*range(k, rows, share))  # row k of every video: no two of them have one place
        shaped = [1, videos] if at == 0 else [videos, 1, 1, 1]
        here = op.Equal(numbers, op.Reshape(op.Gather(place, own), ints(*shaped)))
        new = op.Gather(value, own, axis=0)
        if at == 0:
            here, new = op.Reshape(here, ints(places, videos, *ones)), op.Unsqueeze(new, ints(0))
        cache = op.Where(here, new, cache)
    return cast(cache, TensorProto.BFLOAT16) if half else cache
