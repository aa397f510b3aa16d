"""How a session cuts a prompt: chunks, a padded rest, single tokens where few are left. Calls that it refuses."""

from typing import Any

import numpy as np
import pytest
from manifests import decoder_config

from fastcar_compile.config import CompileConfig
from fastcar_compile.errors import InputError
from fastcar_compile.runtime.backends import Stepper, StepResult
from fastcar_compile.runtime.session import Session

VOCABULARY = 17


class NotedStepper(Stepper):
    """Notes the calls of `prefill`. The logits of a token, in a step too, say which one it is."""

    prefill_chunk, single_tokens = 32, 2

    def __init__(self) -> None:
        self.calls: list[tuple[int, int]] = []

    def reset(self) -> None:
        pass

    def prefill(self, inputs: Any, position: int) -> Any:
        self.calls.append((position, inputs.shape[1]))
        return np.eye(VOCABULARY, dtype=np.float32)[inputs]

    def decode(self, inputs: Any, position: Any, step: Any, thresholds: Any) -> StepResult:
        return StepResult.of({"logits": np.eye(VOCABULARY, dtype=np.float32)[inputs]}, len(thresholds))


def opened(stepper: NotedStepper | None = None) -> Session:
    """Two rows of at most 64 tokens."""
    config = decoder_config(max_seq_len=64, prefill_chunk=32)
    return Session(stepper or NotedStepper(), config, [None] * config.num_layers)


@pytest.mark.parametrize(
    ("length", "calls"),
    [
        (1, [(0, 1)]),
        (2, [(0, 1), (1, 1)]),
        (3, [(0, 32)]),
        (32, [(0, 32)]),
        (34, [(0, 32), (32, 1), (33, 1)]),
        (35, [(0, 32), (32, 32)]),
    ],
)
def test_few_tokens_are_read_one_by_one(length: int, calls: list[tuple[int, int]]) -> None:
    stepper = NotedStepper()
    session = opened(stepper)
    tokens = np.arange(1, length + 1) % VOCABULARY
    logits = session.prefill(np.stack([tokens] * 2))
    assert stepper.calls == calls
    assert logits.argmax(-1).tolist() == [tokens[-1]] * 2
    assert session.position == length


def test_prompts_of_their_own_lengths_need_rows() -> None:
    tokens = np.arange(8) % VOCABULARY
    assert opened().prefill([tokens, tokens + 1]).shape == (2, VOCABULARY)
    with pytest.raises(InputError, match="all rows of this decoder share one position"):
        opened().prefill([tokens, tokens[:3]])
    with pytest.raises(InputError, match="there are 3 prompts"):
        opened().generate([tokens] * 3, 2)


@pytest.mark.parametrize(
    ("frame", "chunk"), [(1, 64), (64, 64), (100, 100), (256, 256), (257, 129), (576, 192), (1024, 256)]
)
def test_frames_need_no_padding_by_default(frame: int, chunk: int) -> None:
    assert CompileConfig(target="cpu", tokens_per_frame=frame, max_seq_len=4096).chunk == chunk
    assert CompileConfig(target="cpu", tokens_per_frame=frame, max_seq_len=4096, prefill_chunk=7).chunk == 7


@pytest.mark.parametrize(
    ("call", "ids", "text"),
    [
        ("prefill", np.zeros((2, 4), np.float32), "tokens are float32, expected int64"),
        ("prefill", np.zeros((3, 4), np.int64), r"shape \[3, 4\], expected \[2, P\]"),
        ("prefill", np.zeros((2, 70), np.int64), "70 tokens, but max_seq_len is 64"),
        ("prefill", np.broadcast_to(np.int64(17), (2, 10**6)), "1000000 tokens, but max_seq_len"),  # no id is read
        ("prefill", np.full((2, 4), VOCABULARY), "token 17 is outside the vocabulary of 17"),
        ("step", np.zeros(2, np.int32), "tokens are int32, expected int64"),
        ("step", np.zeros((2, 1), np.int64), r"shape \[2, 1\], expected \[2\]"),
        ("step", np.array([3, -1]), "token -1 is outside the vocabulary of 17"),
        ("set_threshold", [1.0], "1 threshold for 3 layers"),
        ("set_threshold", float("nan"), "is NaN"),
    ],
)
def test_a_refused_call_changes_nothing(call: str, ids: Any, text: str) -> None:
    session = opened()
    if call == "step":
        session.prefill(np.zeros((2, 4), np.int64))
    before = session.position, session.thresholds.tolist()
    with pytest.raises(InputError, match=text):
        getattr(session, call)(ids)
    assert (session.position, session.thresholds.tolist()) == before


def test_a_step_beyond_the_cache_is_refused() -> None:
    session = opened()
    session.prefill(np.zeros((2, 64), np.int64))
    with pytest.raises(InputError, match="after 64 tokens the step adds 1 token, but max_seq_len is 64"):
        session.step(np.zeros(2, np.int64))
