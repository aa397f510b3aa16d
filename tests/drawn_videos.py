"""A small decoder that is sure of what it predicts, and videos that were drawn from it."""

from typing import Any

import numpy as np
import torch
from decoders import llama
from transformers import LlamaForCausalLM

FRAME, FRAMES, LAYERS, SYMBOLS = 8, 4, 2, 7
LENGTH = FRAME * FRAMES


def sharp_decoder(**changes: Any) -> LlamaForCausalLM:
    """Sharp enough that a wrong MLP output costs likelihood; symbols stay much the same from frame to frame."""
    model = llama(vocab_size=SYMBOLS, max_position_embeddings=LENGTH + 1, **changes)
    model.lm_head.weight.data *= 20
    for name, weight in model.named_parameters():
        if name.endswith("mlp.down_proj.weight"):
            weight.data *= 8
    model.config.tokens_per_frame = FRAME
    return model.requires_grad_(False)


def videos(model: LlamaForCausalLM, count: int, seed: int) -> np.ndarray:
    """A first frame by chance, then drawn from the decoder itself, so that its likelihood is as good as it gets."""
    random = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, SYMBOLS, (count, 1 + FRAME), generator=random)
    with torch.inference_mode():
        for _ in range(LENGTH - FRAME):
            logits = model(tokens, use_cache=False).logits[:, -1]
            tokens = torch.cat([tokens, torch.multinomial(logits.softmax(-1), 1, generator=random)], 1)
    return tokens.numpy()
