"""`tas` with rotary="key": the decisions of the paper's published code, on every backend."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from agreement import thresholds_between
from authors import Flow, decoded
from conftest import check_module
from decoders import PlainDecoder, headless_llama, llama

import fastcar_compile as fc
from fastcar_compile.cli.options import parse_thresholds
from fastcar_compile.errors import CompileError

FRAME, PROMPT, STEPS, WIDTH, BATCH = 8, 5, 24, 64, 2
WIDE: dict[str, Any] = {"initializer_range": 0.2}
"""So that scores are of the order of 1."""


def videos() -> torch.Tensor:
    """Embeddings [B, P + T, H] that change little from frame to frame."""
    torch.manual_seed(1)
    same = torch.randn(BATCH, FRAME, WIDTH).repeat(1, 4, 1)[:, : PROMPT + STEPS]
    return same + 0.4 * torch.randn(same.shape)


def compiled(model: torch.nn.Module, output: Path, **options: Any) -> fc.Artifact:
    sizes = {"tokens_per_frame": FRAME, "max_seq_len": PROMPT + STEPS, "batch_size": BATCH}
    replay = fc.ReplayConfig(rotary="key", threshold=options.pop("threshold"))
    return fc.compile(model, output=output, replay=replay, **sizes, **options)


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> fc.Artifact:
    options = {"target": "cpu", "quant": "none", "rows": 1, "prefill_chunk": 4}
    return compiled(headless_llama(**WIDE), tmp_path_factory.mktemp("a"), threshold=">-4", **options)


@pytest.mark.parametrize("threshold", [-4.0, 0.0, 0.02])
@pytest.mark.parametrize("backend", ["eager", "cpu", "onnxruntime"])
def test_decisions_are_those_of_the_published_loop(artifact: fc.Artifact, backend: str, threshold: float) -> None:
    """The prompts of a pair have different lengths, and each row has positions of its own."""
    given, flow = videos(), Flow(headless_llama(**WIDE), FRAME, threshold)
    rows, prompts = [flow.row() for _ in range(BATCH)], [given[0, :PROMPT], given[1, :2]]
    wanted = decoded(flow, rows, prompts, given[:, PROMPT:])
    replays = np.array([row.replays for row in rows]).transpose(1, 2, 0)
    scores = np.array([row.scores for row in rows]).transpose(1, 2, 0)
    assert abs(scores[FRAME:] - threshold).min() > 1e-5, "rounding would decide"
    assert replays[FRAME:].all() if threshold < -1 else 0.1 < replays[FRAME:].mean() < 0.9
    with artifact.session(backend, record=True) as session:
        session.set_threshold(parse_thresholds(f">{threshold}"))
        found = [session.prefill(prompts), *(session.step(x) for x in given[:, PROMPT:].unbind(1))]
        assert (session.stats.decisions == replays).all()
        torch.testing.assert_close(torch.stack(found, 1), wanted, atol=2e-5, rtol=1e-4)


def test_an_equal_score_does_not_replay() -> None:
    above = fc.ReplayConfig(threshold=">-4").threshold
    assert isinstance(above, float)
    assert above == np.nextafter(np.float32(-4), np.float32(0)) == parse_thresholds(">-4")
    assert fc.ReplayConfig(threshold=[">0", None]).threshold == (
        float(np.nextafter(np.float32(0), np.float32(1))),
        None,
    )


@pytest.mark.thorough
def test_the_accelerator_decides_alike(tmp_path: Path) -> None:
    check_module("hls4ml")
    artifact = compiled(
        llama(**WIDE, head_dim=32), tmp_path / "a", threshold=0.0, target="zcu102", quant="w8a8", offload="all"
    )
    ids = np.random.default_rng(3).integers(0, 3, (STEPS, BATCH, 1))

    def run(backend: str, thresholds: np.ndarray) -> dict[str, np.ndarray]:
        stepper = artifact.session(backend)._run.stepper
        found = [stepper.decode(token, t, t, thresholds) for t, token in enumerate(ids)]
        return {name: np.stack([getattr(r, name) for r in found]) for name in ("logits", "decisions", "scores")}

    closed = run("cpu", np.full(2, np.inf, np.float32))
    thresholds = thresholds_between(closed["scores"][FRAME:])
    wanted = run("eager", thresholds)
    assert 0.1 < wanted["decisions"][FRAME:].mean() < 0.9
    for backend in ("cpu", "hls-csim"):
        for name, value in run(backend, thresholds).items():
            np.testing.assert_array_equal(value, wanted[name], err_msg=f"{backend}: {name}")


def test_a_decoder_without_rotary_embeddings_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CompileError, match="rotary='key' needs rotary embeddings"):
        compiled(PlainDecoder(PROMPT + STEPS, BATCH), tmp_path / "a", target="cpu", threshold=0.0)
    with pytest.raises(CompileError, match="compares no query with a key"):
        fc.ReplayConfig(gate="input_delta", rotary="key")
