"""llama.cpp through llama-cpp-python, with weights in a GGUF file."""

# pyright: reportMissingImports=false
# The extra "bench" installs the peers.

from __future__ import annotations

import ctypes
from pathlib import Path

import gguf
import llama_cpp
import numpy as np
from gguf import GGMLQuantizationType as Kind

from speed.base import LINEARS, MLP_LINEARS, NORM_EPSILON, ROPE_THETA, Engine, Weights, cache_elements
from speed.sizes import Job, Sizes, Traffic

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
    writer.add_context_length(sizes.cache_length)
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


class LlamaCpp(Engine):
    """llama_decode of one token, with float16 keys and values and the attention that llama.cpp selects."""

    package = "llama-cpp-python"
    notes = "built for this CPU, mmap, weights repacked by llama.cpp; float16 keys and values"

    @staticmethod
    def prepare(job: Job) -> None:
        """Write the GGUF file."""
        write_gguf(Path(job.folder) / "model.gguf", Weights(job.checkpoint), job.sizes, Kind[job.precision])

    def __init__(self, job: Job) -> None:
        self._job, self._path = job, Path(job.folder) / "model.gguf"
        llama_cpp.llama_backend_init()
        options = llama_cpp.llama_model_default_params()
        options.n_gpu_layers = 0
        self._model = llama_cpp.llama_model_load_from_file(str(self._path).encode(), options)
        if not self._model:
            raise RuntimeError("llama.cpp cannot load the model that was written for it")
        context = llama_cpp.llama_context_default_params()
        context.n_ctx = job.sizes.cache_length
        context.n_threads = context.n_threads_batch = job.sizes.threads
        self._context = llama_cpp.llama_init_from_model(self._model, context)
        self._memory = llama_cpp.llama_get_memory(self._context)
        self._filled = 0

    def _decode(self, tokens: list[int]) -> None:
        array = (ctypes.c_int32 * len(tokens))(*tokens)
        if code := llama_cpp.llama_decode(self._context, llama_cpp.llama_batch_get_one(array, len(tokens))):
            raise RuntimeError(f"llama_decode returned {code} after {self._filled} tokens")
        self._filled += len(tokens)

    def rewind(self, position: int) -> None:
        """Drop the tokens from `position` on, or read a prompt up to it."""
        if self._filled > position:
            llama_cpp.llama_memory_seq_rm(self._memory, 0, position, -1)
            self._filled = position
        elif self._filled < position:
            self._decode([i % self._job.sizes.vocab for i in range(self._filled, position)])

    def step(self, token: int, position: int) -> np.ndarray:
        """Decode one token at the position after the memory's last token, and return its logits."""
        self._decode([token])
        logits = llama_cpp.llama_get_logits(self._context)
        return np.ctypeslib.as_array(logits, shape=(self._job.sizes.vocab,)).copy()

    def traffic(self) -> Traffic:
        """Return the bytes of the file's tensors without the embedding, and of the filled float16 cache."""
        found = {t.name: t.n_bytes for t in gguf.GGUFReader(self._path).tensors}
        mlp = sum(int(n) for name, n in found.items() if ".ffn_" in name and "norm" not in name)
        total = sum(int(n) for name, n in found.items() if name != "token_embd.weight")
        return Traffic(total - mlp, mlp, cache_elements(self._job.sizes) * 2)
