"""One-layer decoder small enough to read as a graph, and the stages of the pipeline over it."""

import copy
from collections.abc import Sequence
from functools import cache

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fastcar_compile.ir.ops  # noqa: F401  (registers the operators)
from fastcar_compile.frontend.capture import capture
from fastcar_compile.ir.pass_manager import Pass, run_pipeline
from fastcar_compile.ir.program import DecoderProgram
from fastcar_compile.runtime.backends.base import StepResult
from fastcar_compile.runtime.backends.eager import EagerStepper

BATCH, ROWS, FRAME, WIDTH, VOCAB, CHUNK = 2, 14, 3, 8, 5, 2


class TinyMlp(nn.Module):
    """SwiGLU, 8 -> 12 -> 8."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(WIDTH, 12, bias=False), nn.Linear(WIDTH, 12, bias=False)
        self.down = nn.Linear(12, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class TinyBlock(nn.Module):
    """Two query heads over one key/value head; the cast and the dropout are there to be removed."""

    keys: Tensor
    values: Tensor

    def __init__(self, batch: int = BATCH) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH, bias=False), nn.LayerNorm(WIDTH, bias=False)
        self.qkv, self.out = nn.Linear(WIDTH, 16, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.mlp, self.dropout = TinyMlp(), nn.Dropout(0.1)
        self.register_buffer("keys", torch.zeros(batch, 1, ROWS, 4))
        self.register_buffer("values", torch.zeros(batch, 1, ROWS, 4))

    def forward(self, h: Tensor, position: Tensor) -> Tensor:
        h = h + self.dropout(self.out(self.attend(self.norm_1(h.float()), position)))
        return h + self.feed(self.norm_2(h))

    def feed(self, x: Tensor) -> Tensor:
        return self.mlp(x)

    def attend(self, x: Tensor, position: Tensor) -> Tensor:
        q, k, v = self.qkv(x).split([8, 4, 4], -1)
        q = q.unflatten(-1, (2, 4)).transpose(1, 2)
        keys = self.keys.index_copy_(2, position, k[:, None])
        values = self.values.index_copy_(2, position, v[:, None])
        y = F.scaled_dot_product_attention(q, keys, values, attn_mask=self.mask(position), enable_gqa=True)
        return y.transpose(1, 2).flatten(2)

    def mask(self, position: Tensor) -> Tensor:
        return torch.arange(ROWS)[None, :] <= position[:, None]


class Windowed(TinyBlock):
    """Every token sees the last four."""

    def mask(self, position: Tensor) -> Tensor:
        columns = torch.arange(ROWS)[None, :]
        return (columns <= position[:, None]) & (columns > position[:, None] - 4)


class Products(TinyBlock):
    """Weights [K, N], as GPT-2 of transformers has them."""

    def __init__(self, batch: int) -> None:
        super().__init__(batch)
        self.w_up, self.b_up = nn.Parameter(torch.randn(WIDTH, 12)), nn.Parameter(torch.randn(12))
        self.w_down = nn.Parameter(torch.randn(12, WIDTH))

    def feed(self, x: Tensor) -> Tensor:
        up = torch.addmm(self.b_up, x.view(-1, WIDTH), self.w_up).view(*x.shape[:-1], 12)
        return torch.relu(up) @ self.w_down


class Fused(TinyBlock):
    """gate and up in one linear; the second half is the gate."""

    biased = False

    def __init__(self, batch: int) -> None:
        super().__init__(batch)
        self.gate_up = nn.Linear(WIDTH, 24, bias=self.biased)

    def feed(self, x: Tensor) -> Tensor:
        up, gate = self.gate_up(x).split(12, -1)
        return self.mlp.down(up * F.silu(gate))


class RootMeanSquare(nn.Module):
    """A norm without a mean, written out."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(WIDTH) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


