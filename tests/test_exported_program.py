"""torch.export.export of a step-protocol module as the compiler's input."""

from pathlib import Path
from typing import Any

import agreement
import numpy as np
import pytest
import torch
from decoders import PlainDecoder
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

import fastcar_compile as fc
from fastcar_compile.frontend.capture import capture
from fastcar_compile.frontend.importer import import_exported
from fastcar_compile.ir.pass_manager import run_pipeline
from fastcar_compile.ir.text import graph_to_text
from fastcar_compile.passes.pipeline import analysis_pipeline
from fastcar_compile.runtime.backends.eager import EagerStepper
from fastcar_compile.runtime.session import Session

ROWS, FRAME = 33, 8
IDS = torch.randint(0, 11, (1, ROWS), generator=torch.Generator().manual_seed(9))
OPTIONS: dict[str, Any] = {"target": "cpu", "tokens_per_frame": FRAME, "max_seq_len": ROWS, "prefill_chunk": 1}


class Headless(PlainDecoder):
    """Embeddings in, hidden states out."""

    hidden_size = 32

    # a step of another form is what is tested
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, inputs_embeds: Tensor, cache_position: Tensor
    ) -> Tensor:
        for block in self.blocks:
            inputs_embeds = block(inputs_embeds, cache_position)
        return inputs_embeds


def export(model: nn.Module, tokens: int = 1, keywords: bool = True, **options: Any) -> ExportedProgram:
    """The step of `tokens` tokens."""
    inputs = torch.zeros(1, tokens, dtype=torch.int64)
    positions = torch.arange(tokens)
    named = {"input_ids": inputs, "cache_position": positions}
    arguments = ((), named) if keywords else ((inputs, positions), None)
    options.setdefault("strict", False)
    return torch.export.export(model.eval(), *arguments, **options)


def decode(artifact: fc.Artifact, backend: str, inputs: Tensor, prompt: int, tau: float) -> tuple[Tensor, np.ndarray]:
    """Logits [B, T - prompt + 1, V] and decisions."""
    session = artifact.session(backend, record=True)
    session.set_threshold(tau)
    return agreement.decode(session, inputs, prompt), np.array(session.stats.decisions)


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> fc.Artifact:
    return fc.compile(export(PlainDecoder()), **OPTIONS, output=tmp_path_factory.mktemp("exported") / "a")


def test_same_replay_as_the_compiled_module(exported: fc.Artifact, tmp_path: Path) -> None:
    module = fc.compile(PlainDecoder(), **OPTIONS, output=tmp_path / "module")
    expected, decisions = decode(module, "cpu", IDS, 5, 0.0)
    actual, same = decode(exported, "cpu", IDS, 5, 0.0)
    assert decisions.any()
    np.testing.assert_array_equal(same, decisions)
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=0)
    assert [s.source for s in exported.sites] == [s.source for s in module.sites]


def test_positional_export_gives_the_same_graph() -> None:
    texts = [graph_to_text(import_exported(export(PlainDecoder(), keywords=k))) for k in (True, False)]
    assert texts[0] == texts[1]


def test_headless_export() -> None:
    embeddings = torch.randn(1, ROWS, 32, generator=torch.Generator().manual_seed(2))
    step = {"inputs_embeds": torch.zeros(1, 1, 32), "cache_position": torch.arange(1)}
    exported = torch.export.export(Headless().eval(), (), step, strict=False)
    program = capture(exported, batch_size=1, max_seq_len=ROWS, tokens_per_frame=FRAME, prefill_chunk=1)
    session = Session(EagerStepper(run_pipeline(program, analysis_pipeline())), program.config, [None] * 2)
    with torch.inference_mode():
        expected = Headless()(embeddings, torch.arange(ROWS))
    torch.testing.assert_close(agreement.decode(session, embeddings, 3), expected[:, 2:], atol=1e-4, rtol=0)


class Renamed(PlainDecoder):
    # a step of another form is what is tested
    def forward(self, ids: Tensor, where: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return super().forward(ids, where)


class PerRow(PlainDecoder):
    """Every row has a position of its own, as left padding needs it."""

    def forward(self, input_ids: Tensor, cache_position: Tensor) -> Tensor:
        return super().forward(input_ids, cache_position.reshape(-1)[:1])


def per_row(*shape: int) -> ExportedProgram:
    arguments = {"input_ids": torch.zeros(2, 1, dtype=torch.int64), "cache_position": torch.zeros(shape).long()}
    return torch.export.export(PerRow(batch=2).eval(), (), arguments, strict=False)


def dynamic() -> ExportedProgram:
    steps = Dim("steps", min=2, max=8)
    return export(PlainDecoder(), 4, dynamic_shapes={"input_ids": {1: steps}, "cache_position": {0: steps}})


@pytest.mark.parametrize(
    ("make", "texts"),
    [
        (lambda: export(PlainDecoder(), 2), ["input input_ids has shape [1, 2], but a decode step takes one token"]),
        (dynamic, ["2 problems", "input input_ids has the dynamic shape [1, s", "input cache_position has"]),
        (lambda: export(PlainDecoder().double()), ["tensors of float64, first embed.weight", "float()"]),
        (lambda: export(PlainDecoder().bfloat16(), 2), ["2 problems", "tensors of bfloat16", "has shape [1, 2]"]),
        (lambda: export(Renamed(), keywords=False), ["the step module takes ['ids', 'where'], but the step protocol"]),
        (lambda: per_row(2, 1), ["input cache_position has shape [2, 1], but the rows of a step share one position"]),
        (lambda: export(PlainDecoder()).run_decompositions(), ["4 mutated buffers", "without run_decompositions"]),
    ],
)
def test_what_cannot_be_imported(tmp_path: Path, make: Any, texts: list[str]) -> None:
    with pytest.raises(fc.CompileError) as error:
        fc.compile(make(), **OPTIONS, output=tmp_path / "a")
    assert [t for t in texts if t not in str(error.value)] == []
    assert list(tmp_path.iterdir()) == []


def test_batch_and_length_must_be_the_exports_own(tmp_path: Path) -> None:
    with pytest.raises(fc.CompileError, match=r"has batch 1, but batch_size is 2\n.*give batch_size=1, or export"):
        fc.compile(export(PlainDecoder()), **OPTIONS, batch_size=2, output=tmp_path / "a")
    with pytest.raises(fc.CompileError, match=r"does not say its max_seq_len\n.*give max_seq_len"):
        fc.compile(export(PlainDecoder()), "cpu", tokens_per_frame=FRAME, output=tmp_path / "a")
    assert list(tmp_path.iterdir()) == []
