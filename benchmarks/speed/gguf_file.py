"""The GGUF file that llama.cpp reads."""

# pyright: reportMissingImports=false
# The extra "bench" installs the peers.

from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind

from speed.base import NORM_EPSILON, ROPE_THETA
from speed.sizes import Sizes
from speed.weights import LINEARS, MLP_LINEARS, Weights

NAMES = dict(
    zip(
        (*LINEARS, *MLP_LINEARS),
        ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"),
        strict=True,
    )
)


def write_gguf(path: Path, weights: Weights, sizes: Sizes, kind: Kind) -> None:
    """Write a GGUF file: linears of the layers in `kind`, embedding and head in Q8_0, norms in float32."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(sizes.table_length)
    writer.add_embedding_length(sizes.hidden)
    writer.add_block_count(sizes.layers)
    writer.add_feed_forward_length(sizes.intermediate)
    writer.add_head_count(sizes.heads)
    writer.add_head_count_kv(sizes.heads)
    writer.add_layer_norm_rms_eps(NORM_EPSILON)
    writer.add_rope_dimension_count(sizes.head_dim)
    writer.add_rope_freq_base(ROPE_THETA)
    writer.add_vocab_size(sizes.vocab)
    writer.add_tokenizer_model("no_vocab")

    def add(name: str, value: np.ndarray, stored: Kind) -> None:
        writer.add_tensor(f"{name}.weight", gguf.quantize(value, stored), raw_dtype=stored)

    def read(name: str) -> np.ndarray:
        return weights[f"{name}.weight"].float().numpy()

    for ours, theirs in (("model.embed_tokens", "token_embd"), ("lm_head", "output")):
        add(theirs, read(ours), Kind.Q8_0)
    add("output_norm", read("model.norm"), Kind.F32)
    for i in range(sizes.layers):
        add(f"blk.{i}.attn_norm", read(f"model.layers.{i}.input_layernorm"), Kind.F32)
        add(f"blk.{i}.ffn_norm", read(f"model.layers.{i}.post_attention_layernorm"), Kind.F32)
        for ours, theirs in NAMES.items():
            value = read(f"model.layers.{i}.{ours}")
            add(f"blk.{i}.{theirs}", _interleaved(value, sizes) if theirs in ("attn_q", "attn_k") else value, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _interleaved(weight: np.ndarray, sizes: Sizes) -> np.ndarray:
    """Return the weight with permuted rows: llama.cpp rotates neighbours, Hugging Face halves of a head."""
    return weight.reshape(sizes.heads, 2, -1, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)
