"""The shipped decoders with offload="all" in C simulation, against eager PyTorch: logits, decisions, scores, states.

pytest does not collect this file by itself, as it takes minutes: `pytest tests/step/shipped_decoders.py -s`.
"""

import itertools
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

import fastcar_compile as fc
from fastcar_compile.runtime.backends.accelerator.step import StepStepper
from fastcar_compile.runtime.backends.eager import EagerStepper

EXAMPLES = Path(__file__).parents[2] / "examples"
WORLD = EXAMPLES / "doom" / "world"
AFTER_THE_FIRST_FRAME = 24
GATES = {"moving_shapes": ("learned", "tas"), "bouncing_digits": ("learned", "tas"), "doom": ("input_delta",)}
CASES = [
    (name, gate, quant, batch)
    for name, gates in GATES.items()
    for gate, quant, batch in itertools.product(gates, ("w8a8", "w4a8"), (1, 4))
]
DELTAS = (0.728, 0.835, 0.81, 0.916, 0.915)
"""Thresholds of the game decoder at which some rows of every layer replay."""


def compiled(name: str, gate: str, quant: str, batch: int, output: Path) -> fc.Artifact:
    """A decoder as its example ships it; the game's with one world's video per row."""
    if name == "doom":
        replay, folder = fc.ReplayConfig(gate=gate, threshold=DELTAS), WORLD / "decoder"
    else:
        trained = fc.TrainedGate.load(EXAMPLES / name / "tuned" / "gates" / f"{gate}.safetensors")
        replay, folder = trained.replay_config(), EXAMPLES / name / "tuned" / "model"
    options = {"quant": quant, "batch_size": batch, "replay": replay, "offload": "all"}
    return fc.compile(folder, "zcu102", output=output, **options)


def tokens(name: str, artifact: fc.Artifact, count: int) -> np.ndarray:
    """Ids int64 [B, count]: two frames of starts of the game; elsewhere drawn."""
    batch = artifact.config.batch_size
    if name == "doom":
        starts = load_file(WORLD / "starts.safetensors")["tokens"].astype(np.int64)
        return starts[:batch].reshape(batch, -1)[:, :count]
    return np.random.default_rng(0).integers(0, artifact.config.vocab_size or 0, (batch, count))


@pytest.mark.parametrize(("name", "gate", "quant", "batch"), CASES)
def test_all_are_equal(name: str, gate: str, quant: str, batch: int, tmp_path: Path) -> None:
    artifact = compiled(name, gate, quant, batch, tmp_path / "artifact")
    config = artifact.config
    ids = tokens(name, artifact, config.tokens_per_frame + AFTER_THE_FIRST_FRAME)
    own, eager = (artifact.session(backend)._run.stepper for backend in ("hls-csim", "eager"))
    assert isinstance(own, StepStepper)
    assert isinstance(eager, EagerStepper)
    thresholds = np.array(artifact.manifest.layers.thresholds, np.float32)
    replayed = list[np.ndarray]()
    for t in range(ids.shape[1]):
        got, want = (stepper.decode(ids[:, t : t + 1], t, t, thresholds) for stepper in (own, eager))
        for part in ("logits", "decisions", "scores"):
            np.testing.assert_array_equal(getattr(got, part), getattr(want, part), err_msg=f"{part} of token {t}")
        replayed.append(want.decisions)
    for state in eager.states():
        kept = [stepper.read(state.name, slice(None)) for stepper in (own, eager)]
        np.testing.assert_array_equal(*kept, err_msg=state.name)
    share = np.mean(replayed[config.tokens_per_frame :])
    assert share > 0
    print(f"\n{name} {gate} {quant} batch {batch}: equal; replayed after the first frame {share:.1%}")
