"""Fused operators: each is what one kernel computes of several operators of the rewritten program.

Only the TVM lowering knows them. Each is defined by the operators that it replaces, so a fused graph also runs in
PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor
from torch.library import Library, infer_schema

from fastcar_compile.ir.ops import exact
from fastcar_compile.ir.ops import linear as quant

fastcar = torch.ops.fastcar


_LIBRARY = Library("fastcar", "FRAGMENT")
_Definition = TypeVar("_Definition", bound=Callable[..., object])


def _fused(function: _Definition) -> _Definition:
    """Register the function as the operator `fastcar::<name>`."""
    name = function.__name__
    _LIBRARY.define(name + infer_schema(function, mutates_args=()))
    _LIBRARY.impl(name, function, "CompositeImplicitAutograd")
    return function


@_fused
def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return int8 rows of x float32 [..., K] and their float32 scales [...]."""
    return quant.quantize_rows(x)


@_fused
def integer_linear(rows: Tensor, scales: Tensor, qweight: Tensor, wscale: Tensor, bias: Tensor | None) -> Tensor:
    """Return the float32 [..., N] of quantised rows: of `linear_w8a8` for int8 weights, else of `linear_w4a8`."""
    scaled = quant.scaled_int8 if qweight.dtype == torch.int8 else quant.scaled_int4
    y = scaled(rows, scales, qweight, wscale)
    return y if bias is None else y + bias


@_fused
def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Return x * rsqrt(mean(x^2, last axis) + epsilon) * weight, weight [K]."""
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + epsilon) * weight


@_fused
def rms_norm_quantize(x: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """Return `quantize_rows` of `rms_norm`."""
    return quant.quantize_rows(rms_norm(x, weight, epsilon))


@_fused
def exact_norm_quantize(x: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """Return `quantize_rows` of `exact_norm`."""
    return quant.quantize_rows(exact.exact_norm(x, weight, epsilon))


@_fused
def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, epsilon: float) -> Tensor:
    """Return the layer norm of float32 rows over the last axis; weight and bias [K], None: ones, zeros."""
    return torch.layer_norm(x, x.shape[-1:], weight, bias, epsilon)


@_fused
def layer_norm_quantize(x: Tensor, weight: Tensor | None, bias: Tensor | None, epsilon: float) -> tuple[Tensor, Tensor]:
    """Return `quantize_rows` of `layer_norm`."""
    return quant.quantize_rows(layer_norm(x, weight, bias, epsilon))


@_fused
def gated_quantize(gate: Tensor, up: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    """Return `quantize_rows` of activation(gate) * up, the activation by its table's factor."""
    return quant.quantize_rows(gate * fastcar.activation_factor(gate, activation) * up)


@_fused
def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return x * cos + cat(-x[..., D/2:], x[..., :D/2]) * sin of x [B, H, T, D]; cos and sin [1 or B, 1, T, D]."""
    half = x.shape[-1] // 2
    return x * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * sin


@_fused
def gate_and_count(
    chain: Tensor,
    score: Tensor,
    threshold: Tensor,
    step: Tensor,
    stride: int,
    max_chain: int,
    couple_cfg: bool,
    refresh_every: int,
    at_most: bool,
) -> tuple[Tensor, Tensor]:
    """Return the decisions of `gate`, bool [B], and chain int32 [F, B] with the count of each row after them."""
    replay = fastcar.gate(score, threshold, step, chain, stride, max_chain, couple_cfg, refresh_every, at_most)
    count = (fastcar.slot_read(chain, step) + 1) * replay.to(torch.int32)
    return replay, fastcar.slot_write(chain, count, step)


@_fused
def keep_frame(
    cache: Tensor, inputs: Tensor, y: Tensor, x: Tensor, replay: Tensor, step: Tensor
) -> tuple[Tensor, Tensor]:
    """Return two caches float32 [F, B, H] with row step mod F written: y in `cache`; x in `inputs`, where no replay is.

    y, x float32 [B, H], replay bool [B].
    """
    kept = torch.where(replay.unsqueeze(1), fastcar.slot_read(inputs, step), x)
    return fastcar.slot_write(cache, y, step), fastcar.slot_write(inputs, kept, step)
