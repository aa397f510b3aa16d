"""The list: what docs/reference/models.md says, and what the tests check."""

from .case import Case
from .cosmos import COSMOS
from .cosmos_video2world import COSMOS_VIDEO2WORLD
from .llamagen import LLAMAGEN
from .mineworld import MINEWORLD
from .plain import PLAIN
from .rope_cases import ROPE
from .structure_cases import STRUCTURES
from .transformers_cases import TRANSFORMERS

CASES: list[Case] = [*TRANSFORMERS, *ROPE, *STRUCTURES, *LLAMAGEN, *MINEWORLD, *COSMOS, *COSMOS_VIDEO2WORLD, *PLAIN]

BRANCHES = (
    "phi3-longrope", "falcon-new", "cohere", "gemma3-window-int8", "chameleon", "gpt-neox-parallel", "llamagen-t2i",
    "mistral-window", "cosmos-video2world-unmasked", "biogpt",
)  # fmt: skip
"""With the full ones they take every branch of `frontend` and `passes` that any case takes (coverage.py by test, a
trial of 2026-11-28). Llama is compiled by most other tests."""
