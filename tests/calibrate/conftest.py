"""What the tests of both trainings begin with."""

from collections.abc import Iterator

import pytest
import torch
from drawn_videos import sharp_decoder
from transformers import LlamaForCausalLM


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
