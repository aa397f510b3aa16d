"""insert-drafts: what it refuses, and what it leaves alone."""

import pytest
from gates.drafts import layer_of_draft, random_draft

from fastcar_compile.errors import CompileError
from fastcar_compile.gates.draft import Draft, DraftSize
from fastcar_compile.ir.program import DecoderProgram
from fastcar_compile.passes.insert_drafts import InsertDrafts
from fastcar_compile.passes.insert_replay import InsertReplay
from fastcar_compile.passes.pipeline import analysis_pipeline

from .laws import everything, module_text
from .tiny import WIDTH, TinyBlock, after


def replaying(*thresholds: float | None) -> DecoderProgram:
    item = InsertReplay(thresholds, gate="input_delta")
    return after(*analysis_pipeline(), item, blocks=(TinyBlock,) * len(thresholds))


@pytest.mark.parametrize(
    ("draft", "thresholds", "text"),
    [
        (Draft("00" * 32), (0.5,), "the layers of the draft are known only by their digest, sha256:00"),
        (random_draft(WIDTH), (0.5,), "the draft has a layer 1, but the decoder has 1 layer"),
        (random_draft(6), (0.5, 0.5), "layer 0 of the draft is for a hidden size of 6, but the decoder's is 8"),
        (Draft.of({1: layer_of_draft(WIDTH)}), (0.5, None), "no layer with a draft has a gate"),
    ],
)
def test_what_is_refused_changes_nothing(draft: Draft, thresholds: tuple[float | None, ...], text: str) -> None:
    program = replaying(*thresholds)
    before = everything(program)
    with pytest.raises(CompileError, match=text):
        InsertDrafts(draft).apply(program)
    assert everything(program) == before
    assert InsertDrafts().apply(program) is False


def test_a_layer_without_a_draft_or_without_a_gate_stays() -> None:
    before, program = replaying(None, 0.5, 0.5), replaying(None, 0.5, 0.5)
    InsertDrafts(Draft.of({i: layer_of_draft(WIDTH, 3, 2) for i in (0, 1)})).apply(program)
    assert [s.replay and s.replay.draft for s in program.sites] == [None, DraftSize(3, 2), None]
    assert {n.rpartition("_")[2] for n in program.params if n.startswith("draft_")} == {"1"}
    assert program.state == before.state
    assert module_text(program.prefill) == module_text(before.prefill)  # pyright: ignore[reportArgumentType]
