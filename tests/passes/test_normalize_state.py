"""normalize-state: hidden caches become inputs and outputs, masked attention becomes fastcar.attention."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.nn import functional as F

from fastcar_compile.errors import CompileError
from fastcar_compile.ir.pass_manager import run_pipeline
from fastcar_compile.ir.program import DecoderProgram
from fastcar_compile.ir.query import is_op
from fastcar_compile.passes.canonicalize import Canonicalize
from fastcar_compile.passes.normalize_state import NormalizeState
from fastcar_compile.passes.pipeline import analysis_pipeline

from .laws import nodes_of
from .tiny import BATCH, FRAME, ROWS, WIDTH, TinyBlock, backend_of, captured, logits, prefill_logits, token_ids


class NotCausal(TinyBlock):
    def mask(self, position: Tensor) -> Tensor:
        return torch.arange(ROWS)[None, :] < position[:, None] + 2


class Biased(TinyBlock):
    def mask(self, position: Tensor) -> Tensor:
        seen = torch.arange(ROWS)[None, :] <= position[:, None]
        return torch.where(seen, -0.5, float("-inf"))


class Additive(TinyBlock):
    """Causal, written as an additive mask: this one is fine."""

    def mask(self, position: Tensor) -> Tensor:
        seen = torch.arange(ROWS)[None, :] <= position[:, None]
        return torch.where(seen, 0.0, torch.finfo(torch.float32).min)


class Shared(TinyBlock):
    """A key/value head that is repeated, tables for mask and positions, and a view of the result, as in LlamaGen."""

    def __init__(self, batch: int) -> None:
        super().__init__(batch)
        self.register_buffer("table", torch.tril(torch.ones(ROWS, ROWS, dtype=torch.bool))[None].repeat(batch, 1, 1))
        self.register_buffer("places", torch.randn(ROWS, 8))

    def attend(self, x: Tensor, position: Tensor) -> Tensor:
        q, k, v = self.qkv(x).split([8, 4, 4], -1)
        q = (q + self.get_buffer("places")[position]).unflatten(-1, (2, 4)).transpose(1, 2)
        keys, values = self.keys, self.values
        keys[:, :, position], values[:, :, position] = k[:, None], v[:, None]
        both = [t.repeat_interleave(2, dim=1).repeat_interleave(1, dim=1) for t in (keys, values)]
        mask = self.get_buffer("table")[: x.shape[0], None, position]
        y = F.scaled_dot_product_attention(q, *both, attn_mask=mask)
        return y.transpose(1, 2).contiguous().view(*x.shape)


class Written(TinyBlock):
    """Attention written out: a shared key/value head, logits scaled and soft-capped, the mask added."""

    def attend(self, x: Tensor, position: Tensor) -> Tensor:
        q, k, v = self.qkv(x).split([8, 4, 4], -1)
        q = q.unflatten(-1, (2, 4)).transpose(1, 2)
        keys = self.keys.index_copy_(2, position, k[:, None]).expand(-1, 2, -1, -1)
        values = self.values.index_copy_(2, position, v[:, None]).expand(-1, 2, -1, -1)
        weights = F.softmax(self.masked(self.logits(q, keys), position), -1, dtype=torch.float32).to(x.dtype)
        return (F.dropout(weights, 0.1, self.training) @ values).transpose(1, 2).flatten(2)

    def logits(self, q: Tensor, keys: Tensor) -> Tensor:
        return 0.2 * torch.tanh(q @ keys.transpose(2, 3) * 4**-0.5 / 0.2)

    def masked(self, logits: Tensor, position: Tensor) -> Tensor:
        seen = torch.arange(ROWS)[None, :] <= position[:, None]
        return logits + torch.where(seen, 0.0, torch.finfo(torch.float32).min)[None, None]


class Batched(Written):
    """Rows and heads are one axis, as GPT-NeoX and Bloom have them."""

    def attend(self, x: Tensor, position: Tensor) -> Tensor:
        q, k, v = self.qkv(x).split([8, 4, 4], -1)
        q = q.unflatten(-1, (2, 4)).transpose(1, 2).flatten(0, 1)
        keys = self.keys.index_copy_(2, position, k[:, None]).expand(-1, 2, -1, -1).reshape(-1, ROWS, 4)
        values = self.values.index_copy_(2, position, v[:, None]).expand(-1, 2, -1, -1).reshape(-1, ROWS, 4)
        weights = F.softmax(self.product(q, keys, position), -1).nan_to_num().flatten(0, 1)
        return torch.bmm(weights, values).unflatten(0, (-1, 2)).transpose(1, 2).flatten(2)

    def product(self, q: Tensor, keys: Tensor, position: Tensor) -> Tensor:
        zeros = torch.zeros(len(q), q.shape[1], ROWS)
        logits = torch.baddbmm(zeros, q, keys.transpose(1, 2), alpha=0.25).unflatten(0, (-1, 2))
        return self.masked(logits, position)


class Halved(Written):
    """Query and key have a factor each; the mask is subtracted, and the logits are limited."""

    def logits(self, q: Tensor, keys: Tensor) -> Tensor:
        return (q * 0.5) @ (keys.transpose(1, 2).permute(0, 2, 3, 1) * 0.5)

    def masked(self, logits: Tensor, position: Tensor) -> Tensor:
        seen = (torch.arange(ROWS)[None, :] <= position[:, None]).float()
        return torch.clamp(logits - 1e10 * (1 - seen), min=torch.finfo(torch.float32).min)


class Late(Written):
    """The masked logits are divided by a buffer."""

    def __init__(self, batch: int) -> None:
        super().__init__(batch)
        self.register_buffer("root", torch.tensor(4.0).sqrt())

    def logits(self, q: Tensor, keys: Tensor) -> Tensor:
        return q @ keys.mT

    def masked(self, logits: Tensor, position: Tensor) -> Tensor:
        return super().masked(logits, position) / self.get_buffer("root")


class Crossed(Written):
    """Two heads of keys, and the heads of a query alternate between them."""

    def attend(self, x: Tensor, position: Tensor) -> Tensor:
        keys = self.keys.index_copy_(2, position, x[:, None, :, :4]).expand(-1, 2, -1, -1)[:, None]
        values = self.values.index_copy_(2, position, x[:, None, :, 4:]).expand(-1, 2, -1, -1)[:, None]
        q = self.qkv(x).unflatten(-1, (4, 4)).transpose(1, 2).unflatten(1, (2, 2))
        weights = F.softmax(self.masked(q @ keys.mT, position), -1)
        return (weights @ values).flatten(1, 2)[:, :2].transpose(1, 2).flatten(2)


class Sloped(Written):
    """ALiBi."""

    def logits(self, q: Tensor, keys: Tensor) -> Tensor:
        return q @ keys.mT + torch.arange(ROWS) * 0.1


class Faint(Written):
    """The mask only lowers the logits of what comes later."""

    def masked(self, logits: Tensor, position: Tensor) -> Tensor:
        return logits.masked_fill(torch.arange(ROWS)[None, :] > position[:, None], -1e4)


class Unmasked(TinyBlock):
    def mask(self, position: Tensor) -> Tensor:
        return None  # pyright: ignore[reportReturnType]


class Shifted(TinyBlock):
    def attend(self, x: Tensor, position: Tensor) -> Tensor:
        self.keys.index_copy_(2, (position + 1) % ROWS, x[:, None, :, :4])
        return super().attend(x, position)


class Uncached(TinyBlock):
    def attend(self, x: Tensor, position: Tensor) -> Tensor:
        q = x[:, None]
        return F.scaled_dot_product_attention(q, q, q)[:, 0]


class Accumulating(TinyBlock):
    """The step reads what the step before wrote."""

    total: Tensor

    def __init__(self, batch: int) -> None:
        super().__init__(batch)
        self.register_buffer("total", torch.zeros(batch, 1, 8))

    def forward(self, h: Tensor, position: Tensor) -> Tensor:
        self.total.add_(h)
        return super().forward(h + self.total, position)


class Crossing(TinyBlock):
    """After its own tokens it attends to a context that is there from the start."""

    def __init__(self, batch: int) -> None:
        super().__init__(batch)
        self.register_buffer("context", torch.randn(batch, 3, WIDTH))

    def attend(self, x: Tensor, position: Tensor) -> Tensor:
        x = x + super().attend(x, position)
        context = self.out(self.get_buffer("context"))[:, None]
        return F.scaled_dot_product_attention(x[:, None], context, context)[:, 0]


class Counting(TinyBlock):
    seen: Tensor

    def __init__(self, batch: int) -> None:
        super().__init__(batch)
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, h: Tensor, position: Tensor) -> Tensor:
        self.seen[0].fill_(1.0)
        return super().forward(h, position)


def check_chunks(program: DecoderProgram, expected: np.ndarray) -> None:
    """Chunks of ten tokens, the last of which is padded, give the logits [T, B, V] of the steps."""
    stepper, ids = backend_of(program), token_ids()
    for start in (0, 10):
        part = ids[:, start : start + 10]
        found = stepper.prefill(np.pad(part, [(0, 0), (0, 10 - part.shape[1])]), start)[:, : part.shape[1]]
        np.testing.assert_allclose(found.swapaxes(0, 1), expected[start : start + 10], atol=1e-6, rtol=0)


def test_a_chunk_of_more_than_half_of_the_tables() -> None:
    """Repeated heads and tables; the second chunk is padded past the tables' last row."""
    program = captured(Shared, chunk=10)
    run_pipeline(program, [NormalizeState(), Canonicalize()])
    assert [s.shape for s in program.state] == [(BATCH, 1, ROWS, 4)] * 2
    for module in program.graphs():
        with FakeTensorMode(allow_non_fake_inputs=True):
            values = [n.meta["val"] for n in module.graph.find_nodes(op="placeholder")]
            module(*(torch.zeros(tuple(v.shape), dtype=v.dtype) for v in values))
    check_chunks(program, logits(program))


