"""A decoder with exact numerics: one artifact, equal bits on every backend that has them."""

from pathlib import Path

import numpy as np
import pytest
import torch
from agreement import decode

import fastcar_compile as fc
from exact.conftest import PROMPT, compiled, token_ids
from fastcar_compile.errors import BackendError, CompileError


def test_backends_have_the_same_bits(artifact: fc.Artifact) -> None:
    """test_whole_step.py compares C simulation with cpu, states too."""
    found = {}
    for backend in ("eager", "cpu"):
        session = artifact.session(backend, record=True)
        found[backend] = (decode(session, token_ids(), PROMPT), np.asarray(session.stats.decisions))
    logits, decisions = found["eager"]
    assert 0.1 < decisions.mean() < 0.9
    for backend, (own, chosen) in found.items():
        assert torch.equal(own, logits), backend
        assert (chosen == decisions).all(), backend


def test_prefill_and_steps_have_the_same_bits(artifact: fc.Artifact) -> None:
    """The prompt in chunks, or all but its first token in steps that never replay."""
    ids = token_ids()[:, : PROMPT + 1]
    session = artifact.session("cpu")
    session.set_threshold(float("inf"))
    chunks, steps = (decode(session, ids, prompt) for prompt in (PROMPT, 1))
    assert torch.equal(chunks[:, -2:], steps[:, -2:])


def test_what_the_artifact_says(artifact: fc.Artifact) -> None:
    assert artifact.manifest.pipeline.passes.endswith(",exact-arithmetic")
    assert artifact.manifest.options.numerics == "exact"
    assert artifact.manifest.onnx is None
    assert "rotary_table_0" in artifact.program.params
    with pytest.raises(BackendError, match="exact numerics, and onnxruntime rounds quantised linears") as found:
        artifact.session("onnxruntime")
    assert found.value.hint == "use backend 'cpu' or 'eager', or compile with numerics='native'"


@pytest.mark.parametrize("options", [{"quant": "bf16"}, {"kv": "float16"}])
def test_floats_are_refused(tmp_path: Path, options: dict[str, str]) -> None:
    with pytest.raises(CompileError, match="numerics='exact' is defined for integers"):
        compiled(tmp_path / "a", **options)


def test_positions_inside_the_cache_are_refused(tmp_path: Path) -> None:
    sparse = fc.SparseAttention(window=5, sinks=3, positions="cache")
    with pytest.raises(CompileError, match='sparse attention with positions="cache" is not defined bit for bit'):
        compiled(tmp_path / "a", sparse_attention=sparse, replay=None, dry_run=True)
