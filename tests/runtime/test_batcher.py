"""Sequences that join and leave a batch: each one's tokens are those that it has alone."""

import shutil
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from conftest import Made, check_module, first_often
from decoders import SIZES, llama
from transformers import MistralConfig, MistralForCausalLM

import fastcar_compile as fc
from fastcar_compile.artifact.thresholds import Thresholds
from fastcar_compile.errors import InputError
from fastcar_compile.runtime.backends.base import opened

FRAME, LENGTH, PLACES = 6, 40, 3
CPU: dict[str, Any] = {"target": "cpu", "quant": "w8a8", "kv": "int8", "numerics": "exact"}
BOARD: dict[str, Any] = {"target": "zcu102", "quant": "w8a8", "offload": "all"}
KINDS: dict[str, dict[str, Any]] = {
    "alone": {**CPU, "prefill_chunk": 1},
    "one row": {**CPU, "batch_size": PLACES, "rows": 1},
    "three rows": {**CPU, "batch_size": PLACES, "rows": 3},
    "board, one row": {**BOARD, "batch_size": PLACES, "rows": 1},
    "board, three rows": {**BOARD, "batch_size": PLACES, "rows": 3},
}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, fc.Artifact]:
    """By kind. A board's whole steps are as exact as the kernels of a CPU."""

    def build(kind: str) -> fc.Artifact:
        options: dict[str, Any] = {"tokens_per_frame": FRAME, "max_seq_len": LENGTH, "prefill_chunk": 4} | KINDS[kind]
        replay = fc.ReplayConfig(threshold=0.0, max_chain=2, refresh_every=3)
        return fc.compile(llama(head_dim=32), replay=replay, output=tmp_path_factory.mktemp("batcher") / "a", **options)

    return Made(build)


@pytest.fixture(scope="module")
def alone(built: dict[str, fc.Artifact]) -> fc.Artifact:
    return built["alone"]


@pytest.fixture(scope="module", params=first_often(["three rows", "one row"]))
def artifact(request: pytest.FixtureRequest, built: dict[str, fc.Artifact]) -> fc.Artifact:
    return built[request.param]


def requests(count: int) -> list[tuple[np.ndarray, int, fc.Sampling]]:
    draw = np.random.default_rng(5)
    lengths = [(int(draw.integers(1, 12)), int(draw.integers(1, 28))) for _ in range(count)]
    return [
        (draw.integers(0, 17, length), new, fc.Sampling(temperature=1.0, seed=i))
        for i, (length, new) in enumerate(lengths)
    ]


def test_prompts_are_longer_than_a_frame_and_a_window(tmp_path: Path) -> None:
    """Rows read more of a prompt in a step than a frame has; the ring has room for them."""
    sizes: dict[str, Any] = {"tokens_per_frame": 3, "max_seq_len": 48, "prefill_chunk": 1, "replay": None}
    torch.manual_seed(0)
    config = MistralConfig(**{**SIZES, "num_hidden_layers": 4}, head_dim=32, sliding_window=3)
    model = MistralForCausalLM(config).eval()
    one = fc.compile(model, output=tmp_path / "one", **CPU, **sizes).session()
    with fc.Batcher(fc.compile(model, rows=8, output=tmp_path / "rows", **CPU, **sizes), threads=1) as batcher:
        for length in (7, 9, 14, 15):
            ids = np.random.default_rng(length).integers(0, 17, length)
            assert batcher.submit(ids, 6).result(60) == one.generate(ids[None], 6)[0].tolist(), length


def test_an_artifact_whose_rows_took_ranges_is_refused() -> None:
    programs = SimpleNamespace(decode=SimpleNamespace(inputs=("tokens", "position", "spans")))
    manifest = SimpleNamespace(host=SimpleNamespace(variants=[SimpleNamespace(programs=programs)]))
    old: Any = SimpleNamespace(path="old", manifest=manifest)
    with pytest.raises(fc.BackendError, match=r"whose rows took ranges of positions\n.*old\n.*compile the model again"):
        opened(old, "eager", None)


def test_a_sequence_begins_with_the_stored_thresholds(
    alone: fc.Artifact, artifact: fc.Artifact, tmp_path: Path
) -> None:
    shutil.copytree(artifact.path, tmp_path / "a")
    copy, (prompt, new, sampling) = fc.load(tmp_path / "a"), requests(1)[0]
    facts = {"replay": 0.0, "per_layer": (0.0, 0.0), "nll": 1.0, "nll_dense": 1.0, "goal": "none", "inputs": ""}
    copy.store_thresholds(Thresholds(gate="tas", values=(-1e30, -1e30), **facts))  # every score is higher
    with fc.Batcher(copy, threads=1) as batcher:
        stream = batcher.submit(prompt, new, sampling)
        found = stream.result()
    session = alone.session("cpu")
    compiled = session.generate(prompt[None], new, sampling), session.stats.replay_ratio
    session.set_threshold(-1e30)
    assert found == session.generate(prompt[None], new, sampling)[0].tolist()
    assert stream.replay_ratio == pytest.approx(session.stats.replay_ratio)
    assert stream.replay_ratio > compiled[1]