def itself(position: Tensor) -> Tensor:
    return position


def offset(position: Tensor) -> Tensor:
    """As OPT has it: the first rows are no positions."""
    return position + 2


def row_of_a_picture(position: Tensor) -> Tensor:
    return position // FRAME


def place_in_a_picture(position: Tensor) -> Tensor:
    return position % FRAME


def distance(position: Tensor) -> Tensor:
    return (ROWS + 10 - position).clamp(max=4)


def tabled(rows: int, at: Callable[[Tensor], Tensor]) -> type[TinyBlock]:
    """Two tables of so many rows are added, read at a function of the position."""

    class Tabled(TinyBlock):
        def __init__(self, batch: int) -> None:
            super().__init__(batch)
            self.places, self.columns = nn.Embedding(rows, WIDTH), nn.Parameter(torch.randn(rows, WIDTH))

        def attend(self, x: Tensor, position: Tensor) -> Tensor:
            x = x + self.places(at(position)) + self.columns[at(position)]
            return super().attend(x + self.columns.index_select(0, at(position)), position)

    return Tabled


@pytest.mark.parametrize(
    ("rows", "at", "first", "needed"),
    [(ROWS, offset, ROWS - 2, ROWS + 2), (FRAME - 1, place_in_a_picture, 2, FRAME)],
)
def test_a_table_with_too_few_rows_is_refused(
    rows: int, at: Callable[[Tensor], Tensor], first: int, needed: int
) -> None:
    """The model itself raises IndexError there."""
    block = tabled(rows, at)
    with pytest.raises(IndexError):
        logits(captured(block))
    with pytest.raises(CompileError) as error:
        NormalizeState().apply(captured(block, block))
    assert not error.value.problems
    text = f"tables 'blocks.0.places.weight' and 3 more have {rows} rows, but max_seq_len is {ROWS}: position {first}"
    assert error.value.what.startswith(text)
    assert error.value.where.startswith("blocks.0.places, ")
    assert f"max_seq_len={first}" in error.value.hint
    assert f"{needed} rows" in error.value.hint


