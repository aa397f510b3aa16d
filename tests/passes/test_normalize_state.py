"""normalize-state: hidden caches become inputs and outputs, masked attention becomes fastcar.attention."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fastcar_compile.errors import CompileError
from fastcar_compile.ir.program import StateRole
from fastcar_compile.passes.normalize_state import NormalizeState

from .laws import check_origins, check_truthful, nodes_of
from .tiny import BATCH, ROWS, TinyBlock, captured, logits, prefill_logits


def test_second_application_changes_nothing() -> None:
    check_truthful(captured(), NormalizeState())


def test_inserted_nodes_keep_their_source() -> None:
    program = captured()
    NormalizeState().apply(program)
    assert check_origins(program, "normalize-state") == 2 * 3  # two cache writes and one attention per graph


def test_nothing_mutates_afterwards() -> None:
    program = captured()
    assert any(is_mutable(n) for n in nodes_of(program))
    NormalizeState().apply(program)
    assert not any(is_mutable(n) for n in nodes_of(program))


def is_mutable(node: torch.fx.Node) -> bool:
    return bool(getattr(getattr(node.target, "_schema", None), "is_mutable", False))


def test_state_is_named_by_role_and_layer() -> None:
    program = captured()
    NormalizeState().apply(program)
    assert [(s.name, s.role, s.shape) for s in program.state] == [
        ("key_cache_0", StateRole.KEY_CACHE, (BATCH, 1, ROWS, 4)),
        ("value_cache_0", StateRole.VALUE_CACHE, (BATCH, 1, ROWS, 4)),
    ]
    assert program.outputs == program.prefill_outputs == ["logits", "key_cache_0", "value_cache_0"]


def test_logits_stay_the_same() -> None:
    program = captured()
    before, before_prefill = logits(program), prefill_logits(program)
    NormalizeState().apply(program)
    for module in program.graphs():
        module.recompile()
    np.testing.assert_allclose(logits(program), before, atol=1e-6, rtol=0)
    np.testing.assert_allclose(prefill_logits(program), before_prefill, atol=1e-6, rtol=0)


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


class Counting(TinyBlock):
    seen: Tensor

    def __init__(self, batch: int) -> None:
        super().__init__(batch)
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, h: Tensor, position: Tensor) -> Tensor:
        self.seen[0].fill_(1.0)
        return super().forward(h, position)


def test_an_additive_causal_mask_is_proved() -> None:
    program = captured(Additive)
    before = logits(program)
    assert NormalizeState().apply(program) is True
    program.graph_module.recompile()
    np.testing.assert_allclose(logits(program), before, atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    ("block", "text"),
    [
        (NotCausal, "layer 0: the attention mask at position 0 is not causal over the cache"),
        (Biased, "layer 0: the attention mask adds a bias, which is not supported"),
        (Unmasked, "layer 0: attention has no mask, so it sees cache rows that were not written yet"),
        (Shifted, "buffer 'blocks.0.keys' is not written at cache_position"),
        (Uncached, "layer 0: the key or value of this attention is not a static cache written in this step"),
        (Counting, "writes in place into something that is not a buffer of the module"),
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
        NormalizeState().apply(captured(NotCausal, TinyBlock, Biased, Uncached))
    text = str(error.value)
    assert text.startswith("3 problems were found:\n[1] layer 0: the attention mask at position 0 is not causal")
    assert "[2] layer 2: the attention mask adds a bias" in text
    assert "[3] layer 3: the key or value of this attention is not a static cache" in text
    assert [f"where: blocks.{i}, passes/" in text for i in range(4)] == [True, False, True, True]
