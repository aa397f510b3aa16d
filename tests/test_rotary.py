"""Rotary embeddings whose frequencies depend on the length of the sequence."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from fastcar_compile.frontend.rotary import fixed_rotary

SIZES: dict[str, Any] = {
    "vocab_size": 7,
    "hidden_size": 16,
    "intermediate_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 8,
    "pad_token_id": 0,
}
LONG = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [2.0, 3.0, 4.0, 5.0],
    "original_max_position_embeddings": 8,
    "rope_theta": 100.0,
}
DYNAMIC = {"rope_type": "dynamic", "factor": 3.0, "rope_theta": 100.0}


def llama(rope: dict[str, Any]) -> PreTrainedModel:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES, rope_parameters=rope)).eval()


def gemma3() -> PreTrainedModel:
    """Its layers have two kinds of rotary embeddings."""
    torch.manual_seed(0)
    rope = {"full_attention": LONG, "sliding_attention": {"rope_type": "default", "rope_theta": 10.0}}
    kinds = ["sliding_attention", "full_attention"]
    return Gemma3ForCausalLM(
        Gemma3TextConfig(**SIZES, head_dim=8, sliding_window=16, layer_types=kinds, rope_parameters=rope)
    ).eval()


@pytest.mark.parametrize("length", [8, 16])
@pytest.mark.parametrize("build", [lambda: llama(LONG), lambda: llama(DYNAMIC), gemma3], ids=["long", "ntk", "gemma3"])
def test_every_position_has_the_frequencies_of_the_whole_length(build: Any, length: int) -> None:
    """A short sequence with fixed frequencies is the beginning of the long one; afterwards it is the model's own."""
    ids = torch.arange(16)[None] % 7
    with torch.no_grad():
        own, whole, used = build()(ids[:, :5]).logits, build()(ids[:, :length]).logits, build()
        with fixed_rotary(used, length):
            fixed = used(ids[:, :5]).logits
        again = used(ids[:, :5]).logits
    torch.testing.assert_close(fixed, whole[:, :5], atol=1e-6, rtol=0)
    assert torch.equal(again, own)
    assert torch.allclose(fixed, own, atol=1e-6) == (length == 8)