@pytest.mark.parametrize(
    ("rows", "at"),
    [
        (ROWS, itself),
        ((ROWS - 1) // FRAME + 1, row_of_a_picture),
        (FRAME, place_in_a_picture),
        (5, distance),
        (ROWS + 2, offset),  # more rows than positions, which the padding of the last chunk passes
    ],
)
def test_tables_of_enough_rows(rows: int, at: Callable[[Tensor], Tensor]) -> None:
    """What is not read by the position itself needs fewer rows. The second chunk is padded past the last position."""
    program = captured(tabled(rows, at), chunk=10)
    expected = logits(program)
    NormalizeState().apply(program)
    for module in program.graphs():
        module.recompile()
    np.testing.assert_allclose(logits(program), expected, atol=1e-6, rtol=0)
    check_chunks(program, expected)


def test_fakes_have_the_layout_of_what_is_computed() -> None:
    """What a model writes behind its attention may be a view."""
    query, cache, at = torch.randn(2, 3, 4, 8).transpose(1, 2), torch.randn(2, 2, 9, 8), torch.tensor([2])
    fastcar = torch.ops.fastcar
    for operator, options in ((fastcar.attention, ()), (fastcar.window_attention, (0, 5))):
        arguments = (query, cache, cache, at, 0.5, *options)
        with FakeTensorMode(allow_non_fake_inputs=True):
            fake = operator(*arguments)
        assert operator(*arguments).stride() == fake.stride()


@pytest.mark.parametrize(
    ("block", "scale", "softcap", "window"),
    [
        *((Additive, 0.5, None, None), (Written, 0.5, 0.2, None), (Batched, 0.25, None, None)),
        *((Halved, 0.5, None, None), (Late, 0.5, None, None)),
    ],
)
def test_other_spellings_of_attention(
    block: type[TinyBlock], scale: float, softcap: float | None, window: int | None
) -> None:
    program = captured(block)
    before, before_prefill = logits(program), prefill_logits(program)
    run_pipeline(program, analysis_pipeline())
    (site,) = program.sites
    assert (site.attention.scale, site.attention.window) == (pytest.approx(scale), window)
    assert site.attention.softcap == (None if softcap is None else pytest.approx(softcap))
    assert program.state[0].shape == (BATCH, 1, ROWS, 4)
    assert not any(is_op(n, torch.ops.aten.softmax) for n in nodes_of(program))
    np.testing.assert_allclose(logits(program), before, atol=1e-6, rtol=0)
    np.testing.assert_allclose(prefill_logits(program), before_prefill, atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    ("block", "text"),
    [
        (NotCausal, "layer 0: the attention mask at position 0 is not causal over the cache"),
        (Biased, "layer 0: the attention mask adds a bias, which is not supported"),
        (Unmasked, "layer 0: attention has no mask, so it sees cache rows that were not written yet"),
        (Shifted, "buffer 'blocks.0.keys' is not written at cache_position"),
        (Sloped, "layer 0: the attention logits get a bias, such as ALiBi, which is not supported"),
        (Faint, "layer 0: hidden attention logits become -10000, which does not hide them"),
        (Crossed, "what reads the cache 'blocks.0.keys' is not recognised as attention"),
        (Crossing, "cross-attention: its keys are a fixed context, which does not follow from the tokens"),
        (Uncached, "layer 0: the key or value of this attention is not a static cache written in this step"),
        (Accumulating, "buffer 'blocks.0.total' carries a value from step to step"),
        (Counting, "writes in place into a part of the buffer 'blocks.0.seen', which is no cache"),
    ],
)
def test_what_cannot_be_normalised(block: type[TinyBlock], text: str) -> None:
    with pytest.raises(CompileError) as error:
        NormalizeState().apply(captured(block, chunk=1))
    assert str(error.value).startswith(text)
    assert "where: blocks.0, passes/" in str(error.value)
    assert "hint:  " in str(error.value)


def test_every_problem_is_reported_at_once() -> None:
    with pytest.raises(CompileError) as error:
        NormalizeState().apply(captured(NotCausal, TinyBlock, Uncached))
    text = str(error.value)
    assert text.startswith("2 problems were found:\n[1] layer 0: the attention mask at position 0 is not causal")
    assert "[2] layer 2: the key or value of this attention is not a static cache" in text
    assert [f"where: blocks.{i}, passes/" in text for i in range(3)] == [True, False, True]
