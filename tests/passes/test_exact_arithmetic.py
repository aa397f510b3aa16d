"""exact-arithmetic: what it rewrites, the same bits in both graphs, and everything it refuses at once."""

import pytest
import torch
from decoders import llama
from torch import Tensor

import fastcar_compile as fc
from fastcar_compile.errors import CompileError
from fastcar_compile.passes import exact_arithmetic
from fastcar_compile.passes.caches import QuantizeKvCache
from fastcar_compile.passes.exact_arithmetic import ExactArithmetic
from fastcar_compile.passes.pipeline import analysis_pipeline
from fastcar_compile.passes.quantize import QuantizeW8A8

from .tiny import Rotated, TinyBlock, after

NARROW = (*analysis_pipeline(), QuantizeW8A8(), QuantizeKvCache("int8"))


class Capped(Rotated):
    """A residual multiplier, and keys that turn with the sum of two positions."""

    def forward(self, h: Tensor, position: Tensor) -> Tensor:
        h = h + 0.5 * self.out(torch.tanh(self.attend(self.norm_1(h), position)))
        return h + self.mlp(self.norm_2(h))

    def rotated(self, x: Tensor, angles: Tensor) -> Tensor:
        return super().rotated(x, angles + x.mean() * 0)


def test_everything_is_refused_at_once() -> None:
    with pytest.raises(CompileError) as found:
        after(*NARROW, ExactArithmetic(), blocks=[TinyBlock, Capped])
    for text in (
        "aten.tanh.default (2 times): it has no definition bit for bit",
        "its angles depend on more than the position",
        "aten.add.Tensor (10 times): a backend may fuse its product with the sum",
    ):
        assert text in str(found.value)


def test_float_caches_and_weights_are_refused() -> None:
    with pytest.raises(CompileError) as found:
        after(*analysis_pipeline(), ExactArithmetic(), blocks=[Rotated])
    assert "its cache is not int8" in str(found.value)
    assert "its weight is not quantised" in str(found.value)


def test_layers_that_share_their_angles_have_one_table(monkeypatch: pytest.MonkeyPatch) -> None:
    made, real = list[object](), exact_arithmetic.position_table
    monkeypatch.setattr(exact_arithmetic, "position_table", lambda *given: made.append(given) or real(*given))
    model = llama(num_hidden_layers=3)
    options = {"quant": "w8a8", "kv": "int8", "numerics": "exact", "tokens_per_frame": 4, "replay": None}
    assert not fc.compile(model, target="cpu", dry_run=True, **options).problems
    assert len(made) == 2, "one of the prefill graph, and one of the decode step"
