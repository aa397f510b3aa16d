"""What sparse attention means: full caches and a mask; and StreamingLLM as its paper tells it, key by key."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH, HEADS, KV_HEADS, DIM, VOCAB, ROWS = 32, 4, 2, 8, 11, 48


def seen(length: int, sinks: int, window: int) -> Tensor:
    """bool [T, T]: which keys (columns) each query (row) sees."""
    query, key = torch.arange(length)[:, None], torch.arange(length)[None]
    return (key <= query) & ((key < sinks) | (key > query - window))


def rotate(x: Tensor, position: Tensor) -> Tensor:
    """Rotary embedding of [..., T, D] at positions [T]."""
    angle = position[:, None] * 0.5 ** torch.arange(x.shape[-1] // 2)
    first, second = x.chunk(2, -1)
    return torch.cat([first * angle.cos() - second * angle.sin(), first * angle.sin() + second * angle.cos()], -1)


class RotaryBlock(nn.Module):
    """Grouped-query attention with rotary positions, normed queries and keys, and a GELU MLP."""

    keys: Tensor
    values: Tensor

    def __init__(self, batch: int, rotary: bool) -> None:
        super().__init__()
        self.rotary = rotary
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.norm_q, self.norm_k = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.q, self.kv = nn.Linear(WIDTH, HEADS * DIM), nn.Linear(WIDTH, 2 * KV_HEADS * DIM)
        self.out, self.up, self.down = nn.Linear(HEADS * DIM, WIDTH), nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)
        self.register_buffer("keys", torch.zeros(batch, KV_HEADS, ROWS, DIM), persistent=False)
        self.register_buffer("values", torch.zeros(batch, KV_HEADS, ROWS, DIM), persistent=False)

    def project(self, h: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys, values [B, heads, T, D] before any rotation."""
        x = self.norm_1(h)
        q = self.norm_q(self.q(x).unflatten(-1, (HEADS, DIM))).transpose(1, 2)
        k, v = (t.unflatten(-1, (KV_HEADS, DIM)).transpose(1, 2) for t in self.kv(x).chunk(2, -1))
        return q, self.norm_k(k), v

    def finish(self, h: Tensor, attended: Tensor) -> Tensor:
        """What follows attention [B, heads, T, D]."""
        h = h + self.out(attended.transpose(1, 2).flatten(2))
        return h + self.down(F.gelu(self.up(self.norm_2(h))))

    def forward(self, h: Tensor, position: Tensor) -> Tensor:
        q, k, v = self.project(h)
        if self.rotary:
            q, k = rotate(q, position), rotate(k, position)
        keys, values = self.keys.index_copy_(2, position, k), self.values.index_copy_(2, position, v)
        mask = torch.arange(ROWS)[None, :] <= position[:, None]
        return self.finish(h, F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, enable_gqa=True))


class RotaryDecoder(nn.Module):
    """A decoder of the step protocol."""

    def __init__(self, batch: int, rotary: bool = True) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.max_seq_len = ROWS
        self.embed, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.blocks = nn.ModuleList([RotaryBlock(batch, rotary) for _ in range(2)])

    def forward(self, input_ids: Tensor, cache_position: Tensor) -> Tensor:
        h = self.embed(input_ids)
        for block in self.blocks:
            h = block(h, cache_position)
        return self.head(h)


def streaming(model: RotaryDecoder, ids: Tensor, sinks: int, window: int, positions: str) -> Tensor:
    """Logits [B, T, V]; per query the keys that it sees, gathered before rotation.

    With `positions` "cache", query and keys are rotated for their places among those keys, as StreamingLLM does.
    """
    h, length = model.embed(ids), ids.shape[1]
    mask = seen(length, sinks, window)
    for block in model.blocks:
        assert isinstance(block, RotaryBlock)
        q, k, v = block.project(h)
        rows = []
        for t in range(length):
            kept = mask[t].nonzero()[:, 0]
            place = torch.arange(len(kept)) if positions == "cache" else kept
            keys = rotate(k[:, :, kept], place).repeat_interleave(HEADS // KV_HEADS, 1)
            values = v[:, :, kept].repeat_interleave(HEADS // KV_HEADS, 1)
            weights = (rotate(q[:, :, t : t + 1], place[-1:]) @ keys.transpose(-1, -2) * DIM**-0.5).softmax(-1)
            rows.append(weights @ values)
        h = block.finish(h, torch.cat(rows, 2))
    return model.head(h)
