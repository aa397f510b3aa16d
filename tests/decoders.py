"""Small real decoders for tests: a Hugging Face Llama and plain modules that follow the step protocol."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM, LlamaModel

from fastcar_compile.config import CompileConfig
from fastcar_compile.frontend.capture import capture
from fastcar_compile.ir.pass_manager import run_pipeline
from fastcar_compile.ir.program import DecoderProgram
from fastcar_compile.passes.pipeline import analysis_pipeline, rewrite_pipeline

SIZES: dict[str, Any] = {
    "vocab_size": 17, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 65,
}  # fmt: skip


def llama(seed: int = 0, **changes: Any) -> LlamaForCausalLM:
    """Grouped-query Llama, random weights."""
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**{**SIZES, **changes})).eval()


def headless_llama(seed: int = 0, **changes: Any) -> LlamaModel:
    """Backbone without a head: embeddings in, hidden states out; its token embedding is never called."""
    torch.manual_seed(seed)
    return LlamaModel(LlamaConfig(**{**SIZES, **changes})).eval()


class PlainBlock(nn.Module):
    """LayerNorm, single-head attention and a GELU MLP with biases."""

    key_cache: Tensor
    value_cache: Tensor

    def __init__(self, width: int, rows: int, batch: int) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.register_buffer("key_cache", torch.zeros(batch, 1, rows, width), persistent=False)
        self.register_buffer("value_cache", torch.zeros(batch, 1, rows, width), persistent=False)

    def forward(self, h: Tensor, position: Tensor) -> Tensor:
        q, k, v = (t[:, None] for t in self.qkv(self.norm_1(h)).chunk(3, -1))
        keys = self.key_cache.index_copy_(2, position, k)
        values = self.value_cache.index_copy_(2, position, v)
        mask = torch.arange(keys.shape[2])[None, :] <= position[:, None]
        h = h + self.out(F.scaled_dot_product_attention(q, keys, values, attn_mask=mask)[:, 0])
        return h + self.mlp(self.norm_2(h))

    def mlp(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class PlainDecoder(nn.Module):
    """A decoder of the step protocol that is no transformers model."""

    block: type[PlainBlock] = PlainBlock

    def __init__(self, rows: int = 33, batch: int = 1, layers: int = 2) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.max_seq_len = rows
        self.embed, self.head = nn.Embedding(11, 32), nn.Linear(32, 11)
        self.blocks = nn.ModuleList([self.block(32, rows, batch) for _ in range(layers)])

    def forward(self, input_ids: Tensor, cache_position: Tensor) -> Tensor:
        h = self.embed(input_ids)
        for block in self.blocks:
            h = block(h, cache_position)
        return self.head(h)


def rewritten(model: nn.Module, chunk: int, **options: Any) -> DecoderProgram:
    """A decoder after the passes for these options of `CompileConfig`; a prompt is read in chunks of so many tokens."""
    config = CompileConfig(target="cpu", **options)
    sizes = {name: getattr(config, name) for name in ("batch_size", "max_seq_len", "tokens_per_frame")}
    program = run_pipeline(capture(model, prefill_chunk=chunk, rows=config.rows, **sizes), analysis_pipeline())
    return run_pipeline(program, rewrite_pipeline(config, len(program.sites)))
