"""The weight stream of one linear call: what the engine reads, byte for byte.

For every weight port a section of equal length, tile by tile: float32 scales, float32 biases where there are any (each
padded to whole 16-byte words), then the rows of int8 weights (each padded to whole words). What pads is zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastcar_compile.codegen.hls.design import FLOATS_PER_WORD, WORD_BYTES
from fastcar_compile.codegen.hls.engine_design import LinearStage
from fastcar_compile.errors import UserError

Array = NDArray[Any]
Part = tuple[Array, Array, Array | None]
"""int8 weights [N, K], float32 scales [N], float32 bias [N] or None."""


def pack_linear(parts: Sequence[Part], stage: LinearStage) -> Array:
    """The stream of linears that share their input; their channels follow each other.

    Args:
        parts: weights, scales and bias of each; all have a bias where `stage.biased`, none otherwise.

    Returns:
        uint8 [stage.stream_bytes].

    Raises:
        UserError: an array has another shape or dtype than the stage.
    """
    _check(parts, stage)
    weights, scales = (np.concatenate([part[i] for part in parts]) for i in (0, 1))  # type: ignore[misc]
    headers = [_by_port(scales, stage)]
    if stage.biased:
        headers.append(_by_port(np.concatenate([part[2] for part in parts]), stage))  # type: ignore[misc]
    padded = np.zeros((stage.tiles * stage.tile * stage.ports, stage.channel_words * WORD_BYTES), np.int8)
    padded[: stage.channels, : stage.inputs] = weights
    # channel (t * tile + j) * ports + p -> [p, t, j]
    rows = np.ascontiguousarray(padded.reshape(stage.tiles, stage.tile, stage.ports, -1).transpose(2, 0, 1, 3))
    body = rows.view(np.uint8).reshape(stage.ports, stage.tiles, -1)
    return np.concatenate([*headers, body], axis=2).reshape(-1)


def _by_port(values: Array, stage: LinearStage) -> Array:
    """float32 [N] -> uint8 [ports, tiles, bytes of one tile], padded to whole words."""
    padded = np.zeros(stage.tiles * stage.tile * stage.ports, "<f4")
    padded[: stage.channels] = values
    words = np.zeros((stage.ports, stage.tiles, stage.scale_words * FLOATS_PER_WORD), "<f4")
    words[:, :, : stage.tile] = padded.reshape(stage.tiles, stage.tile, stage.ports).transpose(2, 0, 1)
    return words.view(np.uint8)


def _check(parts: Sequence[Part], stage: LinearStage) -> None:
    problems = []
    for i, (weight, scale, bias) in enumerate(parts):
        channels = weight.shape[0]
        if weight.dtype != np.int8 or weight.shape != (channels, stage.inputs):
            problems.append(f"weights {i} are {weight.dtype} {list(weight.shape)}; expected int8 [N, {stage.inputs}]")
        vectors = [("scales", scale)] if bias is None else [("scales", scale), ("bias", bias)]
        for name, vector in vectors:
            if vector.dtype != np.float32 or vector.shape != (channels,):
                problems.append(f"{name} {i}: {vector.dtype} {list(vector.shape)}; expected float32 [{channels}]")
        if (bias is not None) != stage.biased:
            problems.append(f"linear {i} has {'a' if bias is not None else 'no'} bias; the stage is the other kind")
    total = sum(len(part[0]) for part in parts)
    if total != stage.channels:
        problems.append(f"{total} channels in all; expected {stage.channels}")
    if problems:
        raise UserError("; ".join(problems), mend="pass the weights of the call that the design was chosen for")
