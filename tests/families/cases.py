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
