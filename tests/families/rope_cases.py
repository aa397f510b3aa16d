"""Kinds of RoPE. Two of them choose their frequencies by the length of the sequence, which is compiled: LENGTH."""

from typing import Any

from .case import LENGTH, Case, Transformer, causal

ORIGINAL = LENGTH // 2
"""The length that a model was trained for, where the compiled one is beyond it."""
_LLAMA3 = {"factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": ORIGINAL}


def _llama(kind: str, length: int = LENGTH, **parameters: Any) -> Transformer:
    rope = {"rope_type": kind, "rope_theta": 100.0, **parameters}
    return causal("Llama", rope_parameters=rope, max_position_embeddings=length)


def _longrope(original: int) -> Transformer:
    rope = {
        "rope_type": "longrope", "rope_theta": 100.0, "short_factor": [1.0, 1.1, 1.2, 1.3],
        "long_factor": [1.5, 2.0, 2.5, 3.0], "factor": 2.0, "original_max_position_embeddings": original,
    }  # fmt: skip
    lengths = {"original_max_position_embeddings": original, "max_position_embeddings": 2 * original}
    return causal("Phi3", rope_parameters=rope, **lengths)


ROPE = [
    Case("llama-linear-rope", "Llama", "linear RoPE", _llama("linear", factor=2.0)),
    Case("llama-llama3-rope", "Llama", "llama3 RoPE", _llama("llama3", **_LLAMA3)),
    Case(
        "llama-yarn-rope", "Llama", "yarn RoPE", _llama("yarn", factor=2.0, original_max_position_embeddings=ORIGINAL)
    ),
    Case(
        "llama-dynamic-rope",
        "Llama",
        "dynamic RoPE, beyond the original length",
        _llama("dynamic", length=ORIGINAL, factor=2.0),
        warned="dynamic RoPE has the frequencies of",
    ),
    Case(
        "phi3-longrope",
        "Phi-3",
        "longrope, long factors: beyond the original length",
        _longrope(ORIGINAL),
        warned="longrope RoPE has the frequencies of",
    ),
    Case("phi3-longrope-short", "Phi-3", "longrope, short factors: within the original length", _longrope(LENGTH)),
]
