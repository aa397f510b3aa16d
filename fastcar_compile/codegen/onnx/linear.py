"""Quantisation formats in ONNX: a linear for each, and the activation between two of them.

Each mirrors the eager definition of the same name in ops/.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from onnx import TensorProto

from fastcar_compile.codegen.onnx.values import Value, cast, constant, floats, int32, ints, op, shape, uint8
from fastcar_compile.ops import activations, quant

ZERO_POINT = 128
"""Of weights and activations. Both are unsigned here: the unsigned-by-unsigned kernels of onnxruntime are exact on
every x86-64, while signed weights saturate at 16 bits where the CPU has no VNNI (its docs, "Quantization", U8S8)."""


def _quantized_rows(x: Value) -> tuple[Value, Value, Value]:
    """Return uint8 rows with zero point 128, their scale [..., 1] in float32, and the zero point."""
    amax = op.Max(op.ReduceMax(op.Abs(x), ints(-1), keepdims=1), floats(1e-30))
    # 127 / amax is one division, as in `ops.quant.quantize_rows`: its reciprocal times 127 would round twice.
    rounded = op.Round(op.Mul(x, op.Div(floats(127.0), amax)))
    clipped = op.Clip(rounded, floats(-127.0), floats(127.0))
    # -127 .. 127 becomes 1 .. 255. The integer product takes the zero points off again, so it is the signed one.
    quantized = cast(op.Add(clipped, floats(ZERO_POINT)), TensorProto.UINT8)
    return quantized, op.Mul(amax, floats(quant._INV_127)), uint8(ZERO_POINT)


def linear_bf16(x: Value, weight: Value, bias: Value | None) -> Value:
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


LINEARS: dict[str, Callable[..., Value]] = {"bf16": linear_bf16, "w8a8": linear_w8a8, "w4a8": linear_w4a8}
"""By the name of the format in formats.QUANT_FORMATS. A float32 linear is PyTorch's own operator."""
