"""Readers of a batcher's tokens: whatever one of them does, the others get theirs."""

from typing import Any

import numpy as np
import pytest
from decoders import llama

import fastcar_compile as fc


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> fc.Artifact:
    replay = fc.ReplayConfig(threshold=0.05, max_chain=2, refresh_every=3)
    options: dict[str, Any] = {"tokens_per_frame": 6, "max_seq_len": 64, "prefill_chunk": 4, "replay": replay}
    return fc.compile(
        llama(num_hidden_layers=1), "cpu", output=tmp_path_factory.mktemp("one") / "a", batch_size=1, rows=1, **options
    )


@pytest.mark.parametrize("backend", ["cpu", "onnxruntime"])
def test_one_place_of_one_row(single: fc.Artifact, backend: str) -> None:
    with single.session(backend, threads=1) as session, fc.Batcher(single, backend, threads=1) as batcher:
        for length, count in ((1, 12), (9, 20)):
            stream = batcher.submit(np.arange(length), count, fc.Sampling(seed=length))
            expected = session.generate(np.arange(length)[None], count, fc.Sampling(seed=length))
            assert stream.result() == expected[0].tolist()
            assert stream.replay_ratio == pytest.approx(session.stats.replay_ratio)
