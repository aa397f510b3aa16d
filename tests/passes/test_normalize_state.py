"""normalize-state: hidden caches become inputs and outputs, masked attention becomes fastcar.attention."""

from __future__ import annotations

import numpy as np
import torch

from fastcar_compile.ir import StateRole
from fastcar_compile.passes.normalize_state import NormalizeState

from .golden import check_golden, check_origins, check_truthful, nodes_of, program_text
from .tiny import BATCH, ROWS, captured, logits, prefill_logits


def test_golden() -> None:
    program = captured()
    before = program_text(program)
    NormalizeState().apply(program)
    check_golden("normalize-state", before, program_text(program))


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
