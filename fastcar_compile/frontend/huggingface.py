"""Hugging Face decoders through their own static-cache export recipe."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Generator
from contextlib import contextmanager
from typing import TypeGuard

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedModel
from transformers.integrations.executorch import TorchExportableModuleWithStaticCache

from fastcar_compile.errors import CompileError
from fastcar_compile.frontend.cache_shapes import cache_argument, fit_caches
from fastcar_compile.frontend.rope import fixed_frequencies


class StaticCacheStep(TorchExportableModuleWithStaticCache):
    """The recipe's caches, and its step. With `explicit`, it states positions and a mask that the model else works out.

    Some models count positions from the length of the cache, as a Python number, which no static graph has (OPT).
    """

    explicit = False
    length = 0

    def can_be_explicit(self) -> bool:
        """Return whether the model takes positions and a mask, and was not given them yet."""
        taken = inspect.signature(self.model.forward).parameters
        return not self.explicit and {"position_ids", "attention_mask"} <= set(taken)

    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        inputs_embeds: Tensor | None = None,
        cache_position: Tensor | None = None,
    ) -> Tensor:
        """Return logits [B, T, V], or hidden states of a model without a head."""
        tokens = inputs_embeds if input_ids is None else input_ids
        assert tokens is not None
        assert cache_position is not None
        # The cache counts the tokens that it got. A step sets this count to its own position.
        for layer in self.static_cache.layers:
            layer.cumulative_length.copy_(cache_position[0])  # pyright: ignore[reportAttributeAccessIssue]
        stated: dict[str, object] = {cache_argument(self.model): self.static_cache}
        if self.explicit:
            rows = tokens.shape[0]
            # All ones, because rows have no padding.
            stated["attention_mask"] = torch.ones(rows, self.length, dtype=torch.int64)
            stated["position_ids"] = cache_position.expand(rows, -1)
        result = self.model(input_ids=input_ids, inputs_embeds=inputs_embeds, use_cache=True, **stated)
        return result.logits if hasattr(result, "logits") else result.last_hidden_state


WRAPPED_MODEL = "model"
"""Attribute of the model in TorchExportableModuleWithStaticCache."""


def is_huggingface(model: object) -> TypeGuard[PreTrainedModel]:
    """Whether the model is a transformers model."""
    return isinstance(model, PreTrainedModel)


@contextmanager
def static_cache_step(model: PreTrainedModel, batch_size: int, max_seq_len: int) -> Generator[nn.Module]:
    """The model as a step-protocol module; the caller's model gets its own settings back on exit.

    Raises:
        CompileError: the model has neither the attention that is asked for nor another one that can be captured, or no
            static cache.
    """
    # What the export needs is set on the caller's own model, and set back on exit.
    kept = (model.config._attn_implementation, getattr(model, "generation_config", None))
    if getattr(model.config, "add_cross_attention", False):
        raise CompileError("a decode step gets no other sequence for cross-attention to read")
    generation = copy.deepcopy(kept[1]) or GenerationConfig()
    generation.use_cache, generation.cache_implementation = True, "static"
    _choose_attention(model)
    model.generation_config = generation
    try:
        with fixed_frequencies(model, max_seq_len):
            yield _step(model, batch_size, max_seq_len)
    finally:
        # None is what a model has that nobody chose these for; transformers takes it, and annotates that it does not.
        model.set_attn_implementation(kept[0])  # pyright: ignore[reportArgumentType]
        model.generation_config = kept[1]  # pyright: ignore[reportAttributeAccessIssue]


def _step(model: PreTrainedModel, batch_size: int, max_seq_len: int) -> StaticCacheStep:
    """The step with its caches. Transformers raises what it likes on a model that has no static cache."""
    try:
        step = StaticCacheStep(model, batch_size, max_seq_len, torch.device("cpu"))
        step.length = max_seq_len
        fit_caches(step, model, batch_size)
    except CompileError:
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        raise CompileError(
            f"transformers makes no static key/value cache for {type(model).__name__}: {reason}",
            hint="compile a decoder whose layers all have attention",
        ) from error
    return step


def _choose_attention(model: PreTrainedModel) -> None:
    """Let the model use PyTorch's attention, or its own one written out where PyTorch's lacks what it needs.

    PyTorch's operator has no soft-cap: Transformers then refuses it.
    """
    # Gemma 2, for one, has a soft-cap. Its eager attention writes the soft-cap out, and normalize-state recognises it.
    capped = getattr(model.config.get_text_config(), "attn_logit_softcapping", None) is not None
    try:
        model.set_attn_implementation("eager" if capped else "sdpa")
    except ValueError as error:
        if capped:
            raise CompileError(f"{type(model).__name__} has no eager attention: {error}") from error
        model.set_attn_implementation("eager")
