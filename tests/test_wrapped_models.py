"""Models as users hold them: behind torch.compile, with peft's adapters, in training mode."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from decoders import PlainDecoder, llama
from passes.laws import module_text
from torch import Tensor, nn
from transformers import Cache, LlamaForCausalLM

from fastcar_compile.errors import CompileError
from fastcar_compile.frontend.capture import capture
from fastcar_compile.frontend.huggingface import cache_argument
from fastcar_compile.frontend.model_facts import unwrapped

SIZES: dict[str, Any] = {"batch_size": 1, "max_seq_len": 33, "tokens_per_frame": 8, "prefill_chunk": 1}


class Adapted(nn.Module):
    """As peft wraps a model; peft is not needed to recognise it."""

    def __init__(self, inner: nn.Module, *, prompt_learning: bool) -> None:
        super().__init__()
        self.base_model, self.active_peft_config = inner, SimpleNamespace(is_prompt_learning=prompt_learning)

    def get_base_model(self) -> nn.Module:
        return self.base_model


def compiled(module: nn.Module) -> Any:
    return torch.compile(module, backend="eager")


def test_a_wrapped_model_is_captured_as_the_model_inside() -> None:
    model = PlainDecoder()
    expected = module_text(capture(model, **SIZES).graph_module)
    assert unwrapped(Adapted(compiled(model), prompt_learning=False)) is model
    assert module_text(capture(compiled(model), **SIZES).graph_module) == expected


def test_a_compiled_block_is_captured_and_stays_compiled() -> None:
    expected = module_text(capture(PlainDecoder(), **SIZES).graph_module)
    model = PlainDecoder()
    name, blocks = next((n, m) for n, m in model.named_children() if isinstance(m, nn.ModuleList))
    block = compiled(blocks[0])
    blocks[0] = block
    assert module_text(capture(model, **SIZES).graph_module) == expected
    assert model.get_submodule(name)[0] is block  # pyright: ignore[reportIndexIssue]


class OlderLlama(LlamaForCausalLM):
    """Calls its cache as Transformers did until 5.23."""

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]  # the difference is what is tested
        self, input_ids: torch.LongTensor, inputs_embeds: Tensor | None, past_key_values: Cache, use_cache: bool
    ) -> Any:
        known: dict[str, Any] = {cache_argument(LlamaForCausalLM): past_key_values}
        return super().forward(input_ids, inputs_embeds=inputs_embeds, use_cache=use_cache, **known)


def test_a_forward_that_takes_past_key_values_is_captured() -> None:
    model = llama()
    expected = module_text(capture(model, **SIZES).graph_module)
    older = OlderLlama(model.config)
    older.load_state_dict(model.state_dict())
    assert module_text(capture(older, **SIZES).graph_module) == expected


def test_prompt_learning_is_refused() -> None:
    with pytest.raises(CompileError, match="prompt learning: it puts learned tokens or prefixes in front"):
        unwrapped(Adapted(PlainDecoder(), prompt_learning=True))


def test_adapters_are_to_be_merged_first() -> None:
    """In the layout of peft; one that was merged leaves nothing behind, and a part of this name is no adapter."""
    model = PlainDecoder()
    block = next(m for m in model.children() if isinstance(m, nn.ModuleList))[0]
    block.lora_A = nn.ModuleDict({"default": nn.Linear(32, 4, bias=False)})
    with pytest.raises(CompileError, match=r"1 module .* LoRA adapters, such as blocks\.0(.|\n)*merge_and_unload"):
        capture(model, **SIZES)
    for other in (nn.ModuleDict(), nn.Linear(2, 2)):
        block.lora_A = other
        capture(model, **SIZES)


def test_a_model_keeps_its_modes_and_gradients() -> None:
    model = PlainDecoder().train()
    next(model.children()).eval()
    next(model.parameters()).requires_grad_(False)
    before = [m.training for m in model.modules()], [p.requires_grad for p in model.parameters()]
    capture(model, **SIZES)
    assert ([m.training for m in model.modules()], [p.requires_grad for p in model.parameters()]) == before
