"""LlamaGen (arXiv 2406.06525) as it is published: autoregressive/models/gpt.py of github.com/FoundationVision/LlamaGen.

Fused q, k, v; RoPE over the rows and columns of a picture, written with pairs; a cache that is a module of its own;
keys and values that are repeated for all query heads; a table of causal masks. What is added is what a caller has to
write: a step of two arguments, and one table for tokens and classes.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .case import BATCH, HEADS, LAYERS, LENGTH, VOCAB, WIDTH, Case, Plain
from .cosmos import CosmosNorm

GRID, CLASSES = 4, 3
"""Rows and columns of a picture; classes. Here a video is pictures one after the other, after one class token."""
MLP = r"(?:.*\.)?layers\.(\d+)\.feed_forward"


class FeedForward(nn.Module):
    """SwiGLU; its width is two thirds of four times the model's, rounded up."""

    def __init__(self) -> None:
        super().__init__()
        hidden = -(-(4 * WIDTH * 2 // 3) // 16) * 16
        self.w1, self.w3 = nn.Linear(WIDTH, hidden, bias=False), nn.Linear(WIDTH, hidden, bias=False)
        self.w2, self.ffn_dropout = nn.Linear(hidden, WIDTH, bias=False), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.ffn_dropout(self.w2(F.silu(self.w1(x)) * self.w3(x)))


class KVCache(nn.Module):
    """Keys and values of one layer, written where they stand in the sequence."""

    k_cache: Tensor
    v_cache: Tensor

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.register_buffer("k_cache", torch.zeros(BATCH, heads, LENGTH, WIDTH // HEADS))
        self.register_buffer("v_cache", torch.zeros(BATCH, heads, LENGTH, WIDTH // HEADS))

    def update(self, input_pos: Tensor, k_val: Tensor, v_val: Tensor) -> tuple[Tensor, Tensor]:
        k_out, v_out = self.k_cache, self.v_cache
        k_out[:, :, input_pos] = k_val
        v_out[:, :, input_pos] = v_val
        return k_out, v_out


class Attention(nn.Module):
    """One linear for q, k and v; keys and values repeated for the query heads that share them."""

    def __init__(self, kv_heads: int) -> None:
        super().__init__()
        self.kv_heads, self.head_dim = kv_heads, WIDTH // HEADS
        self.wqkv = nn.Linear(WIDTH, (HEADS + 2 * kv_heads) * self.head_dim, bias=False)
        self.wo, self.resid_dropout = nn.Linear(WIDTH, WIDTH, bias=False), nn.Dropout(0.1)
        self.kv_cache = KVCache(kv_heads)

    def forward(self, x: Tensor, freqs_cis: Tensor, input_pos: Tensor, mask: Tensor) -> Tensor:
        batch, time, _ = x.shape
        kv_size = self.kv_heads * self.head_dim
        xq, xk, xv = self.wqkv(x).split([WIDTH, kv_size, kv_size], dim=-1)
        xq = apply_rotary_emb(xq.view(batch, time, HEADS, self.head_dim), freqs_cis)
        xk = apply_rotary_emb(xk.view(batch, time, self.kv_heads, self.head_dim), freqs_cis)
        xv = xv.view(batch, time, self.kv_heads, self.head_dim)
        xq, xk, xv = (part.transpose(1, 2) for part in (xq, xk, xv))
        keys, values = self.kv_cache.update(input_pos, xk, xv)
        keys = keys.repeat_interleave(HEADS // self.kv_heads, dim=1)
        values = values.repeat_interleave(HEADS // self.kv_heads, dim=1)
        output = F.scaled_dot_product_attention(xq, keys, values, attn_mask=mask, is_causal=False, dropout_p=0)
        output = output.transpose(1, 2).contiguous().view(batch, time, WIDTH)
        return self.resid_dropout(self.wo(output))


class TransformerBlock(nn.Module):
    """Attention, then feed forward, each on a norm."""

    def __init__(self, kv_heads: int) -> None:
        super().__init__()
        self.attention, self.feed_forward = Attention(kv_heads), FeedForward()
        self.attention_norm, self.ffn_norm = CosmosNorm(WIDTH), CosmosNorm(WIDTH)
        self.drop_path = nn.Identity()

    def forward(self, x: Tensor, freqs_cis: Tensor, input_pos: Tensor, mask: Tensor) -> Tensor:
        h = x + self.drop_path(self.attention(self.attention_norm(x), freqs_cis, input_pos, mask))
        return h + self.drop_path(self.feed_forward(self.ffn_norm(h)))


class Backbone(nn.Module):
    """The layers and the last norm, between embeddings and hidden states."""

    max_seq_len, hidden_size = LENGTH, WIDTH
    freqs_cis: Tensor
    causal_mask: Tensor

    def __init__(self, kv_heads: int, prefix: int) -> None:
        super().__init__()
        self.tok_dropout = nn.Dropout(0.1)
        self.layers = nn.ModuleList([TransformerBlock(kv_heads) for _ in range(LAYERS)])
        self.norm = CosmosNorm(WIDTH)
        self.register_buffer("freqs_cis", freqs_cis_2d(WIDTH // HEADS, prefix), persistent=False)
        mask = torch.tril(torch.ones(LENGTH, LENGTH, dtype=torch.bool)).unsqueeze(0).repeat(BATCH, 1, 1)
        self.register_buffer("causal_mask", mask, persistent=False)

    def forward(self, inputs_embeds: Tensor, cache_position: Tensor) -> Tensor:
        mask = self.causal_mask[: inputs_embeds.shape[0], None, cache_position]
        h, freqs_cis = self.tok_dropout(inputs_embeds), self.freqs_cis[cache_position]
        for layer in self.layers:
            h = layer(h, freqs_cis, cache_position, mask)
        return self.norm(h)


class LlamaGen(nn.Module):
    """Class-conditional. The table of classes stands behind that of tokens, so token ids from VOCAB on are classes."""

    max_seq_len = LENGTH

    def __init__(self, kv_heads: int) -> None:
        super().__init__()
        self.embeddings = nn.Embedding(VOCAB + CLASSES, WIDTH)
        self.backbone = Backbone(kv_heads, prefix=1)
        self.output = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, input_ids: Tensor, cache_position: Tensor) -> Tensor:
        return self.output(self.backbone(self.embeddings(input_ids), cache_position)).float()


def freqs_cis_2d(elements: int, prefix: int) -> Tensor:
    """Cosines and sines [LENGTH, elements / 2, 2]: half of the pairs turn with the row, half with the column."""
    half = elements // 2
    freqs = 1.0 / (10000 ** (torch.arange(0, half, 2)[: half // 2].float() / half))
    freqs = torch.outer(torch.arange(GRID), freqs)
    grid = torch.concat(
        [freqs[:, None, :].expand(-1, GRID, -1), freqs[None, :, :].expand(GRID, -1, -1)], dim=-1
    ).flatten(0, 1)
    picture = torch.stack([torch.cos(grid), torch.sin(grid)], dim=-1)
    pictures = picture.repeat(-(-LENGTH // len(picture)), 1, 1)
    return torch.cat([torch.zeros(prefix, half, 2), pictures])[:LENGTH]


def apply_rotary_emb(x: Tensor, freqs_cis: Tensor) -> Tensor:
    """Rotate neighbours of x [B, T, heads, D] as pairs."""
    pairs = x.float().reshape(*x.shape[:-1], -1, 2)
    freqs_cis = freqs_cis.view(1, pairs.size(1), 1, pairs.size(3), 2)
    rotated = torch.stack(
        [
            pairs[..., 0] * freqs_cis[..., 0] - pairs[..., 1] * freqs_cis[..., 1],
            pairs[..., 1] * freqs_cis[..., 0] + pairs[..., 0] * freqs_cis[..., 1],
        ],
        dim=-1,
    )
    return rotated.flatten(3).type_as(x)


LLAMAGEN = [
    Case(
        "llamagen-c2i", "LlamaGen", "class token, 2-D RoPE, a cache module, repeated keys, a table of masks",
        Plain(LlamaGen, (HEADS,)), MLP, classes=CLASSES,
    ),
    Case(
        "llamagen-t2i", "LlamaGen", "a prefix of text embeddings: embeddings in, hidden states out; grouped heads",
        Plain(Backbone, (HEADS // 2, 4)), MLP, headless=True,
    ),
]  # fmt: skip
