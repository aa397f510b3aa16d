"""The gate and the slots of one frame; each mirrors the eager definition of the same name in ops/replay.py."""

from __future__ import annotations

from fastcar_compile.codegen.onnx.values import Value, int32, ints, op, shape


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
        replay = op.And(replay, op.Less(slot_read(chain, step), int32(max_chain)))
    if couple_cfg:
        # Rows b and b + B / 2 are a pair, so the conjunction of the halves stands for both.
        half = shape(score)[0] // 2
        both = op.And(op.Slice(replay, ints(0), ints(half)), op.Slice(replay, ints(half), ints(2 * half)))
        replay = op.Concat(both, both, axis=0)
    return replay


def slot_read(cache: Value, step: Value) -> Value:
    """Return row step mod F."""
    slot = op.Mod(step, ints(shape(cache)[0]))
    return op.Squeeze(op.Gather(cache, slot, axis=0), ints(0))


def slot_write(cache: Value, value: Value, step: Value) -> Value:
    """Return the cache with row step mod F replaced."""
    # `ScatterND` with one index of one number replaces a whole row [B, ...].
    slot = op.Mod(step, ints(shape(cache)[0]))
    return op.ScatterND(cache, op.Reshape(slot, ints(1, 1)), op.Unsqueeze(value, ints(0)))
