"""Every spelling that docs/reference/step_protocol.md gives, at batch 1 and 2: graphs compute what the module does."""

import copy
from collections.abc import Callable, Sequence
from itertools import cycle
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import first_often
from torch import Tensor, nn
from torch.nn import functional as F

from fastcar_compile.errors import CompileError
from fastcar_compile.frontend.capture import capture
from fastcar_compile.ir.pass_manager import run_pipeline
from fastcar_compile.passes.pipeline import analysis_pipeline
from fastcar_compile.runtime.backends.eager import EagerStepper

ROWS, FRAME, CHUNK, WIDTH, HEADS, DIM, VOCAB = 12, 3, 5, 16, 2, 8, 7
DOCUMENT = Path(__file__).parents[1] / "docs/reference/step_protocol.md"
sdpa = F.scaled_dot_product_attention


def assigned(cache: Tensor, at: Tensor, key: Tensor) -> Tensor:
    cache[:, :, at] = key
    return cache


def assigned_second(cache: Tensor, at: Tensor, key: Tensor) -> Tensor:
    cache[:, at] = key.transpose(1, 2)
    return cache.transpose(1, 2)


def copied(cache: Tensor, at: Tensor, key: Tensor) -> Tensor:
    return cache.index_copy_(2, at, key)


def copied_second(cache: Tensor, at: Tensor, key: Tensor) -> Tensor:
    return cache.index_copy_(1, at, key.transpose(1, 2)).transpose(1, 2)


def seen(at: Tensor, window: int = ROWS) -> Tensor:
    columns = torch.arange(ROWS)[None, :]
    return (columns <= at[:, None]) & (columns > at[:, None] - window)


def added(at: Tensor) -> Tensor:
    return torch.where(seen(at), 0.0, torch.finfo(torch.float32).min)


