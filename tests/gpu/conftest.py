"""One small decoder with a program for a GPU and a library for WebAssembly, which this machine's CPU runs too."""

from pathlib import Path
from typing import Any

import pytest
from conftest import built_once, check_module
from decoders import llama
from play.worlds import FRAME

import fastcar_compile as fc


def compiled(output: Path, layers: int = 2, **options: Any) -> fc.Artifact:
    check_module("ziglang")
    given = {"prefill_chunk": 4, "host_cpus": ["native", "wasm-simd128"]} | options
    return fc.compile(
        llama(head_dim=32, num_hidden_layers=layers), "webgpu", quant="w8a8", kv="int8", tokens_per_frame=FRAME,
        max_seq_len=65, replay=fc.ReplayConfig(threshold=0.0), output=output, **given,
    )  # fmt: skip


@pytest.fixture(scope="session")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> fc.Artifact:
    """One of the test processes builds it."""
    return built_once(tmp_path_factory, "webgpu", compiled)
