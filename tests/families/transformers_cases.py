"""Decoders of Transformers."""

from __future__ import annotations

from dataclasses import replace

import torch
from transformers import (
    Emu3ForCausalLM,
    Emu3TextConfig,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GemmaConfig,
    GemmaForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPTBigCodeConfig,
    GPTBigCodeForCausalLM,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaModel,
    MistralConfig,
    MistralForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
    StableLmConfig,
    StableLmForCausalLM,
    Starcoder2Config,
    Starcoder2ForCausalLM,
)

from .case import HEADS, LAYERS, LENGTH, MLP_WIDTH, WIDTH, Case, transformer

_GPT = {"n_embd": WIDTH, "n_layer": LAYERS, "n_head": HEADS, "n_positions": LENGTH, "n_inner": MLP_WIDTH}
_NOT_GPT = dict.fromkeys(
    ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"), ...
) | {"max_position_embeddings": ...}
_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 2.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 12,
    "rope_theta": 100.0,
}
_YARN = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 12, "rope_theta": 100.0}
_LINEAR = {"rope_type": "linear", "factor": 2.0, "rope_theta": 100.0}
_FULL = ["full_attention"] * LAYERS


TRANSFORMERS = [
    Case("llama", "Llama", "", transformer(LlamaForCausalLM, LlamaConfig), full=True),
    Case(
        "llama-llama3-rope", "Llama", "llama3 RoPE", transformer(LlamaForCausalLM, LlamaConfig, rope_parameters=_LLAMA3)
    ),
    Case("llama-yarn-rope", "Llama", "yarn RoPE", transformer(LlamaForCausalLM, LlamaConfig, rope_parameters=_YARN)),
    Case(
        "llama-linear-rope", "Llama", "linear RoPE", transformer(LlamaForCausalLM, LlamaConfig, rope_parameters=_LINEAR)
    ),
    Case(
        "llama-biases",
        "Llama",
        "biases in attention and MLP, tied embeddings",
        transformer(LlamaForCausalLM, LlamaConfig, attention_bias=True, mlp_bias=True, tie_word_embeddings=True),
        hls=True,
    ),
    Case(
        "llama-head-dim",
        "Llama",
        "head dimension apart from the width",
        transformer(LlamaForCausalLM, LlamaConfig, head_dim=12),
    ),
    Case(
        "llama-headless",
        "Llama",
        "without a head: embeddings in, hidden states out",
        transformer(LlamaModel, LlamaConfig),
        headless=True,
        full=True,
    ),
    Case(
        "llama-bfloat16",
        "Llama",
        "weights in bfloat16",
        replace(transformer(LlamaForCausalLM, LlamaConfig), dtype=torch.bfloat16),
    ),
    Case(
        "llama-input-delta",
        "Llama",
        "gate on the change of the MLP's input",
        transformer(LlamaForCausalLM, LlamaConfig),
        gate="input_delta",
    ),
    Case(
        "mistral",
        "Mistral",
        "a window of at least the context",
        transformer(MistralForCausalLM, MistralConfig, sliding_window=LENGTH),
    ),
    Case(
        "mistral-window",
        "Mistral",
        "a sliding window of 6 tokens",
        transformer(MistralForCausalLM, MistralConfig, sliding_window=6),
    ),
    Case(
        "qwen2-window",
        "Qwen2",
        "a sliding window of 4 tokens in the second layer",
        transformer(Qwen2ForCausalLM, Qwen2Config, use_sliding_window=True, sliding_window=4, max_window_layers=1),
    ),
    Case(
        "gemma3-window",
        "Gemma 3",
        "local and global layers",
        transformer(
            Gemma3ForCausalLM,
            Gemma3TextConfig,
            head_dim=8,
            query_pre_attn_scalar=6,
            sliding_window=5,
            layer_types=["sliding_attention", "full_attention"],
        ),
        full=True,
        hls=True,
    ),
    Case("qwen2", "Qwen2", "biases of q, k, v", transformer(Qwen2ForCausalLM, Qwen2Config)),
    Case("qwen3", "Qwen3", "norms of q and k", transformer(Qwen3ForCausalLM, Qwen3Config, head_dim=8)),
    Case(
        "gemma",
        "Gemma 1",
        "GeGLU, scaled embeddings",
        transformer(GemmaForCausalLM, GemmaConfig, head_dim=8),
        hls=True,
    ),
    Case(
        "gemma3",
        "Gemma 3",
        "norms of q and k and after each block; two RoPE tables",
        transformer(Gemma3ForCausalLM, Gemma3TextConfig, head_dim=8, query_pre_attn_scalar=6, sliding_window=LENGTH),
        full=True,
    ),
    Case("phi3", "Phi-3", "q, k, v and gate, up in one linear each", transformer(Phi3ForCausalLM, Phi3Config)),
    Case(
        "gpt2",
        "GPT-2",
        "learned positions, plain GELU",
        transformer(GPT2LMHeadModel, GPT2Config, **_NOT_GPT, **_GPT),
        hls=True,
    ),
    Case(
        "gpt-bigcode",
        "GPT-BigCode",
        "one key/value head",
        transformer(GPTBigCodeForCausalLM, GPTBigCodeConfig, **_NOT_GPT, **_GPT),
    ),
    Case("starcoder2", "StarCoder2", "plain GELU with biases", transformer(Starcoder2ForCausalLM, Starcoder2Config)),
    Case("olmo2", "OLMo 2", "norms after each block", transformer(Olmo2ForCausalLM, Olmo2Config)),
    Case(
        "granite",
        "Granite",
        "multipliers of embedding, attention, residual and logits",
        transformer(
            GraniteForCausalLM,
            GraniteConfig,
            embedding_multiplier=3.0,
            attention_multiplier=0.2,
            residual_multiplier=0.4,
            logits_scaling=2.0,
        ),
    ),
    Case(
        "smollm3",
        "SmolLM3",
        "layers without RoPE",
        transformer(SmolLM3ForCausalLM, SmolLM3Config, no_rope_layers=[1, 0], use_sliding_window=False),
    ),
    Case(
        "gpt-neox",
        "GPT-NeoX, Pythia",
        "attention, then MLP; RoPE on a part of the head",
        transformer(GPTNeoXForCausalLM, GPTNeoXConfig, use_parallel_residual=False, num_key_value_heads=...),
    ),
    Case(
        "stablelm",
        "StableLM",
        "attention, then MLP; RoPE on a part of the head",
        transformer(StableLmForCausalLM, StableLmConfig, use_parallel_residual=False),
    ),
    Case("emu3", "Emu3", "the language model", transformer(Emu3ForCausalLM, Emu3TextConfig)),
]
