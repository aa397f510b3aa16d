"""In-place writes into activations: the graph is functional afterwards, and computes what the module computes."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from fastcar_compile.errors import CompileError
from fastcar_compile.ir.pass_manager import run_pipeline
from fastcar_compile.passes.normalize_state import NormalizeState

from .laws import nodes_of
from .tiny import CHUNK, ROWS, WIDTH, TinyBlock, TinyDecoder, after, captured, logits, prefill_logits, token_ids

Write = Callable[[Tensor], Tensor]


def sum_in_place(x: Tensor) -> Tensor:
    y = x * 2
    y += x
    return y.mul_(0.5)


def columns_by_number(x: Tensor) -> Tensor:
    y = x + 1
    y[:, :, [1, 5]] = -3.0  # Chameleon forbids image tokens so
    return y


def part_and_alias(x: Tensor) -> Tensor:
    y = x + 1
    early, flat = y[..., :2], y.view(-1, WIDTH)
    y[..., 1:3] = x[..., :2]
    y[:, -1, 4].fill_(7.0)
    flat[:, 7] += 1
    return y + early.sum() + flat[0, 0]


def through_views(x: Tensor) -> Tensor:
    y = x.clone().transpose(1, 2)
    y.unsqueeze(0)[0, :, 0:4].masked_fill_(torch.tensor([True, False] * 2)[:, None], 0.5)
    return y.transpose(1, 2)


def integers(x: Tensor) -> Tensor:
    counts = torch.zeros(WIDTH, dtype=torch.int64)
    counts += 2
    counts.copy_(counts.float() * 1.5)
    return x + counts


def block_with(write: Write) -> type[TinyBlock]:
    class Block(TinyBlock):
        def forward(self, h: Tensor, position: Tensor) -> Tensor:
            h = h + self.out(write(self.attend(self.norm_1(h), position)))
            return h + self.mlp(self.norm_2(h))

    return Block


@pytest.mark.parametrize("write", [sum_in_place, columns_by_number, part_and_alias, through_views, integers])
def test_the_graph_computes_what_the_module_does(write: Write) -> None:
    block = block_with(write)
    program = after(NormalizeState(), blocks=(block,))
    schemas = [getattr(n.target, "_schema", None) for n in nodes_of(program)]
    assert not [s for s in schemas if s is not None and s.is_mutable]
    model, ids = TinyDecoder(block), torch.from_numpy(token_ids())
    with torch.no_grad():
        steps = [model(ids[:, t : t + 1], torch.tensor([t])).numpy()[:, 0] for t in range(ROWS)]
        chunks = [model(ids[:, s : s + CHUNK], torch.arange(s, s + CHUNK)).numpy() for s in range(0, ROWS, CHUNK)]
    np.testing.assert_allclose(logits(program), np.stack(steps), atol=1e-6)
    np.testing.assert_allclose(prefill_logits(program), np.concatenate(chunks, 1), atol=1e-6)


def one_of_two_halves(x: Tensor) -> Tensor:
    y = x + 1
    first, _ = y.chunk(2, -1)
    first += 1
    return y


def every_other_column(x: Tensor) -> Tensor:
    y = x + 1
    y[..., ::2] += 1
    return y


@pytest.mark.parametrize(
    ("write", "text"),
    [
        (one_of_two_halves, "writes in place into one of several views of a value"),
        (every_other_column, "writes in place through ['aten.slice.Tensor']"),
    ],
)
def test_what_cannot_be_rewritten(write: Write, text: str) -> None:
    with pytest.raises(CompileError) as error:
        run_pipeline(captured(block_with(write)), [NormalizeState()])
    assert text in str(error.value)
    assert "test_in_place.py:" in str(error.value)
