"""The draft of an MLP; each mirrors the eager definition of the same name in ir/ops/draft.py."""

from onnx import TensorProto

from fastcar_compile.codegen.onnx.attention import input_delta
from fastcar_compile.codegen.onnx.linear import Value, cast, floats, ints, op


def draft_gain(x: Value, cached: Value, edges: Value, gains: Value) -> Value:
    """Return the gain of every row; 0 where the change is not a number."""
    change = op.Unsqueeze(input_delta(x, cached), ints(1))
    reached = cast(op.GreaterOrEqual(change, edges), TensorProto.INT64)
    found = op.Gather(gains, op.ReduceSum(reached, ints(1), keepdims=0), axis=0)
    return op.Where(op.IsNaN(op.Squeeze(change, ints(1))), floats(0.0), found)


def draft_difference(both: Value, gain: Value) -> Value:
    """Return the first half of the rows minus gain times the second half."""
    own, cached = op.Split(both, num_outputs=2, axis=0)
    return op.Sub(own, op.Mul(op.Unsqueeze(gain, ints(1)), cached))


def draft_sum(left: Value, cached: Value, bias: Value, gain: Value) -> Value:
    """Return bias + gain * (cached - bias) + left, in this order."""
    kept = op.Mul(op.Unsqueeze(gain, ints(1)), op.Sub(cached, bias))
    return op.Add(op.Add(bias, kept), left)
