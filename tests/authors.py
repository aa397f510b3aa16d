"""An independent reference of the loops of FastCar's published code: plain PyTorch, one row at a time.

It knows nothing of the package: rows have lists of keys, values and MLP outputs. Each row counts its own tokens, as
left-padded prompts with a mask and positions do.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import LlamaModel


@dataclass
class Row:
    """What one sequence has by layers: keys behind RoPE and values, [Hkv, D] a token; MLP outputs of decoded tokens.

    Attributes:
        replays, scores: [T][L] of the decode forwards.
    """

    layers: int
    keys: list[list[Tensor]] = field(init=False)
    values: list[list[Tensor]] = field(init=False)
    outputs: list[list[Tensor]] = field(init=False)
    replays: list[list[bool]] = field(default_factory=list[list[bool]])
    scores: list[list[float]] = field(default_factory=list[list[float]])

    def __post_init__(self) -> None:
        self.keys, self.values, self.outputs = ([[] for _ in range(self.layers)] for _ in range(3))


@dataclass
class Flow:
    """The backbone's loop.

    Args:
        model: its weights. frame: tokens of a frame. threshold: a score above it replays; None: nothing replays.
    """

    model: LlamaModel
    frame: int
    threshold: float | None

    def row(self) -> Row:
        return Row(len(self.model.layers))

    def read(self, row: Row, prompt: Tensor) -> Tensor:
        """Read a prompt [P, H]; return the hidden state of its last token, [H]."""
        return [self._forward(row, x, decoding=False) for x in prompt][-1]

    def step(self, row: Row, x: Tensor) -> Tensor:
        """One decode forward of x [H]."""
        row.replays.append([])
        row.scores.append([])
        return self._forward(row, x, decoding=True)

    def _forward(self, row: Row, x: Tensor, *, decoding: bool) -> Tensor:
        position = len(row.keys[0])
        for number in range(len(self.model.layers)):
            layer: Any = self.model.layers[number]
            h, part = layer.input_layernorm(x), layer.self_attn
            dim = part.head_dim
            query, key, value = (p(h).view(-1, dim) for p in (part.q_proj, part.k_proj, part.v_proj))
            row.keys[number].append(self._rotated(key, position))
            row.values[number].append(value)
            x = x + part.o_proj(self._attention(self._rotated(query, position), row, number))
            output = layer.mlp(layer.post_attention_layernorm(x))
            if decoding:
                output = self._replayed(row, number, query, output)
            x = x + output
        return self.model.norm(x)

    def _replayed(self, row: Row, number: int, query: Tensor, output: Tensor) -> Tensor:
        """The query here is that from before RoPE, and the key that from behind it."""
        kept, replays, score = row.outputs[number], False, 0.0
        if self.threshold is not None and len(kept) >= self.frame:
            earlier = row.keys[number][-1 - self.frame]
            earlier = earlier.repeat_interleave(len(query) // len(earlier), 0)
            score = float(((query * earlier).sum(-1) / math.sqrt(query.shape[-1])).mean())
            replays = score > self.threshold
        row.replays[-1].append(replays)
        row.scores[-1].append(score)
        kept.append(kept[-self.frame] if replays else output)
        return kept[-1]

    def _rotated(self, heads: Tensor, position: int) -> Tensor:
        cos, sin = self.model.rotary_emb(heads[None], torch.tensor([[position]]))
        low, high = heads.chunk(2, -1)
        return heads * cos[0] + torch.cat([-high, low], -1) * sin[0]

    def _attention(self, query: Tensor, row: Row, number: int) -> Tensor:
        keys, values = (torch.stack(t[number], 1) for t in (row.keys, row.values))
        groups = len(query) // len(keys)
        logits = torch.einsum("hd,hnd->hn", query, keys.repeat_interleave(groups, 0)) / math.sqrt(query.shape[-1])
        return torch.einsum("hn,hnd->hd", F.softmax(logits, -1), values.repeat_interleave(groups, 0)).flatten()


def decoded(flow: Flow, rows: Sequence[Row], prompts: Sequence[Tensor], videos: Tensor) -> Tensor:
    """The hidden states [B, T + 1, H] of prompts [P][H] of any lengths, and of embeddings [B, T, H] behind them."""
    with torch.inference_mode():
        first = [flow.read(row, prompt) for row, prompt in zip(rows, prompts, strict=True)]
        steps = [[flow.step(row, x) for x in video] for row, video in zip(rows, videos, strict=True)]
        return torch.stack([torch.stack([h, *later]) for h, later in zip(first, steps, strict=True)])


Pick = Callable[[Tensor, int, int, int], int]
"""From the guided logits [V] of a code, its pair of rows, its position, and its number there, to the code."""


@dataclass
class Pairs:
    """Prompts beside blank ones, with D codes a position: the unconditional rows get the codes of the conditional ones.

    Args:
        flow: of the body. body, head: modules of examples/vila_u, for their weights. guidance: scale.
    """

    flow: Flow
    body: Any
    head: Any
    guidance: float

    def generate(self, prompts: Sequence[Tensor], count: int, pick: Pick) -> tuple[Tensor, list[Row]]:
        """The codes int64 [B, count, D], and the rows; prompts [P, H], the second half blank."""
        rows, found = [self.flow.row() for _ in prompts], list[Tensor]()
        with torch.inference_mode():
            hidden = [self.flow.read(row, prompt) for row, prompt in zip(rows, prompts, strict=True)]
            while True:
                found.append(self._codes(hidden, pick, max(map(len, prompts)) - 1 + len(found)))
                if len(found) == count:
                    return torch.stack(found, 1), rows
                inputs = [self.body.projector(self.body.codebook[own].sum(0)) for own in found[-1]]
                hidden = [self.flow.step(row, x) for row, x in zip(rows, inputs, strict=True)]

    def _codes(self, hidden: Sequence[Tensor], pick: Pick, position: int) -> Tensor:
        """The codes [B, D] of one position; all that came before is computed again for each."""
        codes, half = [list[int]() for _ in hidden], len(hidden) // 2
        for part in range(self.body.codes):
            logits = [self._head(h, own) for h, own in zip(hidden, codes, strict=True)]
            for b in range(half):
                guided = logits[b + half] + self.guidance * (logits[b] - logits[b + half])
                code = pick(guided, b, position, part)
                codes[b].append(code)
                codes[b + half].append(code)
        return torch.tensor(codes)

    def _head(self, hidden: Tensor, codes: Sequence[int]) -> Tensor:
        """The logits [V] of the next code: the hidden state, then the features summed up to each code."""
        features = [self.head.from_codes(t) for t in self.body.codebook[list(codes)].cumsum(0)]
        x = torch.stack([self.head.from_hidden(hidden), *features]) + self.head.positions[: len(codes) + 1]
        for block in self.head.blocks:
            h = block.norm_1(x)
            query, key, value = (
                p(h).view(len(x), block.heads, -1).transpose(0, 1) for p in (block.query, block.key, block.value)
            )
            logits = query @ key.transpose(1, 2) / math.sqrt(query.shape[-1])
            logits = logits.masked_fill(torch.ones(len(x), len(x)).triu(1).bool(), -math.inf)
            x = x + block.proj((logits.softmax(-1) @ value).transpose(0, 1).flatten(1))
            x = x + block.mlp(block.norm_2(x))
        return self.head.classifier(self.head.norm(x))[-1]


def drawn(noise: Callable[..., Any], top_k: int, top_p: float) -> Pick:
    """Draw among the top_k codes, then among those whose probabilities reach top_p, by Gumbel-max.

    noise: of a position and `part`, float64 [pairs, 1, V], in units of log2.
    """

    def pick(logits: Tensor, pair: int, position: int, part: int) -> int:
        chances = torch.zeros(len(logits), dtype=torch.float64)
        best = logits.double().topk(top_k)
        chances[best.indices] = best.values.softmax(0)
        ordered = chances.sort(descending=True)
        kept = ordered.indices[ordered.values.cumsum(0) - ordered.values < top_p]
        found = torch.from_numpy(noise(position, part=part)[pair, 0].copy()) + chances.log2()
        return int(kept[found[kept].argmax()])

    return pick
