"""The weight stream of one layer: what the kernel reads, byte for byte.

For every weight port a section of equal length, which starts at a multiple of 4 KiB: first the gate/up tiles, then the
down tiles. A tile is its scales, its biases if there are any (each padded to whole 16-byte words), then its rows of weights
(each padded to whole words, int4 to whole groups). What pads is zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastcar_compile.codegen.hls.design import WORD_BYTES, MlpDesign, StageShape
from fastcar_compile.errors import UserError
from fastcar_compile.ops.quant import GROUP

Array = NDArray[Any]


@dataclass(frozen=True)
class LinearWeights:
    """One linear of N outputs and K inputs.

    Args:
        values: int8 [N, K]; for w4a8 int8 [N, 128 * G], of -8 .. 7, G = ceil(K / 128).
        scales: float32 [N]; for w4a8 float16 [N, G].
        bias: float32 [N], or None.
    """

    values: Array
    scales: Array
    bias: Array | None = None


def pack_mlp(linears: Sequence[LinearWeights], design: MlpDesign) -> Array:
    """One layer's weight stream.

    Args:
        linears: gate, up, down of a gated MLP, or up, down of a plain one.

    Returns:
        uint8 [design.stream_bytes].

    Raises:
        UserError: an array has another shape or dtype than the design.
    """
    spec = design.spec
    names = ("gate", "up", "down") if spec.gated else ("up", "down")
    if len(linears) != len(names):
        raise UserError(f"{len(linears)} linears were given; the design takes {', '.join(names)}")
    *first, down = linears
    for name, linear in zip(names, linears, strict=True):
        channels = spec.hidden if name == "down" else spec.intermediate
        check_linear(name, linear, channels, design.down if name == "down" else design.gate_up)
    sections = [pack_stage(_interleaved(first, design.gate_up), design.gate_up), pack_stage(down, design.down)]
    joined = np.concatenate(sections, axis=1)
    padded = np.zeros((design.ports, design.section_words * WORD_BYTES), np.uint8)
    padded[:, : joined.shape[1]] = joined
    return padded.reshape(-1)


def check_linear(name: str, linear: LinearWeights, channels: int, stage: StageShape) -> None:
    """Raises UserError when an array of the linear `name` has another shape or dtype than the stage."""
    groups = stage.bits == 4
    wanted = {
        "values": ((channels, GROUP * stage.sums if groups else stage.inputs), np.dtype(np.int8), linear.values),
        "scales": (
            (channels, stage.sums) if groups else (channels,),
            np.dtype(np.float16 if groups else np.float32),
            linear.scales,
        ),
    }
    if linear.bias is not None:
        wanted["bias"] = ((channels,), np.dtype(np.float32), linear.bias)
        if not stage.bias:
            raise UserError(f"{name} has a bias; the design expects none", hint="choose the design with the bias")
    for what, (shape, dtype, array) in wanted.items():
        if array.shape != shape or array.dtype != dtype:
            raise UserError(
                f"{name}.{what} is {array.dtype} {list(array.shape)}; the design expects {dtype} {list(shape)}",
                hint="pass the weights of the layer that the design was chosen for",
            )


def _interleaved(linears: Sequence[LinearWeights], stage: StageShape) -> LinearWeights:
    """Channel 2n is gate n, 2n + 1 is up n. A linear without a bias adds zeros where the other has one."""

    def merge(arrays: Sequence[Array]) -> Array:
        return np.stack(arrays, axis=1).reshape(-1, *arrays[0].shape[1:])

    biases = [np.zeros(len(n.values), np.float32) if n.bias is None else n.bias for n in linears]
    bias = merge(biases) if stage.bias else None
    return LinearWeights(merge([n.values for n in linears]), merge([n.scales for n in linears]), bias)


def pack_stage(linear: LinearWeights, stage: StageShape) -> Array:
    """uint8 [ports, bytes of the stage on one port]."""
    parts = [_by_tile(linear.scales.astype(linear.scales.dtype.newbyteorder("<")), stage)]
    if stage.bias:
        bias = np.zeros(stage.channels, np.float32) if linear.bias is None else linear.bias
        parts.append(_by_tile(bias.astype("<f4"), stage))
    values = linear.values.reshape(stage.channels, -1)
    rows = np.zeros((stage.channels, stage.channel_words * stage.lanes), np.int8)
    rows[:, : values.shape[1]] = values
    if stage.bits == 4:
        low, high = rows.reshape(stage.channels, -1, 2, WORD_BYTES).transpose(2, 0, 1, 3)
        rows = ((low & 15) | (high << 4)).astype(np.int8).reshape(stage.channels, -1)
    parts.append(_by_tile(rows, stage))
    return np.concatenate(parts, axis=2).reshape(stage.ports, -1)


def _by_tile(channels: Array, stage: StageShape) -> Array:
    """Channel (t * tile + j) * ports + p of [channels, ...] -> bytes [p, t, all j], padded to whole words."""
    padded = np.zeros((stage.tiles * stage.tile * stage.ports, *channels.shape[1:]), channels.dtype)
    padded[: stage.channels] = channels
    tiles = padded.reshape(stage.tiles, stage.tile, stage.ports, -1).transpose(2, 0, 1, 3)
    data = np.ascontiguousarray(tiles).view(np.uint8).reshape(stage.ports, stage.tiles, -1)
    return np.pad(data, ((0, 0), (0, 0), (0, -data.shape[2] % WORD_BYTES)))
