"""What decoder, pictures and player agree on: a token per tile, the actions, and the keys that hold them."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from crafter import constants as game_constants
from crafter import engine

constants: Any = game_constants  # their names come from a file

COLUMNS, MAP_ROWS, ITEM_ROWS = 9, 7, 2
ROWS = MAP_ROWS + ITEM_ROWS
TILE = 16
"""Pixels per side of a tile, as the game's own pictures have."""

WALKABLE = ("grass", "sand", "path")
FACINGS = ("left", "right", "up", "down")
MOST = 9
"""Of an item."""


@dataclass(frozen=True)
class Tile:
    """A tile of the map. material: None outside of the world. above: the picture of what stands on it."""

    material: str | None
    above: str | None = None


MAP = (
    Tile(None),
    *(Tile(material) for material in constants.materials),
    *(Tile(material, f"player-{facing}") for material in (*WALKABLE, "lava") for facing in FACINGS),
    *(Tile(material, animal) for material in WALKABLE for animal in ("zombie", "skeleton", "cow")),
    *(Tile(material, f"arrow-{facing}") for material in (*WALKABLE, "water", "lava") for facing in FACINGS),
    *(Tile("grass", plant) for plant in ("plant", "plant-ripe")),
)
MAP_CODES = {tile: code for code, tile in enumerate(MAP)}

ITEMS = tuple(constants.items)
EMPTY = len(MAP)
"""A place of the inventory without an item. EMPTY + 1 + 9 i + (n - 1): n of item i."""

CODES = EMPTY + 1 + MOST * len(ITEMS)
FIRST_ACTION = CODES
IMAGE_TOKENS = ROWS * COLUMNS
TOKENS_PER_FRAME = 1 + IMAGE_TOKENS
CONTEXT_FRAMES = 6
"""Frames that the decoder sees. With 16 its loss on held-out play is the same, and attention reads more keys."""

VOCAB_SIZE = 256
"""Tiles, actions behind them, and a rest that is never used."""

FRAMES_PER_SECOND = 8.0


@dataclass(frozen=True)
class Action:
    """An action of the game and the keys, as KeyboardEvent.code, of the button that takes it."""

    name: str
    keys: tuple[str, ...]


ACTIONS = (
    Action("noop", ()),
    Action("move_left", ("ArrowLeft", "KeyA")),
    Action("move_right", ("ArrowRight", "KeyD")),
    Action("move_up", ("ArrowUp", "KeyW")),
    Action("move_down", ("ArrowDown", "KeyS")),
    Action("do", ("Space",)),
    Action("place_stone", ("KeyR",)),
    Action("place_table", ("KeyT",)),
    Action("place_furnace", ("KeyF",)),
    Action("place_plant", ("KeyG",)),
    Action("make_wood_pickaxe", ("Digit1",)),
    Action("make_stone_pickaxe", ("Digit2",)),
    Action("make_iron_pickaxe", ("Digit3",)),
    Action("make_wood_sword", ("Digit4",)),
    Action("make_stone_sword", ("Digit5",)),
    Action("make_iron_sword", ("Digit6",)),
)
"""All of the game's but `sleep`: the screen is dark then."""

NAMES = tuple(action.name for action in ACTIONS)


def item_code(item: int, amount: int) -> int:
    """Return the code of `amount` of the item with that number."""
    return EMPTY + 1 + MOST * item + amount - 1 if amount else EMPTY


def tile_pictures() -> np.ndarray:
    """Return uint8 [CODES, 16, 16, 3]: the picture of every code, drawn as the game draws it, in daylight."""
    textures = engine.Textures(constants.root / "assets")
    unit = np.array((TILE, TILE))
    pictures = np.zeros((CODES, TILE, TILE, 3), np.uint8)  # the game's canvases begin with x
    for code, tile in enumerate(MAP):
        pictures[code] = 127
        if tile.material:
            engine._draw(pictures[code], (0, 0), textures.get(tile.material, unit))
        if tile.above:
            engine._draw_alpha(pictures[code], (0, 0), textures.get(tile.above, unit))
    for number, name in enumerate(ITEMS):
        for amount in range(1, MOST + 1):
            pictures[item_code(number, amount)] = engine.ItemView(textures, (1, 1))({name: amount}, unit)
    return pictures.transpose(0, 2, 1, 3)


def render(codes: np.ndarray, pictures: np.ndarray) -> np.ndarray:
    """Return frames uint8 [T, 144, 144, 3] of codes [T, 81]."""
    tiles = pictures[codes.reshape(-1, ROWS, COLUMNS)]
    return tiles.transpose(0, 1, 3, 2, 4, 5).reshape(len(tiles), ROWS * TILE, COLUMNS * TILE, 3)
