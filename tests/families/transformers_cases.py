"""Decoders of Transformers."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn
from transformers import (
    ArceeConfig,
    ArceeForCausalLM,
    ChameleonConfig,
    ChameleonForConditionalGeneration,
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
    Gemma2Config,
    Gemma2ForCausalLM,
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
    JanusConfig,
    JanusForConditionalGeneration,
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

from .case import HEADS, LAYERS, LENGTH, MLP_WIDTH, WIDTH, Case, randomize, transformer

_GPT = {"n_embd": WIDTH, "n_layer": LAYERS, "n_head": HEADS, "n_positions": LENGTH, "n_inner": MLP_WIDTH}
_NOT_GPT = dict.fromkeys(
    ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"), ...
) | {"max_position_embeddings": ...}


_PICTURES = {
    "embed_dim": 8,
    "num_embeddings": 8,
    "double_latent": False,
    "latent_channels": 8,
    "resolution": 16,
    "base_channels": 32,
    "channel_multiplier": [1],
    "num_res_blocks": 1,
    "attn_resolutions": [],
}
"""Chameleon's tokenizer of pictures. It is there, and does not run."""
_JANUS_TOWERS = {
    "vision_config": {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 16,
        "patch_size": 8,
        "projection_dim": WIDTH,
    },
    "vq_config": {**_PICTURES, "projection_dim": WIDTH, "image_token_embed_dim": WIDTH},
}
"""Janus' towers of vision and its tokenizer. They are there, and do not run."""
_WORDS = {"<image>": 3, "IMGIMGA": 4, "IMGIMGB": 5}
_MISTRAL_WINDOW = transformer(MistralForCausalLM, MistralConfig, sliding_window=6)
_GEMMA3_WINDOWS = transformer(
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    head_dim=8,
    query_pre_attn_scalar=6,
    sliding_window=5,
    layer_types=["sliding_attention", "full_attention"],
)


class Janus:
    """Builds Janus: a Llama whose sizes are in a config of its own."""

    kind = JanusForConditionalGeneration

    def __call__(self) -> nn.Module:
        """Return the model, in evaluation mode."""
        text = transformer(LlamaForCausalLM, LlamaConfig).arguments
        config = JanusConfig(text_config={"model_type": "llama", **text}, image_token_id=3, **_JANUS_TOWERS)
        return randomize(JanusForConditionalGeneration(config))


TRANSFORMERS = [
    Case("llama", "Llama", "", transformer(LlamaForCausalLM, LlamaConfig), full=True),
    Case(
        "llama-biases",
        "Llama",
        "biases in attention and MLP, tied embeddings",
        transformer(LlamaForCausalLM, LlamaConfig, attention_bias=True, mlp_bias=True, tie_word_embeddings=True),
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
        "llama-long-frame",
        "Llama",
        "347 tokens per frame",
        transformer(LlamaForCausalLM, LlamaConfig, num_hidden_layers=1, max_position_embeddings=384),
        frame=347,
        length=384,
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
        _MISTRAL_WINDOW,
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
        _GEMMA3_WINDOWS,
    ),
    Case(
        "gemma2",
        "Gemma 2",
        "soft-capped logits in attention and head, local and global layers",
        transformer(
            Gemma2ForCausalLM,
            Gemma2Config,
            head_dim=8,
            query_pre_attn_scalar=6,
            sliding_window=5,
            attn_logit_softcapping=2.0,
            final_logit_softcapping=3.0,
        ),
        full=True,
    ),
    Case(
        "mistral-window-float16",
        "Mistral",
        "a sliding window of 6 tokens, keys and values in float16",
        _MISTRAL_WINDOW,
        kv="float16",
    ),
    Case(
        "gemma3-window-int8",
        "Gemma 3",
        "local and global layers, keys and values in int8",
        _GEMMA3_WINDOWS,
        kv="int8",
    ),
    Case("qwen2", "Qwen2", "biases of q, k, v", transformer(Qwen2ForCausalLM, Qwen2Config)),
    Case("qwen3", "Qwen3", "norms of q and k", transformer(Qwen3ForCausalLM, Qwen3Config, head_dim=8)),
    Case(
        "gemma",
        "Gemma 1",
        "GeGLU, scaled embeddings",
        transformer(GemmaForCausalLM, GemmaConfig, head_dim=8),
    ),
    Case(
        "gemma3",
        "Gemma 3",
        "norms of q and k and after each block; two RoPE tables",
        transformer(Gemma3ForCausalLM, Gemma3TextConfig, head_dim=8, query_pre_attn_scalar=6, sliding_window=LENGTH),
    ),
    Case("phi3", "Phi-3", "q, k, v and gate, up in one linear each", transformer(Phi3ForCausalLM, Phi3Config)),
    Case(
        "gpt2",
        "GPT-2",
        "learned positions, plain GELU",
        transformer(GPT2LMHeadModel, GPT2Config, **_NOT_GPT, **_GPT),
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
    Case("olmo-clip", "OLMo", "q, k and v clipped in place", transformer(OlmoForCausalLM, OlmoConfig, clip_qkv=1.0)),
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
    ),
    Case(
        "cohere2",
        "Cohere 2",
        "attention and MLP in parallel, a window of at least the context",
        transformer(Cohere2ForCausalLM, Cohere2Config, sliding_window=LENGTH),
    ),
    Case(
        "cohere2-window",
        "Cohere 2",
        "attention and MLP in parallel, windows in some layers, where no others have RoPE",
        transformer(
            Cohere2ForCausalLM,
            Cohere2Config,
            sliding_window=7,
            layer_types=["sliding_attention", "full_attention"],
        ),
    ),
    Case("emu3", "Emu3", "the language model", transformer(Emu3ForCausalLM, Emu3TextConfig)),
    Case(
        "chameleon",
        "Chameleon",
        "norms of q and k, logits of picture tokens masked in place",
        transformer(ChameleonForConditionalGeneration, ChameleonConfig, vq_config=_PICTURES, vocabulary_map=_WORDS),
    ),
    Case(
        "janus",
        "Janus",
        "the language model beside towers of vision",
        Janus(),
        r".*language_model\.layers\.(\d+)\.mlp",
    ),
]
