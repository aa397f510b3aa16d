"""Decoders of Transformers."""

from dataclasses import replace

import torch
import transformers as hf
from torch import nn

from .case import HEADS, LAYERS, LENGTH, MLP_WIDTH, WIDTH, Case, causal, randomize, transformer

_GPT = {"n_embd": WIDTH, "n_layer": LAYERS, "n_head": HEADS, "n_positions": LENGTH, "n_inner": MLP_WIDTH}
_NOT_GPT = dict.fromkeys(
    ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"), ...
) | {"max_position_embeddings": ...}


_PICTURES = {
    "embed_dim": 8, "num_embeddings": 8, "double_latent": False, "latent_channels": 8, "resolution": 16,
    "base_channels": 32, "channel_multiplier": [1], "num_res_blocks": 1, "attn_resolutions": [],
}  # fmt: skip
"""Chameleon's tokenizer of pictures. It is there, and does not run."""
_JANUS_TOWERS = {
    "vision_config": {
        "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 16, "patch_size": 8,
        "projection_dim": WIDTH,
    },
    "vq_config": {**_PICTURES, "projection_dim": WIDTH, "image_token_embed_dim": WIDTH},
}  # fmt: skip
"""Janus' towers of vision and its tokenizer. They are there, and do not run."""
_WORDS = {"<image>": 3, "IMGIMGA": 4, "IMGIMGB": 5}
_MISTRAL_WINDOW = causal("Mistral", sliding_window=6)
_GEMMA3_WINDOWS = transformer(
    hf.Gemma3ForCausalLM, hf.Gemma3TextConfig, head_dim=8, query_pre_attn_scalar=6, sliding_window=5,
    layer_types=["sliding_attention", "full_attention"],
)  # fmt: skip


class Janus:
    """Builds Janus: a Llama whose sizes are in a config of its own."""

    kind = hf.JanusForConditionalGeneration

    def __call__(self) -> nn.Module:
        """Return the model, in evaluation mode."""
        text = causal("Llama").arguments
        config = hf.JanusConfig(text_config={"model_type": "llama", **text}, image_token_id=3, **_JANUS_TOWERS)
        return randomize(hf.JanusForConditionalGeneration(config))


