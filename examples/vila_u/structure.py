"""The structure of VILA-U (arXiv 2409.04429), FastCar's model, with random weights: a Llama body and an RQ transformer.

A position has D codes of one codebook. The body reads the sum of their features through a projector, as it reads
words; the depth head (RQ transformer, arXiv 2203.01941) gives the codes of the next position one after the other. How
both are laid out for the compiler is in docs/reference/step_protocol.md, "A depth head".
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaModel


@dataclass(frozen=True)
class Sizes:
    """Sizes of both parts.

    Args:
        side: tokens along a frame's side. codes: D. entries: V, of the codebook. features: width of a code.
        head, head_layers, head_heads: width, layers and heads of the depth head; its MLPs are 4 times as wide.
    """

    hidden: int
    intermediate: int
    layers: int
    heads: int
    words: int
    side: int
    codes: int
    entries: int
    features: int
    head: int
    head_layers: int
    head_heads: int
    positions: int


SMALL = Sizes(
    hidden=512, intermediate=1376, layers=5, heads=8, words=512, positions=96, side=4, codes=4, entries=1024,
    features=64, head=256, head_layers=6, head_heads=4,
)  # fmt: skip
"""22 million parameters."""

FULL = Sizes(
    hidden=4096, intermediate=11008, layers=32, heads=32, words=32000, positions=2304, side=16, codes=4, entries=16384,
    features=256, head=2560, head_layers=6, head_heads=40,
)  # fmt: skip
"""VILA-U 7B with 256 tokens a frame and 8 frames."""


def code_features(codebook: Tensor, codes: Tensor) -> Tensor:
    """The sum [..., C] of the features of codes [..., D]; a code of -1 is not chosen and counts for nothing."""
    parts = F.embedding(codes.clamp(min=0), codebook) * (codes >= 0).unsqueeze(-1)
    return sum(parts.unbind(-2), torch.zeros(()))


class Body(LlamaModel):
    """inputs_embeds [B, T, H + D] -> hidden states [B, T, H]: words in the first H columns, codes in the last D."""

    def __init__(self, sizes: Sizes, codebook: nn.Parameter) -> None:
        config = LlamaConfig(
            vocab_size=sizes.words, hidden_size=sizes.hidden, intermediate_size=sizes.intermediate,
            num_hidden_layers=sizes.layers, num_attention_heads=sizes.heads, max_position_embeddings=sizes.positions,
        )  # fmt: skip
        super().__init__(config)
        config.input_size, config.tokens_per_frame = sizes.hidden + sizes.codes, sizes.side**2
        self.codes, self.codebook = sizes.codes, codebook
        self.projector = nn.Sequential(
            nn.Linear(sizes.features, sizes.hidden), nn.GELU(), nn.Linear(sizes.hidden, sizes.hidden)
        )

    def forward(self, inputs_embeds: Tensor, **options: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Run the layers over words and frames."""
        words, codes = inputs_embeds[..., : -self.codes], inputs_embeds[..., -self.codes :].long()
        frames = self.projector(code_features(self.codebook, codes))
        return super().forward(inputs_embeds=torch.where(codes[..., :1] >= 0, frames, words), **options)


class HeadBlock(nn.Module):
    """A block of the RQ transformer over a cache of D rows: LayerNorm, biases, GELU."""

    keys: Tensor
    values: Tensor

    def __init__(self, sizes: Sizes, batch: int) -> None:
        super().__init__()
        width, self.heads = sizes.head, sizes.head_heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value, self.proj = (nn.Linear(width, width) for _ in range(4))
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        for name in ("keys", "values"):
            cache = torch.zeros(batch, self.heads, sizes.codes, width // self.heads)
            self.register_buffer(name, cache, persistent=False)

    def forward(self, x: Tensor, position: Tensor) -> Tensor:
        """One code of each row."""
        h, shape = self.norm_1(x), (x.shape[0], 1, self.heads, -1)
        query, key, value = (p(h).view(shape).transpose(1, 2) for p in (self.query, self.key, self.value))
        keys, values = self.keys.index_copy_(2, position, key), self.values.index_copy_(2, position, value)
        seen = torch.arange(keys.shape[2])[None] <= position[:, None]
        attended = F.scaled_dot_product_attention(query, keys, values, attn_mask=seen)
        x = x + self.proj(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm_2(x))


class DepthHead(nn.Module):
    """inputs_embeds [B, 1, H + D] -> logits [B, 1, V]: a hidden state and the codes so far; position i is code i."""

    def __init__(self, sizes: Sizes, codebook: nn.Parameter, batch: int) -> None:
        super().__init__()
        self.max_seq_len, self.tokens_per_frame, self.input_size = sizes.codes, 1, sizes.hidden + sizes.codes
        self.codebook = codebook
        self.from_hidden, self.from_codes = nn.Linear(sizes.hidden, sizes.head), nn.Linear(sizes.features, sizes.head)
        self.positions = nn.Parameter(0.02 * torch.randn(sizes.codes, sizes.head))
        self.blocks = nn.ModuleList([HeadBlock(sizes, batch) for _ in range(sizes.head_layers)])
        self.norm, self.classifier = nn.LayerNorm(sizes.head), nn.Linear(sizes.head, sizes.entries)

    def forward(self, inputs_embeds: Tensor, cache_position: Tensor) -> Tensor:
        """The logits of one code."""
        hidden, codes = inputs_embeds[..., : -self.max_seq_len], inputs_embeds[..., -self.max_seq_len :].long()
        later = self.from_codes(code_features(self.codebook, codes))
        x = torch.where((cache_position == 0)[:, None], self.from_hidden(hidden), later)
        x = x + self.positions[cache_position]
        for block in self.blocks:
            x = block(x, cache_position)
        return self.classifier(self.norm(x))


def build(sizes: Sizes, batch: int, seed: int = 0) -> tuple[Body, DepthHead]:
    """Body and depth head with random weights and one codebook; batch: rows, both of a guidance pair."""
    torch.manual_seed(seed)
    codebook = nn.Parameter(torch.randn(sizes.entries, sizes.features))
    return Body(sizes, codebook).eval(), DepthHead(sizes, codebook, batch).eval()
