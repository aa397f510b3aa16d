"""Shapes of a Hugging Face decoder's key and value caches, where its config does not state them."""

from __future__ import annotations

import inspect

import torch
from torch._guards import detect_fake_mode
from torch._subclasses import FakeTensorMode
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin, StaticLayer
from transformers.integrations.executorch import TorchExportableModuleWithStaticCache


def cache_argument(model: PreTrainedModel | type[PreTrainedModel]) -> str:
    """Return what the model's forward calls its cache: `past_key_values` until Transformers 5.23, `cache` after it."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def fit_caches(recipe: TorchExportableModuleWithStaticCache, model: PreTrainedModel, batch: int) -> None:
    """Give the recipe's caches the heads that the model writes.

    Transformers reads them from `num_key_value_heads`, and takes all query heads where a config has no such field:
    multi-query decoders such as Falcon then get caches that are too wide.
    """
    if getattr(model.config.get_text_config(), "num_key_value_heads", None) is not None:
        return
    for number, (layer, shape) in enumerate(zip(recipe.static_cache.layers, _written(model, batch), strict=True)):
        if not isinstance(layer, StaticLayer) or shape is None:
            continue
        # `lazy_initialization` takes batch, heads and head dimension from its arguments. No row is needed.
        row = torch.zeros(*shape[:2], 0, shape[3], dtype=model.dtype)
        layer.lazy_initialization(row, row)
        recipe.register_buffer(f"key_cache_{number}", layer.keys, persistent=False)
        recipe.register_buffer(f"value_cache_{number}", layer.values, persistent=False)


def _written(model: PreTrainedModel, batch: int) -> list[torch.Size | None]:
    """Return the shapes of one token's keys, per layer, from a forward that computes nothing."""
    cache = DynamicCache()
    # Under a fake mode the forward knows shapes only.
    mode = detect_fake_mode(list(model.parameters())) or FakeTensorMode(allow_non_fake_inputs=True)
    with mode, torch.no_grad():
        model(torch.zeros(batch, 1, dtype=torch.int64), use_cache=True, **{cache_argument(model): cache})
    keys = [layer.keys if isinstance(layer, CacheLayerMixin) else None for layer in cache.layers]
    return [None if k is None else k.shape for k in keys]
