"""Attention over the caches of a whole video: in place of `fastcar::attention`, with its arguments."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fastcar_compile.errors import InputError
from fastcar_compile.ir.ops.attention import capped_attention
from fastcar_compile.ir.ops.operator import loaded

Attend = Callable[..., Tensor]
"""(query, key cache, value cache, position, scale) -> result, like `fastcar::attention`."""

# `fastcar::attention` that builds a causal mask once for all layers, videos and candidates.

MASK_BYTES = 1 << 26
"""Most bytes of kept masks. A mask beyond them is built again at every call."""


class MaskedAttention:
    """Attention of chunks with the same result as the operator, bit for bit."""

    def __init__(self) -> None:
        self._masks: dict[tuple[int, int, int], Tensor] = {}

    def __call__(
        self, query: Tensor, keys: Tensor, values: Tensor, position: Tensor, scale: float, softcap: float | None = None
    ) -> Tensor:
        """Return what `fastcar::attention` returns for caches of keys and values."""
        steps = query.shape[2]
        if softcap is not None or steps == 1:
            return torch.ops.fastcar.attention(query, keys, values, position, scale, softcap)
        start = int(position)
        filled, grouped = min(start + steps, keys.shape[2]), query.shape[1] != keys.shape[1]
        seen = [loaded(c[:, :, :filled], query.shape[3]) for c in (keys, values)]
        mask = self._mask(start, steps, filled)
        attend = torch.nn.functional.scaled_dot_product_attention
        return attend(query, *seen, attn_mask=mask, scale=scale, enable_gqa=grouped).contiguous()

    def _mask(self, start: int, steps: int, filled: int) -> Tensor:
        """Return float32 [steps, filled]: 0 where a row sees a column, -inf elsewhere."""
        found = self._masks.get((start, steps, filled))
        if found is None:
            hidden = torch.arange(filled) > torch.arange(start, start + steps)[:, None]
            found = torch.zeros(steps, filled).masked_fill(hidden, -torch.inf)
            if sum(mask.nbytes for mask in self._masks.values()) + found.nbytes <= MASK_BYTES:
                self._masks[start, steps, filled] = found
        return found


# Attention sinks and a sliding window as a mask over the whole cache: the same values, without bounded memory.


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
