"""Cosmos Video2World (5B, 13B) as it is published: cosmos1/models/autoregressive/networks/transformer.py.

The blocks of Cosmos, with cross-attention to the text embeddings of a T5 between self-attention and MLP. It has a norm
and a residual of its own, and norms of query and key heads, but no RoPE. Every layer adds the absolute positions again.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .case import BATCH, LAYERS, LENGTH, VOCAB, WIDTH, Case, Plain
from .cosmos import HEAD_DIM, HEADS, KV_HEADS, CosmosAttention, CosmosMlp, CosmosNorm, Rope3d

TEXT_LENGTH, TEXT_WIDTH = 7, 20


class CosmosCrossAttention(nn.Module):
    """Grouped-query attention to the text, whose keys and values are computed in every forward."""

    def __init__(self) -> None:
        super().__init__()
        self.wq = nn.Linear(WIDTH, HEADS * HEAD_DIM, bias=False)
        self.wk = nn.Linear(TEXT_WIDTH, KV_HEADS * HEAD_DIM, bias=False)
        self.wv = nn.Linear(TEXT_WIDTH, KV_HEADS * HEAD_DIM, bias=False)
        self.wo = nn.Linear(HEADS * HEAD_DIM, WIDTH, bias=False)
        self.q_norm, self.k_norm = CosmosNorm(HEAD_DIM), CosmosNorm(HEAD_DIM)

    def forward(self, x: Tensor, context: Tensor, mask: Tensor | None) -> Tensor:
        batch, time, _ = x.shape
        xq = self.q_norm(self.wq(x).view(batch, time, HEADS, HEAD_DIM)).transpose(1, 2)
        keys = self.k_norm(self.wk(context).view(batch, -1, KV_HEADS, HEAD_DIM)).transpose(1, 2)
        values = self.wv(context).view(batch, -1, KV_HEADS, HEAD_DIM).transpose(1, 2)
        keys = keys.repeat_interleave(HEADS // KV_HEADS, dim=1)
        values = values.repeat_interleave(HEADS // KV_HEADS, dim=1)
        output = F.scaled_dot_product_attention(xq, keys, values, attn_mask=mask, scale=HEAD_DIM**-0.5)
        return self.wo(output.transpose(1, 2).contiguous().view(batch, time, -1))


class Video2WorldBlock(nn.Module):
    """Self-attention, cross-attention and feed forward, each on a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.cross_attention = CosmosAttention(), CosmosCrossAttention()
        self.feed_forward = CosmosMlp()
        self.attention_norm, self.cross_attention_norm = CosmosNorm(WIDTH), CosmosNorm(WIDTH)
        self.ffn_norm = CosmosNorm(WIDTH)

    def forward(
        self, x: Tensor, rope: Rope3d, input_pos: Tensor, mask: Tensor, context: Tensor, context_mask: Tensor | None
    ) -> Tensor:
        h = x + self.attention(self.attention_norm(x), rope, input_pos, mask)
        h = h + self.cross_attention(self.cross_attention_norm(h), context, context_mask)
        return h + self.feed_forward(self.ffn_norm(h))


class _Decoder(nn.Module):
    """Tokens of a video's latents."""

    max_seq_len = LENGTH
    context_length, context_size = TEXT_LENGTH, TEXT_WIDTH
    causal_mask: Tensor
    abs_pos_emb: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList([Video2WorldBlock() for _ in range(LAYERS)])
        self.norm, self.rope = CosmosNorm(WIDTH), Rope3d()
        self.output = nn.Linear(WIDTH, VOCAB, bias=False)
        self.register_buffer("causal_mask", torch.tril(torch.ones(LENGTH, LENGTH, dtype=torch.bool)), persistent=False)
        angles = torch.arange(LENGTH)[:, None] / 100 ** (torch.arange(WIDTH // 2) / (WIDTH // 2))
        self.register_buffer("abs_pos_emb", torch.cat([angles.sin(), angles.cos()], -1)[None], persistent=False)

    def decode(self, input_ids: Tensor, cache_position: Tensor, context: Tensor, context_mask: Tensor | None) -> Tensor:
        h, mask = self.tok_embeddings(input_ids), self.causal_mask[cache_position][None, None, :, :]
        for layer in self.layers:
            h = h + self.abs_pos_emb[:, cache_position, :]
            h = layer(h, self.rope, cache_position, mask, context, context_mask)
        return self.output(self.norm(h))


class CosmosVideo2World(_Decoder):
    """Under a text whose rows are padded."""

    def forward(self, input_ids: Tensor, cache_position: Tensor, context: Tensor, context_mask: Tensor) -> Tensor:
        return self.decode(input_ids, cache_position, context, context_mask[:, None, None, :])


class CosmosUnmasked(_Decoder):
    """Under a text that has no padding."""

    def forward(self, input_ids: Tensor, cache_position: Tensor, context: Tensor) -> Tensor:
        return self.decode(input_ids, cache_position, context, None)


def text() -> tuple[Tensor, Tensor]:
    """Text embeddings of every row, and a mask that hides the padding of the second row."""
    mask = torch.ones(BATCH, TEXT_LENGTH, dtype=torch.bool)
    mask[1, 4:] = False
    return torch.randn(BATCH, TEXT_LENGTH, TEXT_WIDTH, generator=torch.Generator().manual_seed(2)), mask


_MLP = r"layers\.(\d+)\.feed_forward"
COSMOS_VIDEO2WORLD = [
    Case(
        "cosmos-video2world", "Cosmos, autoregressive", "cross-attention to text embeddings, under a mask",
        Plain(CosmosVideo2World), _MLP, context=text,
    ),
    Case(
        "cosmos-video2world-unmasked", "Cosmos, autoregressive", "cross-attention to text embeddings",
        Plain(CosmosUnmasked), _MLP, context=lambda: text()[:1],
    ),
]  # fmt: skip
