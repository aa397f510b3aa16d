"""The shipped decoder over one whole held-out video (2048 tokens): every backend against the original model."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from agreement import decode
from conftest import Made, check_module, check_tool, imported
from transformers import LlamaForCausalLM

import fastcar_compile as fc

EXAMPLE = Path(__file__).parents[1] / "examples" / "moving_shapes"
FRAME, TOKENS = 256, 2048
THRESHOLDS = (0.0, -25.0, -14.0, -31.0)
"""Some rows of every layer replay; not at the value that the empty background gives layer 0 over and over."""
pytestmark = pytest.mark.thorough  # families/ has the law with small decoders in every run
OPTIONS: dict[str, Any] = {"tokens_per_frame": FRAME, "prefill_chunk": 1}
"""The prompt is one token; test_end_to_end.py has longer ones."""


@pytest.fixture(scope="module")
def video() -> SimpleNamespace:
    """The model, and BOS and a held-out video as ids [1, 2048]."""
    model = LlamaForCausalLM.from_pretrained(EXAMPLE / "model", local_files_only=True, dtype=torch.float32).eval()
    with imported([EXAMPLE], ["video"]) as modules:
        example = modules.video
    ids = torch.from_numpy(example.with_bos(example.tokenize(example.make_videos(1, seed=1))))[:, :TOKENS]
    return SimpleNamespace(model=model, ids=ids)


@pytest.fixture(scope="module")
def artifacts(video: SimpleNamespace, tmp_path_factory: pytest.TempPathFactory) -> dict[str, fc.Artifact]:
    """By quantisation, float32 for the CPU and others for zcu102."""

    def make(quant: str) -> fc.Artifact:
        where = {"target": "cpu"} if quant == "none" else {"target": "zcu102", "offload": "mlp"}
        options: dict[str, Any] = {**OPTIONS, **where, "replay": fc.ReplayConfig(threshold=THRESHOLDS)}
        return fc.compile(video.model, quant=quant, output=tmp_path_factory.mktemp("video") / "a", **options)

    return Made(make)


@pytest.mark.parametrize(
    ("backend", "tokens"),
    [("cpu", TOKENS), ("onnxruntime", FRAME + 32), ("eager", FRAME + 32)],
)
def test_gate_off_equals_the_original_model(
    video: SimpleNamespace, artifacts: dict[str, fc.Artifact], backend: str, tokens: int
) -> None:
    """Over the whole video on the CPU."""
    with torch.inference_mode():
        expected = video.model(video.ids[:, :tokens], use_cache=False).logits[0]
    session = artifacts["none"].session(backend)
    session.set_threshold(float("inf"))
    logits = decode(session, video.ids[:, :tokens], 1)[0]
    assert (logits - expected).abs().max() <= 1e-3
    assert torch.equal(logits.argmax(-1), expected.argmax(-1))
    assert session.stats.replay_ratio == 0.0


@pytest.mark.parametrize(("backend", "tokens"), [("onnxruntime", 2 * FRAME), ("eager", FRAME + FRAME // 4)])
def test_gate_on_decisions_and_logits_agree(
    video: SimpleNamespace, artifacts: dict[str, fc.Artifact], backend: str, tokens: int
) -> None:
    """With the CPU's."""
    sessions = [artifacts["none"].session(name, record=True) for name in ("cpu", backend)]
    one, other = (decode(session, video.ids[:, :tokens], 1)[0] for session in sessions)
    assert 0.1 < sessions[0].stats.replay_ratio < 0.8
    assert np.array_equal(sessions[0].stats.decisions, sessions[1].stats.decisions)
    assert (one - other).abs().max() <= 1e-3


@pytest.mark.parametrize("quant", ["w8a8", "w4a8"])
def test_quantised_decides_the_same_on_cpu_and_in_hls_simulation(
    video: SimpleNamespace, artifacts: dict[str, fc.Artifact], quant: str
) -> None:
    check_tool("g++")
    check_module("hls4ml")
    cpu, hls = (artifacts[quant].session(b, record=True) for b in ("cpu", "hls-csim"))
    expected, actual = (decode(session, video.ids, 1)[0] for session in (cpu, hls))
    assert 0.1 < cpu.stats.replay_ratio < 0.8
    differing = torch.nonzero((actual != expected).any(1)).flatten().tolist()
    assert not differing, (differing[:5], (actual - expected).abs().max().item())  # defined bit for bit
    assert np.array_equal(cpu.stats.decisions, hls.stats.decisions)
