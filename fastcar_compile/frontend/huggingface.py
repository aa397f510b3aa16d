"""Hugging Face decoders through their own static-cache export recipe."""

import copy
import inspect
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch._guards import detect_fake_mode
from torch._subclasses import FakeTensorMode
from transformers.cache_utils import CacheLayerMixin, DynamicCache, StaticLayer
from transformers.generation.configuration_utils import GenerationConfig
from transformers.integrations.executorch import TorchExportableModuleWithStaticCache
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.modeling_utils import PreTrainedModel
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from fastcar_compile.errors import NOT_THE_MODELS, CompileError, UserError
from fastcar_compile.support.values import warn


def read_module(path: Path) -> nn.Module:
    """Return the module of a Hugging Face folder.

    Raises:
        UserError: there is none.
    """
    if not (path / "config.json").is_file():
        hint = "give a folder with manifest.json (an artifact) or config.json (a Hugging Face decoder)"
        raise UserError("neither an artifact nor a Hugging Face decoder", where=str(path), hint=hint)
    auto: Any = AutoModelForCausalLM  # its members are typed in part
    try:
        return auto.from_pretrained(path, local_files_only=True, dtype=torch.float32).eval()
    except (OSError, ValueError) as error:
        hint = "give a folder that save_pretrained wrote"
        raise UserError(f"the decoder cannot be read: {error}", where=str(path), hint=hint) from error


# Shapes of a Hugging Face decoder's key and value caches, where its config does not state them.


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


# Rotary frequencies that depend on the length of the sequence, fixed for the length that is compiled.


_FIXED = "default"


@contextmanager
def fixed_frequencies(model: nn.Module, max_seq_len: int) -> Generator[None]:
    """Give every rotary embedding of the kinds "dynamic" and "longrope" its frequencies at this length.

    Transformers chooses them anew from the largest position of every call: dynamic ones grow with it, longrope changes
    from its short to its long factors at the original length. A decode step is one graph, and the keys of a cache all
    need one table. So the table is that of a sequence of `max_seq_len` tokens. The model gets its own back on exit.
    """
    found = [module for module in model.modules() if any(map(_is_by_length, _kinds(module).values()))]
    kept = [(module, dict(vars(module)), dict(module._buffers)) for module in found]
    try:
        for module, _, _ in kept:
            _fix(module, max_seq_len)
        yield
    finally:
        for module, attributes, buffers in kept:
            vars(module).update(attributes)
            module._buffers.update(buffers)


def _is_by_length(kind: str) -> bool:
    return "dynamic" in kind or kind == "longrope"


def _kinds(module: Any) -> dict[str | None, str]:
    """Kind of RoPE by type of layer; None: the same for all layers."""
    kind = getattr(module, "rope_type", None)
    if isinstance(kind, dict):
        return dict(kind)
    return {None: kind} if isinstance(kind, str) and hasattr(module, "inv_freq") else {}


def _fix(module: Any, max_seq_len: int) -> None:
    # A model with several types of layers has a table for each type, under a name of its own.
    kinds = _kinds(module)
    for layers, kind in kinds.items():
        if not _is_by_length(kind):
            continue
        name = "inv_freq" if layers is None else f"{layers}_inv_freq"
        old: Tensor = getattr(module, name)
        options = {} if layers is None else {"layer_type": layers}
        length: Any = torch.tensor(max_seq_len)  # as in a forward, so that frequencies have the same bits
        new, _scaling = ROPE_INIT_FUNCTIONS[kind](module.config, torch.device("cpu"), seq_len=length, **options)
        # A model that ran on a long sequence has its frequencies.
        first: Tensor = getattr(module, name.replace("inv_freq", "original_inv_freq"), old)
        if not torch.equal(new.to(first.dtype), first):
            text = f"{kind} RoPE has the frequencies of max_seq_len={max_seq_len} at all positions. Transformers' "
            text += "generate changes them where a sequence grows beyond the original length, so its tokens may "
            text += "differ (docs/reference/models.md, Sequence lengths)"
            warn(text, 2)
        module.register_buffer(name, new.to(old.dtype), persistent=False)
        # Another kind would make the forward compute its frequencies anew from the positions.
        kinds[layers] = _FIXED
    module.rope_type = kinds if isinstance(module.rope_type, dict) else kinds[None]


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
    """Whether the model is a transformers model whose forward takes Transformers' caches.

    Published code derives from PreTrainedModel for its files too, with a forward and caches of its own.
    """
    if not isinstance(model, PreTrainedModel):
        return False
    taken = inspect.signature(model.forward).parameters
    anything = any(p.kind is p.VAR_KEYWORD for p in taken.values()) and "cache_position" not in taken
    return anything or cache_argument(model) in taken


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
    except (CompileError, *NOT_THE_MODELS):
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        what = f"transformers makes no static key/value cache for {type(model).__name__}: {reason}"
        raise CompileError(what, hint="compile a decoder whose layers all have attention") from error
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
