"""Whole decoders: the rewritten graphs against StreamingLLM key by key, and one artifact on every backend."""

import copy
import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from agreement import check_backends, decode
from conftest import check_module, check_tool
from decoders import llama

import fastcar_compile as fc
from fastcar_compile.errors import size_text
from fastcar_compile.frontend.capture import capture
from fastcar_compile.ir.pass_manager import run_pipeline
from fastcar_compile.ir.program import DecoderProgram
from fastcar_compile.ir.types import StateRole
from fastcar_compile.passes.caches import SparsifyAttention
from fastcar_compile.passes.insert_replay import InsertReplay
from fastcar_compile.passes.pipeline import analysis_pipeline
from fastcar_compile.runtime.backends.eager import EagerStepper
from fastcar_compile.runtime.session import Session
from fastcar_compile.tune.calibrate import rules_of
from fastcar_compile.tune.evaluate import SinkWindow
from fastcar_compile.tune.evaluator import Evaluator

from .oracle import ROWS, VOCAB, RotaryDecoder, streaming

FRAME, CHUNK, BATCH = 6, 5, 2
Positions = Literal["absolute", "cache"]


@cache
def dense() -> RotaryDecoder:
    return RotaryDecoder(BATCH).eval()


@cache
def captured() -> DecoderProgram:
    program = capture(dense(), batch_size=BATCH, max_seq_len=ROWS, tokens_per_frame=FRAME, prefill_chunk=CHUNK)
    return run_pipeline(program, analysis_pipeline())


def rewritten(sinks: int, window: int, positions: Positions, *before: Any) -> DecoderProgram:
    passes = [*before, SparsifyAttention(sinks, window, positions)]
    return run_pipeline(copy.deepcopy(captured()), passes)


def session_of(program: DecoderProgram, threshold: float = float("inf"), prefill: bool = True) -> Session:
    backend = EagerStepper(program if prefill else replace(program, prefill=None))
    return Session(backend, program.config, [threshold] * program.config.num_layers, record=True)


def token_ids(vocab: int = VOCAB, length: int = ROWS) -> torch.Tensor:
    return torch.randint(0, vocab, (BATCH, length), generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize(
    ("sinks", "window", "positions"), [(3, 4, "absolute"), (0, 5, "absolute"), (3, 4, "cache"), (4, 1, "cache")]
)
def test_every_position_is_that_of_streaming_attention(sinks: int, window: int, positions: Positions) -> None:
    """Prompts shorter than the sinks, longer than the window and of several chunks; the ring turns several times."""
    program, ids = rewritten(sinks, window, positions), token_ids()
    assert program.config.ring is not None
    assert 3 * program.config.ring.capacity < ROWS
    with torch.inference_mode():
        expected = streaming(dense(), ids, sinks, window, positions)
    for prompt in (2, 17):
        actual = decode(session_of(program), ids, prompt)
        torch.testing.assert_close(actual, expected[:, prompt - 1 :], atol=1e-5, rtol=0)


@pytest.mark.parametrize("gate", ["tas", "input_delta"])
def test_calibration_scores_are_those_of_the_session(gate: str) -> None:
    """The evaluator's chunks read the key of one frame earlier from the ring too."""
    replay = fc.ReplayConfig(gate=gate, threshold=0.4)
    program = rewritten(2, 3, "absolute", InsertReplay((0.4, 0.4), gate=gate))
    videos = token_ids(length=ROWS + 1)
    measured = Evaluator(program, videos.numpy(), rules_of(replay, 2)).measure([0.4, 0.4])
    session = session_of(program, 0.4, prefill=False)
    decode(session, videos[:, :ROWS], 1)
    counted = np.asarray(session.stats.decisions)[FRAME:].mean((0, 2))
    assert measured.ratios == pytest.approx(counted.tolist())
    assert 0.0 < measured.replay < 1.0


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> fc.Artifact:
    """For a board, so that there is a host graph of an accelerator too; board/conftest.py has a ring of bfloat16."""
    check_tool("g++")
    return fc.compile(
        llama(initializer_range=0.2), target="zcu102", offload="mlp", tokens_per_frame=8, max_seq_len=65, batch_size=2,
        kv="int8", replay=fc.ReplayConfig(threshold=0.0), prefill_chunk=4,
        sparse_attention=fc.SparseAttention(window=5, sinks=3, positions="cache"),
        output=tmp_path_factory.mktemp("sparse") / "artifact",
    )  # fmt: skip


def test_all_backends_decide_and_compute_alike(artifact: fc.Artifact) -> None:
    """Window narrower than a frame, prompt longer than the window: eager, TVM, onnxruntime and C simulation."""
    check_module("onnxruntime")
    check_backends(artifact, token_ids(17, 65), 21)


def test_a_ring_of_all_positions_and_rows_of_a_video(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """With what a chunk adds, the ring is as long as the video. The rows' tables of sinks are inputs of each layer."""
    artifact = fc.compile(
        llama(head_dim=32), "cpu", tokens_per_frame=4, max_seq_len=13, prefill_chunk=4, quant="w8a8", kv="int8",
        sparse_attention=fc.SparseAttention(window=8, sinks=2, positions="cache"), jacobi=fc.Jacobi(4),
        replay=fc.ReplayConfig(threshold=0.0), output=tmp_path / "artifact",
    )  # fmt: skip
    assert artifact.config.ring is not None
    assert artifact.config.ring.capacity == 13
    assert not capfd.readouterr().err
    prompt, drawn = np.array([[3, 1, 2, 5]]), fc.Sampling(temperature=1.0, seed=2)
    own = artifact.session().generate(prompt, 10, drawn, jacobi=fc.Jacobi(1))
    for backend in ("cpu", "eager", "onnxruntime"):
        np.testing.assert_array_equal(artifact.session(backend).generate(prompt, 10, drawn), own, err_msg=backend)


def test_explanation_and_report(artifact: fc.Artifact) -> None:
    text = artifact.explain()
    assert "sparse    3 sinks and the last 5 tokens, rotary positions inside the cache" in text
    assert "15 rows of keys and values instead of 65" in text
    caches = [s for s in artifact.state if s.role in (StateRole.KEY_CACHE, StateRole.VALUE_CACHE)]
    assert {s.dtype for s in caches} == {"int8"}
    assert {s.dtype for s in artifact.state if s not in caches} == {"float32", "int32"}
    each = 2 * 2 * (16 + 1)
    kind = f"key_cache_0: int8 [2, 2, 15, 17], {size_text(15 * each)}"
    assert kind in artifact.explain(layer=0)
    report = json.loads((artifact.path / "report.json").read_text())["sparse_attention"]
    assert report == {
        "sinks": 3, "window": 5, "positions": "cache", "cache_rows": 15, "kv_bytes": 2 * 2 * 15 * each,
        "kv_bytes_of_full_cache": 2 * 2 * 65 * each,
    }  # fmt: skip
    assert fc.load(artifact.path).config.ring == artifact.program.config.ring


def test_no_other_attention_stands_in_for_a_ring() -> None:
    rules = rules_of(fc.ReplayConfig(), 2)
    with pytest.raises(fc.InputError, match="compiled with sparse attention, for which no other") as found:
        Evaluator(rewritten(2, 3, "absolute"), token_ids().numpy(), rules, attend=SinkWindow(4, 1))
    assert found.value.hint == "evaluate it as it is, or a decoder compiled without sparse attention"
