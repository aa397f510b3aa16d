"""Frequencies of a compiled length, and what a model keeps of its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from families.case import Case
from families.rope_cases import ROPE

from fastcar_compile.frontend.huggingface import fixed_frequencies

BY_LENGTH = [case for case in ROPE if "longrope" in case.name or "dynamic" in case.name]


@pytest.mark.parametrize("case", BY_LENGTH, ids=lambda case: case.name)
def test_frequencies_are_those_of_the_length(case: Case) -> None:
    """Also in a model that has run beyond its original length before, and with positions of the first frame."""
    models: list[Any] = [case.build(), case.build()]
    original, used = (model.model.rotary_emb for model in models)
    x, last = torch.zeros(1, 1), torch.tensor([[case.length - 1]])
    used(x, last)
    before = used.inv_freq.clone(), used.rope_type
    with fixed_frequencies(models[1], case.length):
        cosines = used(x, torch.arange(case.length)[None])[0]
        assert torch.equal(used(x, torch.arange(3)[None])[0], cosines[:, :3])
    assert torch.equal(cosines, original(x, torch.arange(case.length)[None])[0])
    assert (torch.equal(used.inv_freq, before[0]), used.rope_type) == (True, before[1])
