"""Decoders whose blocks are written in another way: in-place sums, `x @ w.T`, folded rows."""

from typing import Any

import transformers as hf

from .case import HEADS, LAYERS, MLP_WIDTH, WIDTH, Case, causal, transformer

_FALCON = {"intermediate_size": ..., "num_key_value_heads": ..., "ffn_hidden_size": MLP_WIDTH}
_NONE: dict[str, Any] = dict.fromkeys(
    ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"), ...
) | {"max_position_embeddings": ...}
_MAMBA = _NONE | {"hidden_size": WIDTH, "num_hidden_layers": LAYERS}
_BLOOM = _NONE | {"hidden_size": WIDTH, "n_layer": LAYERS, "n_head": HEADS}
_MPT = _NONE | {"d_model": WIDTH, "n_layers": LAYERS, "n_heads": HEADS, "max_seq_len": 24}
_LATENTS = {"kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8}
_DENSE = {"num_key_value_heads": HEADS, "first_k_dense_replace": LAYERS}
_GPT2 = {"n_embd": WIDTH, "n_layer": LAYERS, "n_head": HEADS, "n_positions": 24}
_T5 = {"d_model": WIDTH, "d_kv": 8, "d_ff": MLP_WIDTH, "num_layers": LAYERS, "num_heads": HEADS}
_DELTA = {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
_OPT = {"intermediate_size": ..., "num_key_value_heads": ..., "ffn_dim": MLP_WIDTH, "word_embed_proj_dim": 32}


STRUCTURES = [
    Case(
        "falcon-new", "Falcon", "new architecture: two norms, groups of key/value heads, `x @ w.T`, in-place sums",
        causal("Falcon", **_FALCON, new_decoder_architecture=True, num_kv_heads=2),
    ),
    Case(
        "falcon-7b", "Falcon", "attention and MLP in parallel on one norm, one key/value head",
        causal("Falcon", **_FALCON, multi_query=True, parallel_attn=True),
    ),
    Case(
        "falcon-rw", "Falcon", "attention, then MLP; biases",
        causal("Falcon", **_FALCON, multi_query=False, parallel_attn=False, bias=True),
    ),
    Case(
        "opt", "OPT", "rows folded around the MLP, ReLU, learned positions with an offset", causal("OPT", **_OPT),
        mlp=(r".*layers\.(\d+)\.fc1", r".*layers\.(\d+)\.fc2"),
    ),
    Case(
        "biogpt", "BioGPT", "positions counted from a mask, learned positions with an offset",
        causal("BioGpt", num_key_value_heads=...), mlp=(r".*layers\.(\d+)\.fc1", r".*layers\.(\d+)\.fc2"),
    ),
    Case(
        "gptj", "GPT-J", "attention and MLP in parallel on one norm, interleaved RoPE on a part of the head",
        causal("GPTJ", **_NONE, **_GPT2, n_inner=MLP_WIDTH, rotary_dim=4),
    ),
    Case(
        "mixtral", "Mixtral", "experts", causal("Mixtral", num_local_experts=4),
        refused="a mixture of experts: a router chooses the MLP of each token",
    ),
    Case(
        "mamba", "Mamba", "state-space layers", causal("Mamba", **_MAMBA),
        refused="a state-space layer or another one with a convolution along time",
    ),
    Case(
        "bamba", "Bamba", "state-space layers and attention",
        causal("Bamba", attn_layer_indices=[1], mamba_n_heads=8, mamba_d_head=8),
        refused="a state-space layer or another one with a convolution along time",
    ),
    Case(
        "qwen3-next", "Qwen3-Next", "linear attention and attention",
        causal("Qwen3Next", num_experts=0, head_dim=8, layer_types=["linear_attention", "full_attention"], **_DELTA),
        refused="a state-space layer or another one with a convolution along time",
    ),
    Case("bloom", "Bloom", "ALiBi", causal("Bloom", **_BLOOM), refused="ALiBi or another bias of the attention scores"),
    Case("mpt", "MPT", "ALiBi", causal("Mpt", **_MPT), refused="ALiBi or another bias of the attention scores"),
    Case(
        "deepseek-v2", "DeepSeek-V2", "latent attention, no experts", causal("DeepseekV2", **_LATENTS, **_DENSE),
        refused="multi-head latent attention: it caches one latent per token",
    ),
    Case(
        "deepseek-v3", "DeepSeek-V3", "latent attention, no experts", causal("DeepseekV3", **_LATENTS, **_DENSE),
        refused="multi-head latent attention: it caches one latent per token",
    ),
    Case(
        "t5", "T5", "encoder and decoder", transformer(hf.T5ForConditionalGeneration, hf.T5Config, **_NONE, **_T5),
        refused="an encoder and a decoder: its decoder attends to what an encoder made",
    ),
    Case(
        "opt-post-norm", "OPT", "norms behind the residual adds (350m)",
        causal("OPT", **_OPT, do_layer_norm_before=False),
        refused="the norm stands behind the residual add, so that the stream itself is normalised (post-norm)",
    ),
    Case(
        "bert", "BERT", "norms behind the residual adds, a table that is read by `gather`",
        transformer(hf.BertLMHeadModel, hf.BertConfig, num_key_value_heads=..., is_decoder=True),
        refused="the norm stands behind the residual add, so that the stream itself is normalised (post-norm)",
    ),
    Case(
        "gpt2-cross", "GPT-2", "cross-attention",
        transformer(hf.GPT2LMHeadModel, hf.GPT2Config, **_NONE, **_GPT2, add_cross_attention=True),
        refused="cross-attention: its layers attend to another sequence",
    ),
]  # fmt: skip
