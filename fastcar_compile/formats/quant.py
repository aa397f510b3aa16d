"""Quantisation formats: how the weights of linears are stored, and what a linear then reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fastcar_compile.errors import InputError

GROUP = 128
"""Weights along the reduction that share one scale in w4a8."""

ROW_BYTES = 16
"""A memory word: the accelerator pads the weights of one output channel to whole words."""


@dataclass(frozen=True)
class QuantFormat:
    """One value of `compile(quant=…)`; `ops/quant.py` and `ops/linear_bf16.py` define the numbers bit for bit.

    Args:
        name: of the format.
        summary: one line for people.
        weight_bits: of one stored weight.
        suffix: of the attribute that holds the stored weights; empty: weights stay as they are.
        group: weights along the reduction that share a scale; 0: one scale per output channel, if there are scales.
        scale_bytes: of one scale; 0: the format has no scales.
        integer: activations are int8 per row and sums are exact integers.
        accelerated: there are HLS kernels for it.
        tolerance: largest difference between the logits of two back ends. In integer formats a last-bit difference in
            attention may move an activation by one int8 step.
    """

    name: str
    summary: str
    weight_bits: int
    suffix: str = ""
    group: int = 0
    scale_bytes: int = 0
    integer: bool = False
    accelerated: bool = False
    tolerance: float = 1e-3

    def linear_bytes(self, outputs: int, inputs: int) -> int:
        """Return the bytes that one call of a linear reads: weights and scales, padded as in the weight stream."""
        if not self.integer:
            return outputs * inputs * self.weight_bits // 8
        if self.group:
            return outputs * -(-inputs // self.group) * (self.group * self.weight_bits // 8 + self.scale_bytes)
        return outputs * (ROW_BYTES * -(-inputs * self.weight_bits // (8 * ROW_BYTES)) + self.scale_bytes)


_INTEGER: dict[str, Any] = {"integer": True, "accelerated": True, "tolerance": 5e-2}

QUANT_FORMATS = {
    f.name: f
    for f in (
        QuantFormat("none", "float32 weights", 32),
        QuantFormat("bf16", "bfloat16 weights, float32 sums", 16, suffix="bf16"),
        QuantFormat("w8a8", "int8 weights per output channel", 8, suffix="int8", scale_bytes=4, **_INTEGER),
        QuantFormat("w4a8", "int4 weights in groups of 128", 4, suffix="int4", group=GROUP, scale_bytes=2, **_INTEGER),
    )
}
"""Value of `compile(quant=…)` -> format."""

ACCELERATED = tuple(f.name for f in QUANT_FORMATS.values() if f.accelerated)
"""Formats with HLS kernels, widest weights first."""


def quant_format(name: str) -> QuantFormat:
    """Return the format of this name.

    Raises:
        InputError: there is none.
    """
    if name not in QUANT_FORMATS:
        raise InputError(f"unknown quantisation {name!r}", hint=f"use one of: {', '.join(QUANT_FORMATS)}")
    return QUANT_FORMATS[name]