@pytest.mark.parametrize(
    ("kind", "backend"),
    first_often(
        [
            *(("three rows", "cpu"), ("one row", "cpu"), ("three rows", "eager"), ("one row", "eager")),
            *(("board, three rows", "hls-csim"), ("board, one row", "hls-csim")),
        ]
    ),
)
def test_tokens_are_those_of_a_session(built: dict[str, fc.Artifact], kind: str, backend: str) -> None:
    """Bit for bit, with replay: prompts of different lengths, places that are used again and again."""
    check_module("hls4ml")
    session, asked = built["alone"].session("cpu"), requests(14)
    limits = [None, 0.05, [0.02, None], -np.inf]
    with fc.Batcher(built[kind], backend, threads=1) as batcher:
        if backend == "hls-csim":
            with pytest.raises(InputError, match="an accelerator has one threshold of a layer for all sequences"):
                batcher.submit(*asked[0], 0.05)
            limits = [None] * 4
        streams = [batcher.submit(*request, limits[i % 4]) for i, request in enumerate(asked)]
        ratios = []
        for i, (stream, (prompt, new, sampling)) in enumerate(zip(streams, asked, strict=True)):
            session.set_threshold(0.0 if limits[i % 4] is None else limits[i % 4])
            assert stream.result() == session.generate(prompt[None], new, sampling)[0].tolist()
            assert stream.replay_ratio == pytest.approx(session.stats.replay_ratio)
            ratios.append(stream.replay_ratio)
    assert max(ratios) > 0.15


def until(began: threading.Event, event: threading.Event) -> fc.Sampling:
    class Waiting(fc.Sampling):
        def start(self, prompt: Any) -> Any:
            return lambda logits: (began.set(), event.wait(20), logits.argmax(-1))[-1]

    return Waiting()


def test_others_decode_between_the_chunks_of_prompts(
    alone: fc.Artifact, artifact: fc.Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two long prompts are read by turns, one chunk between two decode steps of the others."""
    session, calls = alone.session("cpu"), list[int]()
    prompts = [np.random.default_rng(i).integers(0, 17, length) for i, length in enumerate((1, 36, 30))]
    with fc.Batcher(artifact, threads=1) as batcher:
        stepper, per, joined = batcher._decoding._stepper, batcher._config.rows or 1, threading.Event()
        began = threading.Event()
        decode, prefill_video = stepper.decode, stepper.prefill_video

        def decoded(inputs: Any, position: Any, *args: Any, **options: Any) -> Any:
            calls.append(int((position.reshape(-1, per) >= 0).any(1)[0]) - 1)
            return decode(inputs, position, *args, **options)

        def read(inputs: Any, position: int, video: int) -> Any:
            calls.append(video)
            return prefill_video(inputs, position, video)

        monkeypatch.setattr(stepper, "decode", decoded)
        monkeypatch.setattr(stepper, "prefill_video", read)
        first = batcher.submit(prompts[0], 1, until(began, joined))  # all others join at once behind it
        assert began.wait(20)
        streams = [batcher.submit(prompt, 4 + 30 * (i == 0)) for i, prompt in enumerate(prompts)]
        joined.set()
        first.result()
        found = [stream.result() for stream in streams]
    for prompt, tokens in zip(prompts, found, strict=True):
        assert tokens == session.generate(prompt[None], len(tokens))[0].tolist()
    chunks = [i for i, video in enumerate(calls) if video > 0]
    assert [calls[i] for i in chunks][:8] == [1, 2] * 4
    assert len(chunks) == {1: 17, 3: 16}[per]  # what fits a decode step is read by one
    # With three rows the first sequence has several tokens a decode step, and ends sooner.
    assert all(calls[i + 1] == 0 for i in chunks[:10])


def test_what_cannot_be_decoded_is_refused(alone: fc.Artifact, artifact: fc.Artifact) -> None:
    with pytest.raises(InputError, match=r"share one position\n.*\n.*compile with rows=1"):
        fc.Batcher(alone)
    fit = pytest.raises(InputError, match="5 prompt tokens and 37 new ones do not fit max_seq_len 40")
    with fc.Batcher(artifact, threads=1) as batcher, fit:
        batcher.submit(np.zeros(5, np.int64), 37)
