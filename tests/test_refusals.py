"""Plain modules that cannot be compiled: the sentence says what in the model is the reason, and where."""

from typing import Any

import pytest
import torch
from decoders import PlainBlock, PlainDecoder
from torch import Tensor, nn
from torch.nn import functional as F

import fastcar_compile as fc
from fastcar_compile.errors import CompileError


class Dropping(PlainDecoder):
    def forward(self, input_ids: Tensor, cache_position: Tensor) -> Tensor:
        return F.dropout(super().forward(input_ids, cache_position), 0.1)


class Sampling(PlainDecoder):
    def forward(self, input_ids: Tensor, cache_position: Tensor) -> Tensor:
        logits = super().forward(input_ids, cache_position)
        return logits - torch.log(-torch.log(torch.rand_like(logits)))


class Branching(PlainDecoder):
    def forward(self, input_ids: Tensor, cache_position: Tensor) -> Tensor:
        logits = super().forward(input_ids, cache_position)
        return logits * 2 if logits.max() > 3 else logits


class Remembering(PlainDecoder):
    """A recurrent cell in front of the head."""

    memory: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(11, 11)
        self.register_buffer("memory", torch.zeros(1, 11))

    def forward(self, input_ids: Tensor, cache_position: Tensor) -> Tensor:
        logits = super().forward(input_ids, cache_position)
        self.memory[:] = self.cell(logits[:, -1], self.memory)
        return logits + self.memory


class Experts(nn.Module):
    """Alike MLPs beside a router, in a list."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, 2, bias=False)
        self.experts = nn.ModuleList([nn.Sequential(nn.Linear(width, 8), nn.GELU(), nn.Linear(8, width)) for _ in "ab"])

    def forward(self, x: Tensor) -> Tensor:
        weights = self.router(x).softmax(-1)
        return sum((weights[..., i : i + 1] * e(x) for i, e in enumerate(self.experts)), torch.zeros_like(x))


class RoutingBlock(PlainBlock):
    def __init__(self, width: int, rows: int, batch: int) -> None:
        super().__init__(width, rows, batch)
        self.moe = Experts(width)

    def mlp(self, x: Tensor) -> Tensor:
        return self.moe(x)


class Routing(PlainDecoder):
    """Experts in every layer, and a write that cannot be rewritten outside of them."""

    block = RoutingBlock

    def forward(self, input_ids: Tensor, cache_position: Tensor) -> Tensor:
        logits = super().forward(input_ids, cache_position)
        logits.split([1, 10], -1)[0].add_(1)
        return logits


def compiled(model: nn.Module) -> Any:
    return fc.compile(model, "cpu", tokens_per_frame=8, max_seq_len=33, dry_run=True)


@pytest.mark.parametrize(
    ("model", "text", "where"),
    [
        (Dropping, "dropout is active in a model that is not training", "test_refusals.py:"),
        (Sampling, "the decode step draws random numbers (aten.rand_like.default)", "test_refusals.py:"),
        (Branching, "Python control flow, a shape or an index depends on the value of a tensor", "test_refusals.py:"),
        (Remembering, "the model has a recurrent cell", "cell, "),
    ],
)
def test_the_reason_is_named(model: type[nn.Module], text: str, where: str, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(CompileError) as refusal:
        compiled(model())
    assert text in str(refusal.value)
    assert where in refusal.value.where
    assert len(str(refusal.value).splitlines()) <= 3  # what, where, hint; no page of torch.export
    assert model is not Branching or "data-dependent" in str(refusal.value.__cause__)
    assert capfd.readouterr().err == ""


def test_other_problems_are_told_at_the_same_time() -> None:
    """What has nothing to do with the experts is not lost behind them."""
    with pytest.raises(CompileError) as refusal:
        compiled(Routing())
    first, second = refusal.value.problems
    assert first.what.startswith("the model has a mixture of experts: a router chooses the MLP of each token")
    assert first.where.startswith("blocks.0.moe, test_refusals.py:")
    assert second.what == "writes in place into one of several views of a value (split, chunk, unbind)"
