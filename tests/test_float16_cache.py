"""Keys and values in float16: the same on every backend, half the bytes, and what refuses."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import check_module, check_tool
from decoders import llama

import fastcar_compile as fc
from fastcar_compile.errors import CompileError
from fastcar_compile.frontend.capture import capture
from fastcar_compile.ir import DecoderProgram, StateRole
from fastcar_compile.passes.base import run_pipeline
from fastcar_compile.passes.float16_cache import Float16Cache
from fastcar_compile.passes.pipeline import analysis_pipeline
from fastcar_compile.passes.sparse_attention import SparsifyAttention
from fastcar_compile.runtime.session import Session

FRAME, LENGTH, BATCH, PROMPT = 8, 65, 2, 21
SPARSE = fc.SparseAttention(window=5, sinks=3, positions="cache")


def compiled(folder: Path, **options: Any) -> fc.Artifact:
    """A grouped-query Llama in w8a8."""
    defaults: dict[str, Any] = {"target": "zcu102", "quant": "w8a8", "kv": "float16", "prefill_chunk": 16}
    return fc.compile(
        llama(initializer_range=0.2, num_hidden_layers=1),  # type: ignore[arg-type]
        tokens_per_frame=FRAME,
        max_seq_len=LENGTH,
        batch_size=BATCH,
        output=folder / "artifact",
        **{**defaults, **options},
    )


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> fc.Artifact:
    """For a board, so that there is a host graph of an accelerator too; gates/test_decoders.py has full caches."""
    check_tool("g++")
    return compiled(tmp_path_factory.mktemp("half"), replay=fc.ReplayConfig(threshold=0.0), sparse_attention=SPARSE)


def decode(session: Session, ids: torch.Tensor) -> torch.Tensor:
    """Logits [T - PROMPT + 1, B, V] after a prompt."""
    session.reset()
    out = [session.prefill(ids[:, :PROMPT])]
    return torch.stack(out + [session.step(ids[:, i]) for i in range(PROMPT, ids.shape[1])])


def token_ids() -> torch.Tensor:
    return torch.randint(0, 17, (BATCH, LENGTH), generator=torch.Generator().manual_seed(5))


@pytest.mark.filterwarnings("ignore:.*is not on PATH:UserWarning")
def test_all_backends_decide_and_compute_alike(artifact: fc.Artifact) -> None:
    check_module("onnxruntime")
    found, decisions = {}, {}
    for backend in ("eager", "cpu", "onnxruntime", "hls-csim"):
        session = artifact.session(backend, record=True)
        found[backend] = decode(session, token_ids())
        decisions[backend] = np.asarray(session.stats.decisions)
    assert 0.1 < decisions["eager"].mean() < 0.8
    for backend in found:
        assert (decisions[backend] == decisions["eager"]).all(), backend
        torch.testing.assert_close(found[backend], found["eager"], atol=1e-2, rtol=0)
    assert torch.equal(found["cpu"], found["hls-csim"])


def test_what_the_artifact_says(artifact: fc.Artifact) -> None:
    caches = [s for s in artifact.state if s.role in (StateRole.KEY_CACHE, StateRole.VALUE_CACHE)]
    assert {s.dtype for s in caches} == {torch.float16}
    assert {s.dtype for s in artifact.state if s not in caches} == {torch.float32, torch.int32}
    assert artifact.manifest.sections["config"]["kv"] == "float16"
    assert artifact.manifest.sections["pipeline"].endswith(Float16Cache.name)
    rows, each = caches[0].shape[2], BATCH * 2 * 16 * 2
    assert f"key_cache_0: torch.float16 [2, 2, {rows}, 16], {rows * each / 2**20:.3f} MiB" in artifact.explain(layer=0)
    report = json.loads((artifact.path / "report.json").read_text())
    assert report["state_bytes"]["key_cache"] == rows * each


def program(*passes: Any) -> DecoderProgram:
    captured = capture(llama(), batch_size=1, max_seq_len=33, tokens_per_frame=4, prefill_chunk=4)
    return run_pipeline(captured, [*analysis_pipeline(), *passes])


def test_the_pass_changes_types_and_nothing_else() -> None:
    before = program()
    after = run_pipeline(copy.deepcopy(before), [Float16Cache()])
    assert after.log[-1] == "float16-cache: modified"
    for old, new in zip(before.graphs(), after.graphs(), strict=True):
        for one, other in zip(old.graph.nodes, new.graph.nodes, strict=True):
            assert (one.name, one.target, str(one.args)) == (other.name, other.target, str(other.args))
        halves = {n.name for n in new.graph.nodes if "val" in n.meta and n.meta["val"].dtype == torch.float16}
        assert len(halves) == 2 * 2 * 2  # layers, key and value, placeholder and write
    assert [s.nbytes for s in after.state] == [s.nbytes // 2 for s in before.state]
    run_pipeline(after, [Float16Cache()])
    assert after.log[-1] == "float16-cache: unchanged"


def test_order_of_window_and_float16_does_not_matter() -> None:
    window = SparsifyAttention(2, 6)
    assert program(window, Float16Cache()).state == program(Float16Cache(), window).state


def test_a_cache_that_something_else_reads_is_refused() -> None:
    taken = program()
    graph = taken.graph_module.graph
    write = next(n for n in graph.nodes if n.target is torch.ops.fastcar.cache_write.default)
    with graph.inserting_after(write):
        node = graph.call_function(torch.ops.aten.neg.default, (write,))
    node.meta["val"] = write.meta["val"]
    with pytest.raises(CompileError, match=f"float16 caches: aten.neg.default reads {write.name} itself") as found:
        Float16Cache().apply(taken)
    assert found.value.mend == 'use kv="float32", or run float16-cache after normalize-state'


def test_a_type_that_no_cache_has(tmp_path: Path) -> None:
    with pytest.raises(CompileError, match="kv: Input should be 'float32' or 'float16'"):
        compiled(tmp_path, target="cpu", kv="float8")