TRANSFORMERS = [
    Case("llama", "Llama", "", causal("Llama")),
    Case(
        "llama-biases", "Llama", "biases in attention and MLP, tied embeddings",
        causal("Llama", attention_bias=True, mlp_bias=True, tie_word_embeddings=True),
    ),
    Case("llama-head-dim", "Llama", "head dimension apart from the width", causal("Llama", head_dim=12)),
    Case(
        "llama-headless", "Llama", "without a head: embeddings in, hidden states out",
        transformer(hf.LlamaModel, hf.LlamaConfig), headless=True,
    ),
    Case("llama-bfloat16", "Llama", "weights in bfloat16", replace(causal("Llama"), dtype=torch.bfloat16)),
    Case("llama-input-delta", "Llama", "gate on the change of the MLP's input", causal("Llama"), gate="input_delta"),
    Case(
        "llama-long-frame", "Llama", "347 tokens per frame",
        causal("Llama", num_hidden_layers=1, max_position_embeddings=384), frame=347, length=384,
    ),
    Case("mistral", "Mistral", "a window of at least the context", causal("Mistral", sliding_window=LENGTH)),
    Case("mistral-window", "Mistral", "a sliding window of 6 tokens", _MISTRAL_WINDOW),
    Case(
        "qwen2-window", "Qwen2", "a sliding window of 4 tokens in the second layer",
        causal("Qwen2", use_sliding_window=True, sliding_window=4, max_window_layers=1),
    ),
    Case("gemma3-window", "Gemma 3", "local and global layers", _GEMMA3_WINDOWS),
    Case(
        "gemma2", "Gemma 2", "soft-capped logits in attention and head, local and global layers",
        causal("Gemma2", head_dim=8, query_pre_attn_scalar=6, sliding_window=5, attn_logit_softcapping=2.0,
            final_logit_softcapping=3.0), full=True,
    ),
    Case(
        "mistral-window-float16", "Mistral", "a sliding window of 6 tokens, keys and values in float16",
        _MISTRAL_WINDOW, kv="float16",
    ),
    Case(
        "gemma3-window-int8", "Gemma 3", "local and global layers, keys and values in int8", _GEMMA3_WINDOWS, kv="int8",
    ),
    Case("qwen2", "Qwen2", "biases of q, k, v", causal("Qwen2")),
    Case("qwen3", "Qwen3", "norms of q and k", causal("Qwen3", head_dim=8)),
    Case(
        "qwen3-kv-bfloat16", "Qwen3", "norms of q and k, keys and values in bfloat16", causal("Qwen3", head_dim=8),
        kv="bfloat16",
    ),
    Case("gemma", "Gemma 1", "GeGLU, scaled embeddings", causal("Gemma", head_dim=8)),
    Case(
        "gemma3", "Gemma 3", "norms of q and k and after each block; two RoPE tables",
        transformer(hf.Gemma3ForCausalLM, hf.Gemma3TextConfig, head_dim=8, query_pre_attn_scalar=6,
            sliding_window=LENGTH ),
    ),
    Case("phi3", "Phi-3", "q, k, v and gate, up in one linear each", causal("Phi3")),
    Case(
        "gpt2", "GPT-2", "learned positions, plain GELU",
        transformer(hf.GPT2LMHeadModel, hf.GPT2Config, **_NOT_GPT, **_GPT),
    ),
    Case("gpt-bigcode", "GPT-BigCode", "one key/value head", causal("GPTBigCode", **_NOT_GPT, **_GPT)),
    Case("starcoder2", "StarCoder2", "plain GELU with biases", causal("Starcoder2")),
    Case("olmo2", "OLMo 2", "norms after each block", causal("Olmo2")),
    Case(
        "granite", "Granite", "multipliers of embedding, attention, residual and logits",
        causal("Granite", embedding_multiplier=3.0, attention_multiplier=0.2, residual_multiplier=0.4,
            logits_scaling=2.0 ),
    ),
    Case(
        "smollm3", "SmolLM3", "layers without RoPE", causal("SmolLM3", no_rope_layers=[1, 0], use_sliding_window=False),
    ),
    Case(
        "gpt-neox", "GPT-NeoX, Pythia", "attention, then MLP; RoPE on a part of the head",
        causal("GPTNeoX", use_parallel_residual=False, num_key_value_heads=...),
    ),
    Case(
        "stablelm", "StableLM", "attention, then MLP; RoPE on a part of the head",
        causal("StableLm", use_parallel_residual=False),
    ),
    Case("olmo", "OLMo", "norms without weights", causal("Olmo")),
    Case("olmo-clip", "OLMo", "q, k and v clipped in place", causal("Olmo", clip_qkv=1.0)),
    Case("glm", "GLM", "", causal("Glm", head_dim=8)),
    Case("glm4", "GLM-4", "norms before and after each block", causal("Glm4", head_dim=8)),
    Case("helium", "Helium", "", causal("Helium", head_dim=8)),
    Case("nemotron", "Nemotron", "squared ReLU", causal("Nemotron")),
    Case("arcee", "Arcee", "squared ReLU", causal("Arcee")),
    Case(
        "exaone4", "EXAONE 4", "norms after each block and of q and k",
        causal("Exaone4", sliding_window=LENGTH, layer_types=["full_attention"] * LAYERS),
    ),
    Case(
        "persimmon", "Persimmon", "squared ReLU, norms of q and k",
        causal("Persimmon", num_key_value_heads=..., qk_layernorm=True),
    ),
    Case("ernie", "ERNIE 4.5", "", causal("Ernie4_5")),
    Case("seed-oss", "Seed-OSS", "", causal("SeedOss", head_dim=8)),
    Case("hunyuan", "HunYuan", "", causal("HunYuanDenseV1", head_dim=8)),
    Case("phi", "Phi", "attention and MLP in parallel", causal("Phi", partial_rotary_factor=0.5)),
    Case(
        "gpt-neox-parallel", "GPT-NeoX, Pythia", "attention and MLP in parallel, each with a norm",
        causal("GPTNeoX", num_key_value_heads=...), gate="input_delta",
    ),
    Case(
        "stablelm-parallel", "StableLM", "attention and MLP in parallel",
        causal("StableLm", use_parallel_residual=True),
    ),
    Case("cohere", "Cohere", "attention and MLP in parallel, scaled logits", causal("Cohere", logit_scale=0.5)),
    Case(
        "cohere2", "Cohere 2", "attention and MLP in parallel, a window of at least the context",
        causal("Cohere2", sliding_window=LENGTH),
    ),
    Case(
        "cohere2-window", "Cohere 2",
        "attention and MLP in parallel, windows in some layers, the only layers with RoPE",
        causal("Cohere2", sliding_window=7, layer_types=["sliding_attention", "full_attention"]),
    ),
    Case("emu3", "Emu3", "the language model", transformer(hf.Emu3ForCausalLM, hf.Emu3TextConfig)),
    Case(
        "chameleon", "Chameleon", "norms of q and k, logits of picture tokens masked in place",
        transformer(hf.ChameleonForConditionalGeneration, hf.ChameleonConfig, vq_config=_PICTURES,
            vocabulary_map=_WORDS ),
    ),
    Case(
        "janus", "Janus", "the language model beside towers of vision", Janus(),
        r".*language_model\.layers\.(\d+)\.mlp",
    ),
]  # fmt: skip
