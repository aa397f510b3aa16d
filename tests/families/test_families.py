"""Every case of the list, against the independent reference.

Cases that `full` marks are compiled once and run on every backend: they have between them every operator. Those of
`BRANCHES` run as a rewritten graph. `make thorough` does both with all of them, and simulates the accelerator of each.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from _pytest.mark import ParameterSet

from fastcar_compile.errors import CompileError
from fastcar_compile.frontend.huggingface import fixed_frequencies

from .case import Case
from .cases import BRANCHES, CASES
from .document import DOCUMENT, document
from .reference import Run, dense, replayed
from .rope_cases import ROPE
from .runs import check, compiled, decode, inputs_of, rewritten, warned

BACKENDS = ("eager", "cpu", "onnxruntime")
RIGHT = [case for case in CASES if case.refused is None]


def by_name(case: Case) -> str:
    return case.name


def marked(chosen: Callable[[Case], bool]) -> list[ParameterSet]:
    """All right cases; those that are not chosen are for a thorough run."""
    return [pytest.param(case, marks=() if chosen(case) else pytest.mark.thorough) for case in RIGHT]


def expected(case: Case) -> tuple[Run, Run]:
    """The dense and the replayed decode of the original model."""
    inputs = inputs_of(case)
    return dense(case, inputs), replayed(case, inputs)


@pytest.mark.parametrize("case", marked(lambda case: case.name in BRANCHES), ids=by_name)
def test_the_rewritten_graph_decodes_as_the_original(case: Case) -> None:
    check(rewritten(case), case, *expected(case))


@pytest.mark.parametrize("case", marked(lambda case: case.full), ids=by_name)
def test_every_backend_decodes_as_the_original(case: Case, tmp_path: Path) -> None:
    artifact, runs = compiled(case, tmp_path / "built"), expected(case)
    for backend in BACKENDS:
        check(artifact.session(backend, record=True), case, *runs)


@pytest.mark.thorough  # test_mlp_kinds.py simulates two kinds in every run
@pytest.mark.parametrize("case", RIGHT, ids=by_name)
def test_the_accelerator_decodes_as_the_cpu(
    case: Case, tmp_path: Path, require_tool: Callable[[str], str], require_module: Callable[[str], None]
) -> None:
    """Its MLPs are integers, so that logits of C simulation are those of the CPU bit for bit."""
    require_tool("g++")
    require_module("hls4ml")
    artifact = compiled(case, tmp_path / "built", "zcu102", "w8a8", chunk=1)
    cpu, hls = (artifact.session(backend, record=True) for backend in ("cpu", "hls-csim"))
    thresholds = expected(case)[1].thresholds
    for session in (cpu, hls):
        session.set_threshold(thresholds)
    logits = [decode(session, case, inputs_of(case)) for session in (cpu, hls)]
    assert 0.1 < cpu.stats.eligible_replay_ratio < 0.9
    np.testing.assert_array_equal(cpu.stats.decisions, hls.stats.decisions)
    assert torch.equal(*logits)


REFUSED = {case.refused: case for case in reversed(CASES) if case.refused is not None}
"""Reason -> the first case of it, which every run has."""


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=() if REFUSED[case.refused] is case else pytest.mark.thorough)
        for case in CASES
        if case.refused is not None
    ],
    ids=by_name,
)
def test_what_is_refused_says_why(case: Case, tmp_path: Path) -> None:
    with pytest.raises(CompileError) as refusal:
        compiled(case, tmp_path / "none")
    assert case.refused is not None
    assert case.refused in str(refusal.value)
    assert not (tmp_path / "none").exists()


def test_the_page_is_what_the_list_says() -> None:
    assert DOCUMENT.read_text("utf-8") == document(), "run: PYTHONPATH=tests python -m families"


BY_LENGTH = [case for case in ROPE if "longrope" in case.name or "dynamic" in case.name]


@pytest.mark.parametrize("case", BY_LENGTH, ids=lambda case: case.name)
def test_frequencies_are_those_of_the_length(case: Case) -> None:
    """Also in a model that has run beyond its original length before, and with positions of the first frame."""
    models: list[Any] = [case.build(), case.build()]
    original, used = (model.model.rotary_emb for model in models)
    x, last = torch.zeros(1, 1), torch.tensor([[case.length - 1]])
    used(x, last)
    before = used.inv_freq.clone(), used.rope_type
    with warned(case), fixed_frequencies(models[1], case.length):
        cosines = used(x, torch.arange(case.length)[None])[0]
        assert torch.equal(used(x, torch.arange(3)[None])[0], cosines[:, :3])
    assert torch.equal(cosines, original(x, torch.arange(case.length)[None])[0])
    assert (torch.equal(used.inv_freq, before[0]), used.rope_type) == (True, before[1])
