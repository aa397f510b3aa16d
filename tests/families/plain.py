"""Plain modules: a nanoGPT with a cache. They follow docs/reference/step_protocol.md."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .case import BATCH, HEADS, LAYERS, LENGTH, MLP_WIDTH, VOCAB, WIDTH, Case, Plain


class CausalSelfAttention(nn.Module):
    """q, k and v from one linear, and a cache of keys and values."""

    keys: Tensor
    values: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        for name in ("keys", "values"):
            self.register_buffer(name, torch.zeros(BATCH, HEADS, LENGTH, WIDTH // HEADS), persistent=False)

    def forward(self, x: Tensor, position: Tensor) -> Tensor:
        batch, time, width = x.shape
        q, k, v = (
            part.view(batch, time, HEADS, width // HEADS).transpose(1, 2) for part in self.c_attn(x).split(width, 2)
        )
        keys, values = self.keys.index_copy_(2, position, k), self.values.index_copy_(2, position, v)
        mask = torch.arange(LENGTH)[None, :] <= position[:, None]
        y = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask)
        return self.c_proj(y.transpose(1, 2).contiguous().view(batch, time, width))


class GptMlp(nn.Module):
    """Two linears around a GELU."""

    def __init__(self) -> None:
        super().__init__()
        self.c_fc, self.c_proj = nn.Linear(WIDTH, MLP_WIDTH), nn.Linear(MLP_WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.c_proj(F.gelu(self.c_fc(x)))


class GptBlock(nn.Module):
    """Attention, then MLP, each on a norm of what came before."""

    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH, bias=False), nn.LayerNorm(WIDTH, bias=False)
        self.attn, self.mlp = CausalSelfAttention(), GptMlp()

    def forward(self, x: Tensor, position: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x), position)
        return x + self.mlp(self.ln_2(x))


class NanoGPT(nn.Module):
    """github.com/karpathy/nanoGPT with a cache: learned positions, and a head that is the embedding."""

    max_seq_len = LENGTH

    def __init__(self) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCAB, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.h = nn.ModuleList([GptBlock() for _ in range(LAYERS)])
        self.ln_f, self.lm_head = nn.LayerNorm(WIDTH, bias=False), nn.Linear(WIDTH, VOCAB, bias=False)
        self.lm_head.weight = self.wte.weight

    def forward(self, input_ids: Tensor, cache_position: Tensor) -> Tensor:
        x = self.wte(input_ids) + self.wpe(cache_position)
        for block in self.h:
            x = block(x, cache_position)
        return self.lm_head(self.ln_f(x))


PLAIN = [Case("nanogpt", "nanoGPT", "a plain module", Plain(NanoGPT))]
