"""What the tests of both trainings begin with."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from drawn_videos import sharp_decoder
from transformers import LlamaForCausalLM


def interrupted_and_resumed(train: Callable[..., Any], checkpoint: Path) -> Any:
    """What a training of 13 steps gives that was interrupted after step 12, with the state after step 11 saved."""
    lines: list[str] = []

    def stop(line: str) -> None:
        lines.append(line)
        if len(lines) == 12:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(steps=13, checkpoint=checkpoint, progress=stop)
    further: list[str] = []
    resumed = train(steps=13, checkpoint=checkpoint, progress=further.append)
    assert len(further) == 2
    return resumed


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Tensors are too small to share."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def decoder(one_thread: None) -> LlamaForCausalLM:
    return sharp_decoder()
