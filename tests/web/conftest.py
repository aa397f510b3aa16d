"""One small decoder with exact numerics, compiled for WebAssembly, and what Node makes of it."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import built_once, check_module, check_tool
from decoders import llama
from play.worlds import FRAME

import fastcar_compile as fc
from fastcar_compile.artifact.layout import WEB_MODULES

LENGTH, CHUNK = 65, 4


def compiled(output: Path, **options: Any) -> fc.Artifact:
    """A grouped-query Llama for the tiny world and WebAssembly, which this machine's CPU runs too."""
    check_module("ziglang")
    defaults: dict[str, Any] = {
        "tokens_per_frame": FRAME,
        "max_seq_len": LENGTH,
        "quant": "w8a8",
        "kv": "int8",
        "numerics": "exact",
        "replay": fc.ReplayConfig(gate="input_delta", threshold=1.2),
    }
    return fc.compile(
        llama(initializer_range=0.2, head_dim=32), "wasm32",
        prefill_chunk=CHUNK, output=output, **{**defaults, **options},
    )  # fmt: skip


@pytest.fixture(scope="session")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> fc.Artifact:
    """One of the test processes builds it."""
    return built_once(tmp_path_factory, "wasm32", compiled)


Node = Callable[..., Any]
"""node(folder, prompt=…, tokens=…, thresholds=…, draws=…) -> what tests/web/session.mjs prints."""


@pytest.fixture
def node() -> Node:
    """Runs Node."""
    program = check_tool("node")

    def run(folder: Path, **request: Any) -> Any:
        text = json.dumps({"prompt": [], "tokens": [], "thresholds": [], "draws": [], "noises": []} | request)
        script = Path(__file__).with_name("session.mjs")
        command = [program, script, folder / WEB_MODULES[0], folder]
        done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return run
