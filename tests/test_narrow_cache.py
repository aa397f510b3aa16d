"""Keys and values in int8: the same on every backend, fewer bytes, and what refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from agreement import check_backends
from conftest import check_module, check_tool
from decoders import llama

import fastcar_compile as fc
from fastcar_compile.errors import CompileError
from fastcar_compile.ir.types import StateRole

FRAME, LENGTH, BATCH, PROMPT = 8, 65, 2, 21
SPARSE = fc.SparseAttention(window=5, sinks=3, positions="cache")


def compiled(folder: Path, **options: Any) -> fc.Artifact:
    """A grouped-query Llama in w8a8."""
    defaults: dict[str, Any] = {"target": "zcu102", "quant": "w8a8", "offload": "mlp", "kv": "int8"}
    return fc.compile(
        llama(initializer_range=0.2, num_hidden_layers=1),
        tokens_per_frame=FRAME,
        max_seq_len=LENGTH,
        batch_size=BATCH,
        prefill_chunk=16,
        output=folder / "artifact",
        **{**defaults, **options},
    )


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> fc.Artifact:
    """For a board, so that there is a host graph of an accelerator too; gates/test_decoders.py has full caches and
    float16 ones, board/conftest.py a ring of float16."""
    check_tool("g++")
    return compiled(tmp_path_factory.mktemp("narrow"), replay=fc.ReplayConfig(threshold=0.0), sparse_attention=SPARSE)


def token_ids() -> torch.Tensor:
    return torch.randint(0, 17, (BATCH, LENGTH), generator=torch.Generator().manual_seed(5))


def test_all_backends_decide_and_compute_alike(artifact: fc.Artifact) -> None:
    check_module("onnxruntime")
    check_backends(artifact, token_ids(), PROMPT)


def test_what_the_artifact_says(artifact: fc.Artifact) -> None:
    caches = [s for s in artifact.state if s.role in (StateRole.KEY_CACHE, StateRole.VALUE_CACHE)]
    assert {s.dtype for s in caches} == {"int8"}
    assert {s.dtype for s in artifact.state if s not in caches} == {"float32", "int32"}
    assert artifact.manifest.pipeline.passes.endswith('quantize-kv-cache{"dtype": "int8"}')
    assert artifact.manifest.options.kv == "int8"
    rows, each = caches[0].shape[2], BATCH * 2 * (16 + 1)
    assert f"key_cache_0: int8 [2, 2, {rows}, 17], {rows * each / 2**20:.3f} MiB" in artifact.explain(layer=0)
    report = json.loads((artifact.path / "report.json").read_text())
    assert report["state_bytes"]["key_cache"] == rows * each


def test_a_type_that_no_cache_has(tmp_path: Path) -> None:
    with pytest.raises(CompileError, match="kv: unknown KV type 'float8'; known: float32, float16, int8"):
        compiled(tmp_path, target="cpu", kv="float8")
