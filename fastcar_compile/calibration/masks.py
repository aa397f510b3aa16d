"""`fastcar::attention` that builds a causal mask once for all layers, videos and candidates."""

from __future__ import annotations

import torch
from torch import Tensor

from fastcar_compile.ops.cached import loaded

attention = torch.ops.fastcar.attention.default

MASK_BYTES = 1 << 26
"""Most bytes of kept masks. A mask beyond them is built again at every call."""


class MaskedAttention:
    """Attention of chunks with the same result as the operator, bit for bit."""

    def __init__(self) -> None:
        self._masks: dict[tuple[int, int, int], Tensor] = {}

    def __call__(
        self,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        position: Tensor,
        scale: float,
        softcap: float | None = None,
    ) -> Tensor:
        """Return what `fastcar::attention` returns."""
        steps = query.shape[2]
        if softcap is not None or steps == 1:
            return attention(query, key_cache, value_cache, position, scale, softcap)
        start = int(position)
        filled = min(start + steps, key_cache.shape[2])
        keys, values = (loaded(c[:, :, :filled], query.shape[3]) for c in (key_cache, value_cache))
        return torch.nn.functional.scaled_dot_product_attention(
            *(query, keys, values),
            attn_mask=self._mask(start, steps, filled),
            scale=scale,
            enable_gqa=query.shape[1] != key_cache.shape[1],
        ).contiguous()

    def _mask(self, start: int, steps: int, filled: int) -> Tensor:
        """Return float32 [steps, filled]: 0 where a row sees a column, -inf elsewhere."""
        found = self._masks.get((start, steps, filled))
        if found is None:
            hidden = torch.arange(filled) > torch.arange(start, start + steps)[:, None]
            found = torch.zeros(steps, filled).masked_fill(hidden, -torch.inf)
            if sum(mask.nbytes for mask in self._masks.values()) + found.nbytes <= MASK_BYTES:
                self._masks[start, steps, filled] = found
        return found
