"""The weight stream of one layer: what the kernel reads, byte for byte.

For every weight port a section of equal length: first the gate/up tiles, then the down tiles. A tile is its float32
scales (padded to whole 16-byte words), then its rows of int8 weights (each padded to whole words). What pads is zero.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastcar_compile.codegen.hls.design import FLOATS_PER_WORD, WORD_BYTES, MlpDesign, StageShape
from fastcar_compile.errors import UserError

Array = NDArray[Any]


def pack_mlp(
    gate_q: Array, gate_s: Array, up_q: Array, up_s: Array, down_q: Array, down_s: Array, design: MlpDesign
) -> Array:
    """One layer's weight stream.

    Args:
        gate_q: int8 [I, H]; `up_q` the same.
        gate_s: float32 [I]; `up_s` the same.
        down_q: int8 [H, I].
        down_s: float32 [H].

    Returns:
        uint8 [design.stream_bytes].

    Raises:
        UserError: an array has another shape or dtype than the design.
    """
    hidden, intermediate = design.spec.hidden, design.spec.intermediate
    for name, array, shape, dtype in (
        ("gate_q", gate_q, (intermediate, hidden), np.int8),
        ("gate_s", gate_s, (intermediate,), np.float32),
        ("up_q", up_q, (intermediate, hidden), np.int8),
        ("up_s", up_s, (intermediate,), np.float32),
        ("down_q", down_q, (hidden, intermediate), np.int8),
        ("down_s", down_s, (hidden,), np.float32),
    ):
        _check(name, array, shape, dtype)
    pairs = np.stack([gate_q, up_q], axis=1).reshape(2 * intermediate, hidden)
    pair_scales = np.stack([gate_s, up_s], axis=1).reshape(2 * intermediate)
    sections = [_pack_stage(pairs, pair_scales, design.gate_up), _pack_stage(down_q, down_s, design.down)]
    return np.ascontiguousarray(np.concatenate(sections, axis=1).reshape(-1))


def _check(name: str, array: Array, shape: tuple[int, ...], dtype: Any) -> None:
    if array.shape != shape or array.dtype != dtype:
        raise UserError(
            f"{name} is {array.dtype} {list(array.shape)}; the design expects {np.dtype(dtype)} {list(shape)}",
            mend="pass the weights of the layer that the design was chosen for",
        )


def _pack_stage(weights: Array, scales: Array, stage: StageShape) -> Array:
    """uint8 [ports, bytes of the stage on one port]."""
    rows = stage.tiles * stage.tile * stage.ports
    padded = np.zeros((rows, stage.channel_words * WORD_BYTES), np.int8)
    padded[: stage.channels, : stage.inputs] = weights
    padded_scales = np.zeros(rows, "<f4")
    padded_scales[: stage.channels] = scales
    # channel (t * tile + j) * ports + p -> [p, t, j]
    tiles = padded.reshape(stage.tiles, stage.tile, stage.ports, -1).transpose(2, 0, 1, 3)
    heads = np.zeros((stage.ports, stage.tiles, stage.scale_words * FLOATS_PER_WORD), "<f4")
    heads[:, :, : stage.tile] = padded_scales.reshape(stage.tiles, stage.tile, stage.ports).transpose(2, 0, 1)
    body = np.ascontiguousarray(tiles).view(np.uint8).reshape(stage.ports, stage.tiles, -1)
    return np.concatenate([heads.view(np.uint8), body], axis=2).reshape(stage.ports, -1)
