"""The doom example: the file of its world."""

import math
import tomllib
from pathlib import Path

from conftest import check_module, imported

EXAMPLES = Path(__file__).parents[1] / "examples"


def test_world_toml_names_every_token_and_button() -> None:
    check_module("vector_quantize_pytorch")
    with imported([EXAMPLES / "doom", EXAMPLES], ("world_format", "export")) as example:
        world, format_ = tomllib.loads(example.export.world_toml().text()), example.world_format
    assert math.prod(format_.LEVELS) == world["image"]["count"] == format_.CODES
    assert math.prod(world["image"]["grid"]) + 1 == world["tokens_per_frame"]
    tokens = [action["token"] for action in world["actions"]]
    assert tokens == list(range(format_.CODES, format_.CODES + len(tokens)))
    assert tokens[-1] < format_.VOCAB_SIZE
    used = [button for action in world["actions"] for button in action["buttons"]]
    assert set(used) == set(world["buttons"])
    keys = [key for pressed in world["buttons"].values() for key in pressed]
    assert len(keys) == len(set(keys))
