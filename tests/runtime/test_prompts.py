"""How a session cuts a prompt: chunks, a padded rest, and single tokens where few are left."""

from typing import Any

import numpy as np
import pytest
from manifests import decoder_config

from fastcar_compile.config import CompileConfig
from fastcar_compile.runtime.backends import Stepper, StepResult
from fastcar_compile.runtime.session import Session

VOCABULARY = 17


class NotedStepper(Stepper):
    """Notes the calls of `prefill`. The logits of a token say which one it is."""

    prefill_chunk, single_tokens = 32, 2

    def __init__(self) -> None:
        self.calls: list[tuple[int, int]] = []

    def reset(self) -> None:
        pass

    def prefill(self, inputs: Any, position: int) -> Any:
        self.calls.append((position, inputs.shape[1]))
        return np.eye(VOCABULARY, dtype=np.float32)[inputs]

    def decode(self, inputs: Any, position: int, step: int, thresholds: Any) -> StepResult:
        raise NotImplementedError


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
    config = decoder_config(max_seq_len=64, prefill_chunk=32)
    session = Session(stepper, config, [None] * config.num_layers)
    tokens = np.arange(1, length + 1) % VOCABULARY
    logits = session.prefill(np.stack([tokens] * config.batch_size))
    assert stepper.calls == calls
    assert logits.argmax(-1).tolist() == [tokens[-1]] * config.batch_size
    assert session.position == length


@pytest.mark.parametrize(
    ("frame", "chunk"), [(1, 64), (64, 64), (100, 100), (256, 256), (257, 129), (576, 192), (1024, 256)]
)
def test_frames_need_no_padding_by_default(frame: int, chunk: int) -> None:
    assert CompileConfig(target="cpu", tokens_per_frame=frame, max_seq_len=4096).chunk == chunk
    assert CompileConfig(target="cpu", tokens_per_frame=frame, max_seq_len=4096, prefill_chunk=7).chunk == 7
