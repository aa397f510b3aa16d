"""Decoders of Transformers."""

from __future__ import annotations

from dataclasses import replace

import torch
from transformers import (
    ArceeConfig,
    ArceeForCausalLM,
    Cohere2Config,
    Cohere2ForCausalLM,
    CohereConfig,
    CohereForCausalLM,
    Emu3ForCausalLM,
    Emu3TextConfig,
    Ernie4_5Config,
    Ernie4_5ForCausalLM,
    Exaone4Config,
    Exaone4ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GemmaConfig,
    GemmaForCausalLM,
    Glm4Config,
    Glm4ForCausalLM,
    GlmConfig,
    GlmForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPTBigCodeConfig,
    GPTBigCodeForCausalLM,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    HeliumConfig,
    HeliumForCausalLM,
    HunYuanDenseV1Config,
    HunYuanDenseV1ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaModel,
    MistralConfig,
    MistralForCausalLM,
    NemotronConfig,
    NemotronForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    OlmoConfig,
    OlmoForCausalLM,
    PersimmonConfig,
    PersimmonForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PhiConfig,
    PhiForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    SeedOssConfig,
    SeedOssForCausalLM,
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
    Case("olmo", "OLMo", "norms without weights", transformer(OlmoForCausalLM, OlmoConfig)),
    Case("glm", "GLM", "", transformer(GlmForCausalLM, GlmConfig, head_dim=8)),
    Case("glm4", "GLM-4", "norms before and after each block", transformer(Glm4ForCausalLM, Glm4Config, head_dim=8)),
    Case("helium", "Helium", "", transformer(HeliumForCausalLM, HeliumConfig, head_dim=8)),
    Case("nemotron", "Nemotron", "squared ReLU", transformer(NemotronForCausalLM, NemotronConfig)),
    Case("arcee", "Arcee", "squared ReLU", transformer(ArceeForCausalLM, ArceeConfig)),
    Case(
        "exaone4",
        "EXAONE 4",
        "norms after each block and of q and k",
        transformer(Exaone4ForCausalLM, Exaone4Config, sliding_window=LENGTH, layer_types=["full_attention"] * LAYERS),
    ),
    Case(
        "persimmon",
        "Persimmon",
        "squared ReLU, norms of q and k",
        transformer(PersimmonForCausalLM, PersimmonConfig, num_key_value_heads=..., qk_layernorm=True),
    ),
    Case("ernie", "ERNIE 4.5", "", transformer(Ernie4_5ForCausalLM, Ernie4_5Config)),
    Case("seed-oss", "Seed-OSS", "", transformer(SeedOssForCausalLM, SeedOssConfig, head_dim=8)),
    Case("hunyuan", "HunYuan", "", transformer(HunYuanDenseV1ForCausalLM, HunYuanDenseV1Config, head_dim=8)),
    Case(
        "phi",
        "Phi",
        "attention and MLP in parallel",
        transformer(PhiForCausalLM, PhiConfig, partial_rotary_factor=0.5),
        hls=True,
        full=True,
    ),
    Case(
        "gpt-neox-parallel",
        "GPT-NeoX, Pythia",
        "attention and MLP in parallel, each with a norm",
        transformer(GPTNeoXForCausalLM, GPTNeoXConfig, num_key_value_heads=...),
        gate="input_delta",
    ),
    Case(
        "stablelm-parallel",
        "StableLM",
        "attention and MLP in parallel",
        transformer(StableLmForCausalLM, StableLmConfig, use_parallel_residual=True),
    ),
    Case(
        "cohere",
        "Cohere",
        "attention and MLP in parallel, scaled logits",
        transformer(CohereForCausalLM, CohereConfig, logit_scale=0.5),
        hls=True,
    ),
    Case(
        "cohere2",
        "Cohere 2",
        "attention and MLP in parallel, a window of at least the context",
        transformer(Cohere2ForCausalLM, Cohere2Config, sliding_window=LENGTH),
    ),
    Case("emu3", "Emu3", "the language model", transformer(Emu3ForCausalLM, Emu3TextConfig)),
]
