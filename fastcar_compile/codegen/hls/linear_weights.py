"""The weight stream of one linear call: what the engine reads, laid out as one stage of an MLP (weights.py)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastcar_compile.codegen.hls.design import WORD_BYTES
from fastcar_compile.codegen.hls.engine_design import LinearStage
from fastcar_compile.codegen.hls.weights import LinearWeights, check_linear, pack_stage
from fastcar_compile.errors import UserError

Array = NDArray[Any]


def pack_linear(linears: Sequence[LinearWeights], stage: LinearStage) -> Array:
    """The stream of linears that share their input; their channels follow each other.

    Args:
        linears: all have a bias where `stage.bias`, none otherwise.

    Returns:
        uint8 [stage.stream_bytes].

    Raises:
        UserError: an array has another shape or dtype than the stage.
    """
    for i, linear in enumerate(linears):
        check_linear(f"linear {i}", linear, len(linear.values), stage)
        if stage.bias and linear.bias is None:
            raise UserError(f"linear {i} has no bias; the design expects one", hint="call it apart from the others")
    total = sum(len(linear.values) for linear in linears)
    if total != stage.channels:
        raise UserError(
            f"the linears have {total} channels in all; the design expects {stage.channels}",
            hint="pass the weights of the call that the design was chosen for",
        )
    biases = [linear.bias for linear in linears if linear.bias is not None]
    joined = LinearWeights(
        np.concatenate([linear.values for linear in linears]),
        np.concatenate([linear.scales for linear in linears]),
        np.concatenate(biases) if stage.bias else None,
    )
    packed = pack_stage(joined, stage)
    padded = np.zeros((stage.ports, stage.section_words * WORD_BYTES), np.uint8)
    padded[:, : packed.shape[1]] = packed
    return padded.reshape(-1)
