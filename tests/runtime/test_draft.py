"""Drafts in a session: the rule by definition, and the same bits on every backend."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from agreement import decode
from decoders import llama, rewritten
from gates.drafts import random_draft
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaForCausalLM

import fastcar_compile as fc
from fastcar_compile.errors import CompileError
from fastcar_compile.gates.draft import Draft, LayerDraft
from fastcar_compile.runtime.backends.eager import EagerStepper
from fastcar_compile.runtime.session import Session

FRAME, LENGTH, PROMPT, HIDDEN = 5, 36, 4, 64
OPTIONS: dict[str, Any] = {"tokens_per_frame": FRAME, "max_seq_len": 48, "prefill_chunk": 1, "target": "cpu"}
EXACT: dict[str, Any] = {"quant": "w8a8", "kv": "int8", "numerics": "exact"}


def token_ids(batch: int, symbols: int = 17) -> Tensor:
    return torch.randint(0, symbols, (batch, LENGTH), generator=torch.Generator().manual_seed(2))


def built(output: Path, model: nn.Module | None = None, draft: Draft | None = None, **options: Any) -> fc.Artifact:
    """A decoder with a draft, whose gate is the draft's unless `replay` says another."""
    given = {"threshold": 0.3, "max_chain": 4} | options.pop("replay", {})
    replay = fc.ReplayConfig(draft=random_draft(HIDDEN) if draft is None else draft, **given)
    return fc.compile(llama() if model is None else model, replay=replay, output=output, **(OPTIONS | options))


def decoded(artifact: fc.Artifact, backend: str, ids: Tensor) -> tuple[Tensor, np.ndarray[Any, Any]]:
    """Logits [B, T, V] and decisions [T, L, B]."""
    with artifact.session(backend, record=True) as session:
        return decode(session, ids, PROMPT), np.asarray(session.stats.decisions)


class Reference:
    """The rule by definition over a whole sequence: shares no operator, pass or cache with the package.

    A hook on an MLP sees the inputs of all positions, and replaces the outputs of rows that replay, slot by slot.
    """

    def __init__(self, draft: Draft, decisions: np.ndarray[Any, Any]) -> None:
        self.draft, self.decisions = draft, torch.from_numpy(decisions)

    def surrogate(self, own: LayerDraft, x: Tensor) -> Tensor:
        assert own.gate_proj is not None
        neurons = F.silu(own.gate_proj @ x) * (own.up_proj @ x)
        return own.outer @ torch.cat([neurons, own.inner @ x]) + own.bias

    def gain(self, own: LayerDraft, x: Tensor, cached: Tensor) -> float:
        change = float((x - cached).abs().sum() / x.abs().sum())
        return float(own.gains[sum(change >= float(edge) for edge in own.edges)])

    def hook(self, layer: int) -> Callable[..., Tensor]:
        def replace(_module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
            found, slots = output.clone(), dict[tuple[int, int], tuple[Tensor, Tensor]]()
            for step, position in enumerate(range(PROMPT, output.shape[1])):
                for row in range(output.shape[0]):
                    x, place = inputs[0][row, position], (step % FRAME, row)
                    if not self.decisions[step, layer, row]:
                        slots[place] = x, output[row, position]
                        continue
                    cached_x, cached = slots[place]
                    own = self.draft.layers.get(layer)
                    if own is None:
                        found[row, position] = cached
                        continue
                    left = cached - self.surrogate(own, cached_x)
                    found[row, position] = self.surrogate(own, x) + self.gain(own, x, cached_x) * left
            return found

        return replace

    @torch.no_grad()
    def logits(self, model: LlamaForCausalLM, ids: Tensor) -> Tensor:
        """Logits [B, T, V] from the prompt's last token on."""
        for layer in range(model.config.num_hidden_layers):
            model.get_submodule(f"model.layers.{layer}.mlp").register_forward_hook(self.hook(layer))
        return model(ids, use_cache=False).logits[:, PROMPT - 1 :]


@pytest.mark.parametrize("layers", [pytest.param((0, 1), marks=pytest.mark.thorough), (1,)])
def test_a_session_follows_the_rule(layers: tuple[int, ...]) -> None:
    """With replays of replays, whose slots keep input and output of the last visit that computed."""
    draft, ids = random_draft(HIDDEN, layers), token_ids(3)
    sizes = {"tokens_per_frame": FRAME, "max_seq_len": 48, "batch_size": 3}
    replay = fc.ReplayConfig(draft=draft, threshold=0.3, max_chain=4)
    program = rewritten(llama(), 1, replay=replay, **sizes)
    session = Session(EagerStepper(program), program.config, (0.3, 0.3), record=True, gate=replay.gate)
    logits, decisions = decode(session, ids, PROMPT), np.asarray(session.stats.decisions)
    assert 0.3 < decisions.mean() < 0.9
    assert (decisions[FRAME:] & decisions[:-FRAME]).any((0, 2)).all(), "no row replays twice in a row"
    assert not decisions[:FRAME].any()
    reference = Reference(draft, decisions)
    expected = reference.logits(llama(), ids)
    torch.testing.assert_close(logits, expected, atol=2e-4, rtol=1e-4)
    plain = Reference(Draft("00"), decisions).logits(llama(), ids)
    assert float((plain - expected).abs().max()) > 0.01, "the draft changes nothing"


WHOLE: dict[str, Any] = {"target": "zcu102", "offload": "all"}


def check_close(artifact: fc.Artifact, ids: Tensor, *backends: str, atol: float) -> None:
    """Equal decisions and near logits."""
    eager, chosen = decoded(artifact, "eager", ids)
    assert 0.1 < chosen.mean() < 0.9
    for backend in backends:
        found, decisions = decoded(artifact, backend, ids)
        assert (decisions == chosen).all(), backend
        torch.testing.assert_close(found, eager, atol=atol, rtol=0)


@pytest.mark.parametrize(
    ("quant", "atol"),
    [*(pytest.param(q, a, marks=pytest.mark.thorough) for q, a in (("none", 1e-4), ("bf16", 1e-3))), ("w4a8", 1e-2)],
)
def test_every_backend_is_close(quant: str, atol: float, tmp_path: Path) -> None:
    artifact = built(tmp_path / "built", quant=quant, batch_size=2)
    check_close(artifact, token_ids(2), "cpu", "onnxruntime", atol=atol)


def test_an_engine_in_rtl_has_no_drafts(tmp_path: Path) -> None:
    with pytest.raises(CompileError, match=r"engine='rtl' has no drafts: .* C\+\+ .*\n.*offload='linears'"):
        built(tmp_path / "built", llama(head_dim=32), **EXACT, **WHOLE, engine="rtl")


def test_rows_beyond_the_array_are_refused(tmp_path: Path) -> None:
    """A draft takes two rows of it for each that replays."""
    with pytest.raises(CompileError, match=r"drafts on the accel.*: 17 rows are more than 16\n.*at most 16 rows"):
        built(tmp_path / "built", llama(head_dim=32), **EXACT, **WHOLE, batch_size=17)
    free: dict[str, Any] = OPTIONS | {"target": "zcu102", "quant": "w8a8", "batch_size": 17, "dry_run": True}
    with pytest.warns(UserWarning, match="offload is 'mlp'.*17 rows are more than 16"):
        report = fc.compile(llama(head_dim=32), replay=fc.ReplayConfig(draft=random_draft(HIDDEN)), **free)
    assert {p.unit for p in report.placements if p.what == "draft"} == {"host"}