def per_head(*shared: Tensor) -> list[Tensor]:
    return [t.repeat_interleave(HEADS // t.shape[1], dim=1) for t in shared]


def filled(q: Tensor, k: Tensor, v: Tensor, at: Tensor) -> Tensor:
    k, v = per_head(k, v)
    return (q @ k.transpose(2, 3) / DIM**0.5).masked_fill(~seen(at), float("-inf")).softmax(-1) @ v


def capped(q: Tensor, k: Tensor, v: Tensor, at: Tensor) -> Tensor:
    k, v = per_head(k, v)
    return F.softmax(0.5 * torch.tanh(q @ k.transpose(-1, -2) * 0.3 / 0.5) + added(at), dim=-1) @ v


def einsum(q: Tensor, k: Tensor, v: Tensor, at: Tensor) -> Tensor:
    k, v = per_head(k, v)
    logits = torch.einsum("bhqd,bhkd->bhqk", q, k) * DIM**-0.5
    return torch.einsum("bhqk,bhkd->bhqd", logits.masked_fill(~seen(at), float("-inf")).softmax(-1), v)


def einsum_heads_later(q: Tensor, k: Tensor, v: Tensor, at: Tensor) -> Tensor:
    """Query, keys and values are [B, T, heads, D]; a view of the result follows, as the operator's layout allows."""
    q, k, v = (t.transpose(1, 2) for t in (q, *per_head(k, v)))
    weights = (torch.einsum("bqhd,bkhd->bhqk", q, k) * DIM**-0.5 + added(at)).softmax(-1)
    return torch.einsum("bhqk, bkhd -> bqhd", weights, v).contiguous().view(q.shape).transpose(1, 2)


def einsum_any_order(q: Tensor, k: Tensor, v: Tensor, at: Tensor) -> Tensor:
    """The key first, an ellipsis for rows and heads, and values whose axes stand in an order of their own."""
    k, v = per_head(k, v)
    weights = torch.where(seen(at), torch.einsum("...kd,...qd->...qk", k, q * DIM**-0.5), float("-inf")).softmax(-1)
    return torch.einsum("bhqk,kdbh->bhqd", weights, v.permute(2, 3, 0, 1))


def einsum_groups(q: Tensor, k: Tensor, v: Tensor, at: Tensor) -> Tensor:
    """The query heads of each key head are an axis; the result has rows before heads."""
    q = q.transpose(1, 2).unflatten(2, (k.shape[1], -1))
    logits = torch.einsum("bqhgd,bhkd->bhgqk", q, k) * DIM**-0.5
    weights = logits.masked_fill(~seen(at), float("-inf")).softmax(-1)
    return torch.einsum("bhkd,bhgqk->bqhgd", v, weights).flatten(2, 3).transpose(1, 2)


def softmax_by_hand(q: Tensor, k: Tensor, v: Tensor, at: Tensor) -> Tensor:
    k, v = per_head(k, v)
    logits = q @ k.mT * DIM**-0.5 + added(at)
    powers = (logits - logits.max(-1, keepdim=True).values).exp()
    return powers / powers.sum(-1, keepdim=True) @ v


def softmax_of_powers(q: Tensor, k: Tensor, v: Tensor, at: Tensor) -> Tensor:
    k, v = per_head(k, v)
    logits = (q @ k.mT * DIM**-0.5).masked_fill(~seen(at), float("-inf"))
    powers = torch.exp(logits - torch.amax(logits, 3, True))
    return (powers / powers.sum(dim=-1, keepdim=True)) @ v


ATTENTIONS: list[Callable[..., Tensor]] = [
    lambda q, k, v, at: sdpa(q, k, v, attn_mask=seen(at), enable_gqa=True),
    lambda q, k, v, at: sdpa(q, k, v, attn_mask=seen(at, window=4), enable_gqa=True),
    lambda q, k, v, at: sdpa(q, *per_head(k, v), attn_mask=added(at)), filled, capped, einsum, einsum_heads_later,
    einsum_any_order, einsum_groups, softmax_by_hand, softmax_of_powers,
]  # fmt: skip


class Block(nn.Module):
    """A layer whose spelling is given: how caches are written, attention, and where the MLP is added."""

    keys: Tensor
    values: Tensor

    def __init__(self, rows: int, kv_heads: int, write: Callable[..., Tensor], attend: Callable[..., Tensor]) -> None:
        super().__init__()
        self.kv, self.write, self.attend = kv_heads * DIM, write, attend
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, WIDTH + 2 * self.kv), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 24), nn.GELU(), nn.Linear(24, WIDTH))
        shape = (rows, ROWS, kv_heads, DIM) if "second" in write.__name__ else (rows, kv_heads, ROWS, DIM)
        for name in ("keys", "values"):
            self.register_buffer(name, torch.zeros(shape))

    def attention(self, x: Tensor, at: Tensor) -> Tensor:
        parts = self.qkv(x).split([WIDTH, self.kv, self.kv], -1)
        q, k, v = (t.unflatten(-1, (-1, DIM)).transpose(1, 2) for t in parts)
        y = self.attend(q, self.write(self.keys, at, k), self.write(self.values, at, v), at)
        return self.out(y.transpose(1, 2).flatten(2))

    def forward(self, h: Tensor, at: Tensor) -> Tensor:
        h = h + self.attention(self.norm_1(h), at)
        return h + self.mlp(self.norm_2(h))


class Parallel(Block):
    def forward(self, h: Tensor, at: Tensor) -> Tensor:
        x = self.norm_1(h)
        return h + self.attention(x, at) + self.mlp(x)


class TwoNorms(Block):
    def forward(self, h: Tensor, at: Tensor) -> Tensor:
        return self.mlp(self.norm_2(h)) + (self.attention(self.norm_1(h), at) + h)


Spelling = tuple[type[Block], Callable[..., Tensor], Callable[..., Tensor]]
"""A block, how it writes its caches, and its attention."""
WRITES = (assigned, assigned_second, copied, copied_second)
SPELLINGS: list[Spelling] = [(Block, write, attend) for write, attend in zip(cycle(WRITES), ATTENTIONS, strict=False)]
SPELLINGS += [(block, assigned, ATTENTIONS[0]) for block in (Parallel, TwoNorms)]


class Decoder(nn.Module):
    """A layer of each spelling, with learnt positions."""

    max_seq_len = ROWS

    def __init__(self, rows: int, kv_heads: int, spellings: Sequence[Spelling]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.places = nn.Embedding(VOCAB, WIDTH), nn.Embedding(ROWS, WIDTH)
        self.blocks = nn.ModuleList([block(rows, kv_heads, *spelling) for block, *spelling in spellings])
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, input_ids: Tensor, cache_position: Tensor) -> Tensor:
        h = self.embed(input_ids) + self.places(cache_position)
        for block in self.blocks:
            h = block(h, cache_position)
        return self.head(h)


