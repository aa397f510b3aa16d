"""A decoder whose weights come from memory, with random weights."""

from typing import Any


def wide() -> Any:
    """Return a Llama of 8 layers of 2048 x 5504."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 2048, "intermediate_size": 5504, "num_hidden_layers": 8}
    config = LlamaConfig(vocab_size=1024, max_position_embeddings=256, num_attention_heads=16, **sizes)
    return LlamaForCausalLM(config).eval()
