"""benchmarks/speed/widened.py: the game decoder, widened, is the same function."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from transformers import AutoModelForCausalLM

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))

from speed.widened import GAME, widened  # noqa: E402

WIDENINGS = {(2, 1): (512, 1536, 8, 2), (4, 2): (1024, 3072, 16, 4)}
"""Copies of the stream, and of neurons -> hidden size, neurons, heads, heads of keys and values."""


@pytest.mark.thorough
@pytest.mark.parametrize(("repeat", "neurons"), WIDENINGS)
def test_a_widened_decoder_has_the_logits_of_its_own(repeat: int, neurons: int, tmp_path: Path) -> None:
    """Over three frames of recorded play, in float64; heads keep their share of keys and values."""
    tokens = load_file(GAME.parent / "starts.safetensors")["tokens"][0].reshape(1, -1)[:, :195]
    folders = (GAME, widened(tmp_path, repeat=repeat, neurons=neurons))
    models = [AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval() for folder in folders]
    with torch.no_grad():
        narrow, wide = (model(torch.from_numpy(tokens.astype(np.int64))).logits for model in models)
    sizes = models[1].config
    assert (sizes.hidden_size, sizes.intermediate_size, sizes.num_attention_heads, sizes.num_key_value_heads) == (
        WIDENINGS[repeat, neurons]
    )
    torch.testing.assert_close(wide, narrow, rtol=0, atol=2e-5)
