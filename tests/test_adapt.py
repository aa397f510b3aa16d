"""`adapt`: decode steps from modules with the argument names of published code."""

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import first_often
from families.case import BATCH, HEADS, LENGTH, WIDTH, randomize
from families.llamagen import Backbone, LlamaGen
from families.mineworld import MineWorld
from torch import Tensor, nn

import fastcar_compile as fc
from fastcar_compile.errors import CompileError


class Original(nn.Module):
    """A decoder of the cases behind a forward of its own."""

    max_seq_len = LENGTH

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner


class Class2Image(Original):
    """As LlamaGen's `Transformer.forward`: logits and loss."""

    def forward(
        self, idx: Tensor, cond_idx: Tensor | None, input_pos: Tensor | None = None, targets: Tensor | None = None,
        mask: Tensor | None = None, valid: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        assert cond_idx is None
        return self.inner(idx, input_pos), None


class World(Original):
    """As MineWorld's: positions of every row, and an object with logits."""

    def forward(self, input_ids: Tensor, position_ids: Tensor, action_mask: Tensor | None = None) -> Any:
        return {"logits": self.inner(input_ids, position_ids[0])}


def logits_of(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model(torch.tensor([[1, 2], [3, 4]]), torch.arange(2))


OPTIONS: dict[type[Original], dict[str, Any]] = {
    Class2Image: {"tokens": "idx", "position": "input_pos", "output": 0, "cond_idx": None},
    World: {"tokens": "input_ids", "position": "position_ids", "rows": True, "output": "logits"},
}


@pytest.mark.parametrize(("make", "outer"), first_often([(MineWorld, World), (lambda: LlamaGen(HEADS), Class2Image)]))
def test_a_published_signature_takes_one_call(make: Callable[[], nn.Module], outer: type[Original]) -> None:
    """Its step computes what a step written by hand does, and the compiler finds the same layers in it."""
    inner = randomize(make())
    adapted = fc.adapt(outer(inner), **OPTIONS[outer])
    assert torch.equal(logits_of(adapted), logits_of(inner))
    options: dict[str, Any] = {"tokens_per_frame": 4, "batch_size": BATCH, "prefill_chunk": 3, "dry_run": True}
    found, written = (fc.compile(model, "cpu", **options) for model in (adapted, inner))
    assert found.ok
    assert [site.module_path for site in found.layers] == [f"inner.{site.module_path}" for site in written.layers]
    assert found.decoder == written.decoder


def test_embeddings_and_hidden_states() -> None:
    inner = randomize(Backbone(HEADS, 1))

    class Headless(Original):
        def forward(self, x: Tensor, pos: Tensor) -> Tensor:
            return self.inner(x, pos)

    adapted = fc.adapt(Headless(inner), tokens="x", position="pos", embeddings=True)
    x, position = torch.randn(BATCH, 1, WIDTH), torch.zeros(1, dtype=torch.int64)
    with torch.no_grad():
        assert torch.equal(adapted(x, position), inner(x, position))
    assert "inputs_embeds" in inspect.signature(adapted.forward).parameters


def test_the_refusal_names_the_call() -> None:
    model = Class2Image(LlamaGen(HEADS))
    with pytest.raises(CompileError, match=r'fc.adapt\(model, tokens="idx", position="input_pos", cond_idx=…\), or'):
        fc.compile(model, "cpu", tokens_per_frame=4, dry_run=True)
    with pytest.raises(CompileError, match=r'tokens="input_ids", position="position_ids", rows=True\)'):
        fc.compile(World(MineWorld()), "cpu", tokens_per_frame=4, dry_run=True)


def test_wrong_names_are_refused_at_once() -> None:
    with pytest.raises(CompileError) as error:
        fc.adapt(Class2Image(LlamaGen(HEADS)), tokens="ids", position="input_pos", temperature=1.0)
    assert [p.what for p in error.value.problems] == [
        f"Class2Image.forward {text}"
        for text in ("takes no ids", "takes no temperature", "needs idx", "needs cond_idx")
    ]
    assert "its inputs are idx, cond_idx, input_pos" in str(error.value)
