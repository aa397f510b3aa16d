"""Gates on an accelerator: its controller decides, and equals cpu."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from agreement import thresholds_between
from board.conftest import FRAME, learned_artifact  # noqa: F401, a fixture

import fastcar_compile as fc
from fastcar_compile.cli.estimate import of_artifact
from fastcar_compile.codegen.hls.model import estimate
from fastcar_compile.gates.weights import weight_bytes
from fastcar_compile.runtime.backends.accelerator.step import AcceleratorStepper
from fastcar_compile.runtime.backends.cpu import CpuStepper
from fastcar_compile.runtime.backends.eager import EagerStepper

from .networks import networks

LAYERS, STEPS = 1, 24


def tokens() -> np.ndarray:
    """int64 [T, B, 1]; few symbols, so that places repeat between frames."""
    return np.random.default_rng(3).integers(0, 3, (STEPS, 2, 1))


@pytest.fixture
def artifact(request: pytest.FixtureRequest) -> fc.Artifact:
    """With gate learned; the board's tests decode with it too."""
    return request.getfixturevalue("learned_artifact")


def decoded(session: fc.Session, thresholds: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    session.reset()
    session.set_threshold(thresholds.tolist())
    logits = [session.step(torch.from_numpy(ids[:, 0])).numpy() for ids in tokens()]
    return np.stack(logits), session.stats.decisions


def test_weights_of_the_gate_are_shown(artifact: fc.Artifact) -> None:
    text = artifact.explain(layer=0)
    assert "gate learned: a trained network, w2 . relu(w1 @ [x ; |x - x_cached|] + b1) + b2" in text
    assert "positions back" not in text, "it compares no query with an earlier key"
    assert "weights  of the gate, 5 units: gate_w1_0, gate_b1_0, gate_w2_0, gate_b2_0, 1.3 kB" in text
    assert "gate_cache_0: float32 [8, 2, 64], 4.1 kB, gate_cache" in text
    assert artifact.params["gate_w1_0"].dtype == torch.bfloat16
    replay = artifact.manifest.options.replay
    assert replay is not None
    assert replay.gate_weights == networks(64, 5)


def test_bytes_of_the_gate_in_report_and_estimate(artifact: fc.Artifact) -> None:
    cache = 4 * LAYERS * FRAME * 2 * 64
    report = json.loads((artifact.path / "report.json").read_text())["gate"]
    own = sum(t.nbytes for name, t in artifact.params.items() if name.startswith("gate_"))
    assert (report["cache_bytes"], report["weight_bytes"], report["units"]) == (cache, own, [5])
    work, board, *_ = of_artifact(artifact.path, None)
    predicted = estimate(replace(work, replay=0.5), board)
    assert predicted.memory["gate_cache"] == cache
    gate = {"name": "learned", "decided_on": "accelerator", "units": 5, "cache_bytes": cache}
    assert predicted.gate == gate | {"weight_bytes": LAYERS * weight_bytes(5, 64)}


def middle(backend: EagerStepper) -> np.ndarray:
    """Thresholds between the scores of the dense decoder."""
    backend.reset()
    closed = np.full(LAYERS, -np.inf, np.float32)
    scores = np.stack([backend.decode(ids, t, t, closed).scores for t, ids in enumerate(tokens())])
    return thresholds_between(scores[FRAME:])


def test_the_fabric_decides_as_cpu(artifact: fc.Artifact) -> None:
    """Logits, decisions and every state, bit for bit; the engine gets no mask of the host's. Other backends round."""
    section = artifact.manifest.accelerator
    assert section is not None
    assert section.controller.gated_layers == (0,)
    thresholds = middle(EagerStepper(replace(artifact.program, prefill=None)))
    cpu, simulated = (artifact.session(backend, record=True, threads=1) for backend in ("cpu", "hls-csim"))
    logits, decisions = decoded(cpu, thresholds)
    found, same = decoded(simulated, thresholds)
    assert isinstance(simulated._run.stepper, AcceleratorStepper)
    assert all(simulated._run.stepper._gate._live.decides(layer) for layer in range(LAYERS))
    np.testing.assert_array_equal(same, decisions)
    np.testing.assert_array_equal(found, logits)
    for backend in ("eager", "onnxruntime"):
        near, same = decoded(artifact.session(backend, record=True, threads=1), thresholds)
        np.testing.assert_array_equal(same, decisions, err_msg=backend)
        np.testing.assert_allclose(near, logits, atol=1e-2, err_msg=backend)
    assert isinstance(cpu._run.stepper, CpuStepper)
    states = [stepper._state.arrays for stepper in (cpu._run.stepper, simulated._run.stepper)]
    assert states[0].keys() == states[1].keys()
    for name, value in states[0].items():
        np.testing.assert_array_equal(states[1][name], value, err_msg=name)
    assert len({tuple(row) for step in decisions for row in step.tolist()}) > 2, "rows decide on their own"