class Rotated(TinyBlock):
    """Root-mean-square norms, and rotary positions."""

    frequencies: Tensor

    def __init__(self, batch: int = BATCH) -> None:
        super().__init__(batch)
        self.norm_1, self.norm_2 = RootMeanSquare(), RootMeanSquare()
        self.register_buffer("frequencies", torch.tensor([1.0, 0.1]))

    def attend(self, x: Tensor, position: Tensor) -> Tensor:
        q, k, v = self.qkv(x).split([8, 4, 4], -1)
        angles = (position.float()[:, None] * self.frequencies).repeat(1, 2)[None, None]
        q, k = (self.rotated(t, angles) for t in (q.unflatten(-1, (2, 4)).transpose(1, 2), k[:, None]))
        keys = self.keys.index_copy_(2, position, k)
        values = self.values.index_copy_(2, position, v[:, None])
        y = F.scaled_dot_product_attention(q, keys, values, attn_mask=self.mask(position), enable_gqa=True)
        return y.transpose(1, 2).flatten(2)

    def rotated(self, x: Tensor, angles: Tensor) -> Tensor:
        return x * angles.cos() + torch.cat([-x[..., 2:], x[..., :2]], -1) * angles.sin()


class TinyDecoder(nn.Module):
    """A decoder of the step protocol. `blocks` are (kind of block) per layer."""

    def __init__(self, *blocks: type[TinyBlock], batch: int = BATCH) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.max_seq_len = ROWS
        self.embed, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)
        self.blocks = nn.ModuleList([block(batch) for block in blocks or (TinyBlock,)])

    def forward(self, input_ids: Tensor, cache_position: Tensor) -> Tensor:
        h = self.embed(input_ids)
        for block in self.blocks:
            h = block(h, cache_position)
        return self.head(h)


def captured(*blocks: type[TinyBlock], chunk: int = CHUNK, batch: int = BATCH) -> DecoderProgram:
    """A tiny decoder as the front end delivers it, before the first pass."""
    return copy.deepcopy(_captured(blocks, chunk, batch))


@cache
def _captured(blocks: tuple[type[TinyBlock], ...], chunk: int, batch: int) -> DecoderProgram:
    model = TinyDecoder(*blocks, batch=batch)
    return capture(model, batch_size=batch, max_seq_len=ROWS, tokens_per_frame=FRAME, prefill_chunk=chunk)


def after(*passes: Pass, blocks: Sequence[type[TinyBlock]] = ()) -> DecoderProgram:
    """A tiny decoder after these passes."""
    return copy.deepcopy(_after(passes, tuple(blocks)))


@cache
def _after(passes: tuple[Pass, ...], blocks: tuple[type[TinyBlock], ...]) -> DecoderProgram:
    return run_pipeline(captured(*blocks), passes)


def token_ids(length: int = ROWS, batch: int = BATCH) -> np.ndarray:
    return np.random.default_rng(5).integers(0, VOCAB, (batch, length))


def backend_of(program: DecoderProgram) -> EagerStepper:
    """Runs a copy: a graph that was not normalised yet writes into its own buffers."""
    own = copy.deepcopy(program)
    own.prefill_outputs = own.prefill_outputs or own.outputs
    return EagerStepper(own)


def decode(program: DecoderProgram, threshold: float = float("inf")) -> list[StepResult]:
    """Every token of `token_ids` through the decode step."""
    backend = backend_of(program)
    thresholds = np.full(max(1, program.config.num_layers), threshold, np.float32)
    ids = token_ids(batch=program.config.batch_size)
    return [backend.decode(ids[:, t : t + 1], t, t, thresholds) for t in range(ROWS)]


def logits(program: DecoderProgram, threshold: float = float("inf")) -> np.ndarray:
    """Logits [T, B, V] of `decode`."""
    return np.stack([r.logits[:, 0] for r in decode(program, threshold)])


def prefill_logits(program: DecoderProgram) -> np.ndarray:
    """Logits [B, T, V] of the prefill graph over all whole chunks."""
    backend, ids = backend_of(program), token_ids()
    starts = range(0, ROWS - CHUNK + 1, CHUNK)
    return np.concatenate([backend.prefill(ids[:, s : s + CHUNK], s) for s in starts], 1)
