"""Attention sinks and a sliding window as a mask over the whole cache: the same values, without bounded memory."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fastcar_compile.errors import InputError
from fastcar_compile.ir.ops.attention import capped_attention
from fastcar_compile.ir.ops.operator import loaded

Attend = Callable[..., Tensor]
"""(query, key cache, value cache, position, scale) -> result, like `fastcar::attention`."""


@dataclass(frozen=True)
class SinkWindow:
    """A token at p attends to positions 0 .. sinks - 1 and p - window + 1 .. p. Rotary positions stay absolute.

    A call has the arguments of `fastcar::attention`, so an `Evaluator` can use it instead.

    Raises:
        InputError: the window is below 1, or sinks are below 0.
    """

    window: int
    sinks: int

    def __post_init__(self) -> None:
        if self.window < 1 or self.sinks < 0:
            what = f"a window of {self.window} tokens with {self.sinks} sinks"
            raise InputError(what, hint="window >= 1, sinks >= 0")

    def __str__(self) -> str:
        return f"window {self.window}, sinks {self.sinks}"

    def __call__(
        self, query: Tensor, keys: Tensor, values: Tensor, position: Tensor, scale: float, softcap: float | None = None
    ) -> Tensor:
        """Return attention float32 [B, Hq, T, D] for caches [B, Hkv, S, D] of any KV type and position int64 [1]."""
        start, steps = int(position), query.shape[2]
        rows = torch.arange(start, start + steps)[:, None]
        columns = torch.arange(min(start + steps, keys.shape[2]))
        # keep the columns that some row of this call sees
        columns = columns[(columns < self.sinks) | (columns > start - self.window)]
        seen = (columns <= rows) & ((columns < self.sinks) | (columns > rows - self.window))
        grouped = query.shape[1] != keys.shape[1]
        seen_rows = [loaded(cache[:, :, columns], query.shape[3]) for cache in (keys, values)]
        if softcap is not None:
            return capped_attention(query, seen_rows[0], seen_rows[1], seen, scale, softcap)
        return torch.nn.functional.scaled_dot_product_attention(
            query, *seen_rows, attn_mask=seen, scale=scale, enable_gqa=grouped
        )
