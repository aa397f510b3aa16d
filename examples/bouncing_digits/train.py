"""Train the bouncing-digits decoder on the CPU."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))  # code that the examples share

import numpy as np
from common.training import Phase, Recipe, World, train_command
from transformers import Qwen3Config, Qwen3ForCausalLM
from video import FRAMES, SEPARATOR, TOKENS_PER_FRAME, TOKENS_PER_VIDEO, VOCAB_SIZE, make_videos, tokenize, with_bos

PHASES = (Phase(4, 8, 500), Phase(FRAMES, 4, 100))
"""Short videos teach motion, and their attention is cheap. The last phase has the whole length."""


def make_tokens(count: int, seed: int, frames: int) -> np.ndarray:
    """Return videos int64 [count, 1 + frames * 101]."""
    return with_bos(tokenize(make_videos(count, seed, frames)))


WORLD = World(make_tokens, TOKENS_PER_FRAME, FRAMES)


def build_model() -> Qwen3ForCausalLM:
    """Return the decoder: hidden 128, intermediate 384, 3 layers, 8 query heads on 2 key/value heads, QK-norm, GELU."""
    config = Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=32,
        hidden_act="gelu",
        max_position_embeddings=TOKENS_PER_VIDEO + 1,
        rope_parameters={"rope_type": "default", "rope_theta": 1000.0},
        bos_token_id=SEPARATOR,
        eos_token_id=None,
        pad_token_id=None,
        tie_word_embeddings=False,
        attn_implementation="sdpa",  # pyright: ignore[reportCallIssue]
        dtype="float32",
    )
    config.tokens_per_frame = TOKENS_PER_FRAME
    return Qwen3ForCausalLM(config)


if __name__ == "__main__":
    train_command(__doc__, Path(__file__).parent, Recipe(build_model, WORLD, PHASES, rate=1.2e-2))
