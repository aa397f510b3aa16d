"""MineWorld (arXiv 2504.08388) as it is published: lvm.py of github.com/microsoft/mineworld.

A Llama over picture and action tokens. Its cache is [B, S, heads, D], keys and values are repeated and transposed
after they are read, and the RoPE tables are selected by position in every layer. What is added: caches and tables are
buffers.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .case import BATCH, HEADS, LAYERS, LENGTH, VOCAB, WIDTH, Case, Plain
from .cosmos import CosmosMlp, CosmosNorm

KV_HEADS, HEAD_DIM = 2, WIDTH // HEADS


class MineWorldAttention(nn.Module):
    """Grouped-query attention over caches [B, S, heads, D]."""

    cache_k: Tensor
    cache_v: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(WIDTH, WIDTH, bias=False)
        self.k_proj = nn.Linear(WIDTH, KV_HEADS * HEAD_DIM, bias=False)
        self.v_proj = nn.Linear(WIDTH, KV_HEADS * HEAD_DIM, bias=False)
        self.o_proj = nn.Linear(WIDTH, WIDTH, bias=False)
        for name in ("cache_k", "cache_v"):
            self.register_buffer(name, torch.zeros(BATCH, LENGTH, KV_HEADS, HEAD_DIM), persistent=False)

    def forward(self, x: Tensor, mask: Tensor, position_ids: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
        batch, time, _ = x.size()
        query = self.q_proj(x).view(batch, time, HEADS, HEAD_DIM)
        key = self.k_proj(x).view(batch, time, KV_HEADS, HEAD_DIM)
        value = self.v_proj(x).view(batch, time, KV_HEADS, HEAD_DIM)
        cos, sin = (table[position_ids].unsqueeze(0).unsqueeze(2) for table in tables)
        query = (query * cos) + (rotate_half(query) * sin)
        key = (key * cos) + (rotate_half(key) * sin)
        self.cache_k[:batch, position_ids] = key
        self.cache_v[:batch, position_ids] = value
        keys, values = self.cache_k[:batch, :, :], self.cache_v[:batch, :, :]
        keys = keys.repeat_interleave(HEADS // KV_HEADS, dim=2)
        values = values.repeat_interleave(HEADS // KV_HEADS, dim=2)
        query, keys, values = (part.transpose(1, 2) for part in (query, keys, values))
        output = F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, dropout_p=0.0, is_causal=False)
        return self.o_proj(output.transpose(1, 2).contiguous().reshape(batch, time, WIDTH))


class MineWorldLayer(nn.Module):
    """Attention, then MLP, each on a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.self_attn, self.mlp = MineWorldAttention(), CosmosMlp()
        self.input_layernorm, self.post_attention_layernorm = CosmosNorm(WIDTH), CosmosNorm(WIDTH)

    def forward(self, x: Tensor, mask: Tensor, position_ids: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), mask, position_ids, tables)
        return x + self.mlp(self.post_attention_layernorm(x))


class MineWorld(nn.Module):
    """Picture tokens and action tokens of one vocabulary."""

    max_seq_len = LENGTH
    cos_cached: Tensor
    sin_cached: Tensor
    causal_mask: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList([MineWorldLayer() for _ in range(LAYERS)])
        self.norm, self.lm_head = CosmosNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)
        freqs = 1.0 / (10000 ** (torch.arange(0, HEAD_DIM, 2).float() / HEAD_DIM))
        angles = torch.einsum("i,j->ij", torch.arange(LENGTH).float(), freqs)
        angles = torch.cat((angles, angles), dim=-1)
        self.register_buffer("cos_cached", angles.cos(), persistent=False)
        self.register_buffer("sin_cached", angles.sin(), persistent=False)
        self.register_buffer("causal_mask", torch.tril(torch.ones(LENGTH, LENGTH, dtype=torch.bool)), persistent=False)

    def forward(self, input_ids: Tensor, cache_position: Tensor) -> Tensor:
        h, mask = self.embed_tokens(input_ids), self.causal_mask[cache_position]
        tables = self.cos_cached[:LENGTH], self.sin_cached[:LENGTH]
        for layer in self.layers:
            h = layer(h, mask, cache_position, tables)
        return self.lm_head(self.norm(h)[:, :, :])


def rotate_half(x: Tensor) -> Tensor:
    """Return x with its halves exchanged, the second one negated."""
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), dim=-1)


MINEWORLD = [Case("mineworld", "MineWorld", "picture and action tokens; caches [B, S, heads, D]", Plain(MineWorld))]
