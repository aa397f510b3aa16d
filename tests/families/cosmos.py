"""Cosmos' autoregressive world model as it is published: cosmos1/models/autoregressive of github.com/NVIDIA/Cosmos.

RoPE over time, rows and columns of the video, a norm of every query and key head, grouped heads, a slice of the cache.
What is added: caches and tables are buffers.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .case import BATCH, LAYERS, LENGTH, MLP_WIDTH, VOCAB, WIDTH, Case, Plain

HEADS, KV_HEADS, HEAD_DIM = 4, 2, 12
SHAPE = (6, 2, 2)
"""Frames, rows and columns of the video's latents. The first token begins the video and has a position of its own."""
PAD_TO = 8


class CosmosNorm(nn.Module):
    """x divided by its root mean square."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).type_as(x) * self.weight


class CosmosMlp(nn.Module):
    """SwiGLU."""

    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w3 = nn.Linear(WIDTH, MLP_WIDTH, bias=False), nn.Linear(WIDTH, MLP_WIDTH, bias=False)
        self.w2 = nn.Linear(MLP_WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Rope3d(nn.Module):
    """Angles of time, row and column, each turning a part of a head."""

    cos_cached: Tensor
    sin_cached: Tensor

    def __init__(self) -> None:
        super().__init__()
        angles = torch.cat([torch.zeros(1, HEAD_DIM), _angles()])
        padding = -len(angles) % PAD_TO
        angles = torch.cat([angles, torch.zeros(padding, HEAD_DIM)])[None, :, None, :]
        self.register_buffer("cos_cached", torch.cos(angles), persistent=False)
        self.register_buffer("sin_cached", torch.sin(angles), persistent=False)

    def forward(self, query: Tensor, key: Tensor, input_pos: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = self.cos_cached[:, input_pos, :, :], self.sin_cached[:, input_pos, :, :]
        return _rotated(query, cos, sin), _rotated(key, cos, sin)


def _angles() -> Tensor:
    """Angles [frames x rows x columns, D]: halves of a head turn alike."""
    spatial = HEAD_DIM // 6 * 2
    temporal = HEAD_DIM - 2 * spatial
    freqs = [
        1.0 / (10000 ** (torch.arange(0, dim, 2)[: dim // 2].float() / dim)) for dim in (temporal, spatial, spatial)
    ]
    time, rows, columns = (torch.outer(torch.arange(n).float(), f) for n, f in zip(SHAPE, freqs, strict=True))
    frames, height, width = SHAPE
    parts = [
        time[:, None, None].expand(-1, height, width, -1),
        rows[None, :, None].expand(frames, -1, width, -1),
        columns[None, None, :].expand(frames, height, -1, -1),
    ]
    return torch.cat(parts * 2, dim=-1).reshape(-1, HEAD_DIM)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    turned = cos.shape[-1]
    x, rest = x[..., :turned], x[..., turned:]
    first, second = x.view(x.shape[:-1] + torch.Size((2, x.shape[-1] // 2))).unbind(dim=-2)
    return torch.cat(((x * cos) + (torch.cat((-second, first), dim=-1) * sin), rest), dim=-1)


class CosmosAttention(nn.Module):
    """Grouped-query attention with a norm of every query and key head."""

    cache_k: Tensor
    cache_v: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.wq = nn.Linear(WIDTH, HEADS * HEAD_DIM, bias=False)
        self.wk = nn.Linear(WIDTH, KV_HEADS * HEAD_DIM, bias=False)
        self.wv = nn.Linear(WIDTH, KV_HEADS * HEAD_DIM, bias=False)
        self.wo = nn.Linear(HEADS * HEAD_DIM, WIDTH, bias=False)
        self.q_norm, self.k_norm = CosmosNorm(HEAD_DIM), CosmosNorm(HEAD_DIM)
        for name in ("cache_k", "cache_v"):
            self.register_buffer(name, torch.zeros(BATCH, KV_HEADS, LENGTH, HEAD_DIM), persistent=False)

    def forward(self, x: Tensor, rope: Rope3d, input_pos: Tensor, mask: Tensor) -> Tensor:
        batch, time, _ = x.shape
        xq = self.q_norm(self.wq(x).view(batch, time, HEADS, HEAD_DIM))
        xk = self.k_norm(self.wk(x).view(batch, time, KV_HEADS, HEAD_DIM))
        xv = self.wv(x).view(batch, time, KV_HEADS, HEAD_DIM)
        xq, xk = rope(xq, xk, input_pos)
        xq, xk, xv = (part.transpose(1, 2) for part in (xq, xk, xv))
        self.cache_k[:batch, :, input_pos] = xk
        self.cache_v[:batch, :, input_pos] = xv
        keys, values = self.cache_k[:batch, :, :], self.cache_v[:batch, :, :]
        keys = keys.repeat_interleave(HEADS // KV_HEADS, dim=1)
        values = values.repeat_interleave(HEADS // KV_HEADS, dim=1)
        output = F.scaled_dot_product_attention(
            xq, keys, values, attn_mask=mask, dropout_p=0.0, scale=1.0 / math.sqrt(HEAD_DIM), is_causal=False
        )
        return self.wo(output.transpose(1, 2).contiguous().view(batch, time, -1))


class CosmosBlock(nn.Module):
    """Attention, then feed forward, each on a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.feed_forward = CosmosAttention(), CosmosMlp()
        self.attention_norm, self.ffn_norm = CosmosNorm(WIDTH), CosmosNorm(WIDTH)

    def forward(self, x: Tensor, rope: Rope3d, input_pos: Tensor, mask: Tensor) -> Tensor:
        h = x + self.attention(self.attention_norm(x), rope, input_pos, mask)
        return h + self.feed_forward(self.ffn_norm(h))


class Cosmos(nn.Module):
    """Tokens of a video's latents."""

    max_seq_len = LENGTH
    causal_mask: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList([CosmosBlock() for _ in range(LAYERS)])
        self.norm, self.rope = CosmosNorm(WIDTH), Rope3d()
        self.output = nn.Linear(WIDTH, VOCAB, bias=False)
        self.register_buffer("causal_mask", torch.tril(torch.ones(LENGTH, LENGTH, dtype=torch.bool)), persistent=False)

    def forward(self, input_ids: Tensor, cache_position: Tensor) -> Tensor:
        h, mask = self.tok_embeddings(input_ids), self.causal_mask[cache_position][None, None, :, :]
        for layer in self.layers:
            h = layer(h, self.rope, cache_position, mask)
        return self.output(self.norm(h))


_MLP = r"layers\.(\d+)\.feed_forward"
COSMOS = [Case("cosmos", "Cosmos, autoregressive", "3-D RoPE, norms of q and k, grouped heads", Plain(Cosmos), _MLP)]