def ids_of(rows: int) -> Tensor:
    return torch.randint(0, VOCAB, (rows, ROWS), generator=torch.Generator().manual_seed(1))


def logits_of(model: nn.Module, rows: int) -> Tensor:
    """Logits [B, T, V] of the module itself, token by token."""
    own, ids = copy.deepcopy(model), ids_of(rows)
    with torch.no_grad():
        return torch.cat([own(ids[:, t : t + 1], torch.tensor([t])) for t in range(ROWS)], 1)


def check(model: Decoder, rows: int) -> None:
    """The analysed graphs give the module's logits, in decode steps and in chunks of a prompt."""
    expected, ids = logits_of(model, rows).numpy(), ids_of(rows).numpy()
    program = capture(model, batch_size=rows, max_seq_len=ROWS, tokens_per_frame=FRAME, prefill_chunk=CHUNK)
    run_pipeline(program, analysis_pipeline())
    assert len(program.sites) == len(model.blocks)
    stepper = EagerStepper(program)
    chunks = [stepper.prefill(ids[:, at : at + CHUNK], at) for at in range(0, ROWS - CHUNK, CHUNK)]
    np.testing.assert_allclose(np.concatenate(chunks, 1), expected[:, : 2 * CHUNK], atol=2e-6, rtol=0)
    for t in range(2 * CHUNK, ROWS):
        found = stepper.decode(ids[:, t : t + 1], t, t, np.zeros(len(model.blocks), np.float32)).logits
        np.testing.assert_allclose(found, expected[:, t : t + 1], atol=2e-6, rtol=0)


@pytest.mark.parametrize(("kv_heads", "rows"), first_often([(1, 2), (HEADS, 1)]))
def test_layers_of_every_spelling_are_found_and_computed(kv_heads: int, rows: int) -> None:
    """The first one of `WRITES` is the document's own."""
    assert "`self.key_cache[:, :, cache_position] = key`" in DOCUMENT.read_text()
    check(Decoder(rows, kv_heads, SPELLINGS), rows)


@pytest.mark.parametrize("write", first_often([copied, copied_second]))
def test_attention_that_is_not_recognised_is_named(write: Callable[..., Tensor]) -> None:
    """Logits with the rows before the heads are no product per head: the error says where, once for both layers."""

    def grouped(q: Tensor, k: Tensor, v: Tensor, at: Tensor) -> Tensor:
        q = q.unflatten(1, (k.shape[1], -1))
        logits = torch.einsum("bhgqd,bhkd->bqhgk", q, k).masked_fill(~seen(at)[:, None, None], float("-inf"))
        return torch.einsum("bqhgk,bhkd->bhgqd", logits.softmax(-1), v).flatten(1, 2)

    with pytest.raises(CompileError) as error:
        check(Decoder(1, 1, [(Block, write, grouped)] * 2), 1)
    assert not error.value.problems
    assert error.value.what.startswith("what reads the cache 'blocks.0.keys' is not recognised as attention: nodes ")
    assert error.value.what.endswith("permute_default, masked_fill, softmax (2 caches are read in this way)")
    assert error.value.where.startswith("blocks.0, test_step_protocol.py:")
    assert "scaled_dot_product_attention" in error.value.hint


def test_one_layer_of_another_attention_is_not_left_out() -> None:
    """Its cache would be lost between steps."""

    def sigmoid(q: Tensor, k: Tensor, v: Tensor, at: Tensor) -> Tensor:
        return (q @ k.mT).masked_fill(~seen(at), float("-inf")).sigmoid() @ v

    model = Decoder(1, HEADS, [SPELLINGS[0], (Block, assigned, sigmoid)])
    with pytest.raises(CompileError) as error:
        check(model, 1)
    assert error.value.what.startswith("what reads the cache 'blocks.1.keys' is not recognised as attention")
    assert error.value.where.startswith("blocks.1, test_step_protocol.py:")
