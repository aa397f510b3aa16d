"""Train the moving-shapes decoder on the CPU."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))  # code that the examples share

import numpy as np
from common.training import Phase, Recipe, World, train_command
from transformers import LlamaConfig, LlamaForCausalLM
from video import BOS, FRAMES, TOKENS_PER_FRAME, TOKENS_PER_VIDEO, VOCAB_SIZE, make_videos, tokenize, with_bos

PHASES = (Phase(4, 8, 1800), Phase(FRAMES, 4, 400))
"""Short videos teach motion, and their attention is cheap. The last phase has the whole length."""


def make_tokens(count: int, seed: int, frames: int) -> np.ndarray:
    """Return videos int64 [count, 1 + frames * 256]."""
    return with_bos(tokenize(make_videos(count, seed, frames)))


WORLD = World(make_tokens, TOKENS_PER_FRAME, FRAMES)


def build_model() -> LlamaForCausalLM:
    """Return the decoder: hidden 128, intermediate 352, 4 layers, 4 heads."""
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        intermediate_size=352,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=TOKENS_PER_VIDEO + 1,
        bos_token_id=BOS,
        eos_token_id=None,
        pad_token_id=None,
        tie_word_embeddings=False,
        attn_implementation="sdpa",  # pyright: ignore[reportCallIssue]
        dtype="float32",
    )
    config.tokens_per_frame = TOKENS_PER_FRAME
    return LlamaForCausalLM(config)


if __name__ == "__main__":
    train_command(__doc__, Path(__file__).parent, Recipe(build_model, WORLD, PHASES, rate=1.5e-2))
