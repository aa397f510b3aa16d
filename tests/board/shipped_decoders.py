"""The shipped decoders over a frame and more, on cpu, hls-csim and the C++ host with the stand-in for XRT.

pytest does not collect this file by itself, as it takes an hour: `pytest tests/board/shipped_decoders.py`.
"""

import itertools
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

import fastcar_compile as fc
from board.conftest import Machine
from board.test_board_program import Fake, build
from fastcar_compile.runtime.backends.cpu import CpuStepper

EXAMPLES = Path(__file__).parents[2] / "examples"
AFTER_THE_FIRST_FRAME = 24
CASES = [
    (name, quant, batch, offload)
    for name, quant, batch in itertools.product(("moving_shapes", "bouncing_digits"), ("w8a8", "w4a8"), (1, 4, 32))
    for offload in (("mlp", "linears") if batch == 1 else ("linears",))
]


@dataclass(frozen=True)
class Decoded:
    """What one backend gives: tokens [B, N], logits [N, B, V], decisions [N - 1, L, B] and the states by name."""

    tokens: NDArray[np.int64]
    logits: NDArray[np.float32]
    decisions: NDArray[np.bool_]
    states: dict[str, NDArray[np.generic]]


def decode(artifact: fc.Artifact, backend: str, prompt: NDArray[np.int64], count: int) -> Decoded:
    """Greedily."""
    session = artifact.session(backend, record=True)
    logits: list[NDArray[np.float32]] = []

    def sample(row: NDArray[np.float32]) -> NDArray[np.int64]:
        logits.append(row.copy())
        return row.argmax(-1)

    tokens = session.generate(prompt, count, sample)
    assert isinstance(session._run.stepper, CpuStepper)
    states = {name: array.copy() for name, array in session._run.stepper._state.arrays.items()}
    return Decoded(tokens, np.stack(logits), np.asarray(session.stats.decisions), states)


@pytest.mark.parametrize(("name", "quant", "batch", "offload"), CASES)
def test_all_are_equal(
    name: str, quant: str, batch: int, offload: str, native: Machine, fake_library: Fake, tmp_path: Path
) -> None:
    folder = EXAMPLES / name / "tuned"
    gate = fc.TrainedGate.load(folder / "gates" / "learned.safetensors")
    options = {"quant": quant, "batch_size": batch, "offload": offload, "replay": gate.replay_config()}
    artifact = fc.compile(folder / "model", "zcu102", output=tmp_path / "artifact", **options)
    count = artifact.config.tokens_per_frame + AFTER_THE_FIRST_FRAME
    prompt = np.random.default_rng(0).integers(0, artifact.config.vocab_size or 0, (batch, 1))
    expected, found = (decode(artifact, backend, prompt, count) for backend in ("cpu", "hls-csim"))
    np.testing.assert_array_equal(found.logits, expected.logits)
    np.testing.assert_array_equal(found.decisions, expected.decisions)
    assert expected.states
    for state, value in expected.states.items():
        np.testing.assert_array_equal(found.states[state], value, err_msg=state)
    replayed = expected.decisions[artifact.config.tokens_per_frame :].mean()
    assert replayed > 0
    built = build(artifact, native, fake_library, tmp_path / "host")
    assert built.decoded(prompt.tolist(), count, seconds=3600)[0] == expected.tokens.tolist()
    print(f"\n{name} {quant} batch {batch} {offload}: equal; replayed after the first frame {replayed:.1%}")
