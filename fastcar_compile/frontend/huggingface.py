"""Hugging Face decoders through their own static-cache export recipe."""

from __future__ import annotations

import copy
from collections.abc import Generator
from contextlib import contextmanager
from typing import TypeGuard

import torch
from torch import nn
from transformers import GenerationConfig, PreTrainedModel
from transformers.integrations.executorch import TorchExportableModuleWithStaticCache

from fastcar_compile.errors import CompileError
from fastcar_compile.frontend.cache_shapes import fit_caches

WRAPPED_MODEL = "model"
"""Attribute of the model in TorchExportableModuleWithStaticCache."""


def is_huggingface(model: object) -> TypeGuard[PreTrainedModel]:
    """Whether the model is a transformers model."""
    return isinstance(model, PreTrainedModel)


@contextmanager
def static_cache_step(model: PreTrainedModel, batch_size: int, max_seq_len: int) -> Generator[nn.Module]:
    """The model as a step-protocol module; the caller's model gets its own settings back on exit.

    Raises:
        CompileError: the model has no `scaled_dot_product_attention` path.
    """
    kept = (model.config._attn_implementation, getattr(model, "generation_config", None), model.training)
    generation = copy.deepcopy(kept[1]) or GenerationConfig()
    generation.use_cache, generation.cache_implementation = True, "static"
    try:
        model.set_attn_implementation("sdpa")
    except ValueError as error:
        raise CompileError(
            f"{type(model).__name__} cannot use scaled_dot_product_attention: {error}",
            hint="compile a model whose attention has an sdpa implementation",
        ) from error
    model.generation_config = generation
    model.eval()
    try:
        recipe = TorchExportableModuleWithStaticCache(model, batch_size, max_seq_len, torch.device("cpu"))
        fit_caches(recipe, model, batch_size)
        yield recipe
    finally:
        # None is what a model has that nobody chose these for; transformers takes it, and annotates that it does not.
        model.set_attn_implementation(kept[0])  # pyright: ignore[reportArgumentType]
        model.generation_config = kept[1]  # pyright: ignore[reportAttributeAccessIssue]
        model.train(kept[2])
