"""Write the world: decoder, the tiles' pictures as ONNX, starting contexts, and world.toml."""

import argparse
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))  # code that the examples share

import numpy as np
import torch
from common.world_files import WorldToml, write_world
from common.worlds import Play, load_decoder
from recording import load_play
from tiles import (
    ACTIONS,
    CODES,
    COLUMNS,
    CONTEXT_FRAMES,
    FRAMES_PER_SECOND,
    ITEMS,
    MAP,
    MAP_ROWS,
    ROWS,
    TILE,
    item_code,
    tile_pictures,
)
from torch import Tensor, nn

BUTTONS = {
    "move_left": "left", "move_right": "right", "move_up": "forward", "move_down": "back", "do": "use",
    "place_plant": "sapling",
}  # fmt: skip
"""The page has places for these names. Another button is named as what its action places or makes."""

STARTS = {
    "lake and meadow": ("water", "sand", "grass", "tree", "cow"),
    "forest": ("tree", "grass", "cow"),
    "cave with ores": ("path", "stone", "coal", "iron"),
    "diamonds and lava": ("diamond", "lava", "path", "stone"),
    "workshop": ("table", "furnace", "tree", "stone", "grass"),
    "zombies": ("zombie", "grass", "tree", "water"),
}
"""Name -> what has to be in sight, evenly."""


class TilesToFrames(nn.Module):
    """Image codes int64 [N, 9, 9] to frames uint8 [N, 144, 144, 3]: every code has a picture."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("pictures", torch.from_numpy(tile_pictures().copy()))

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the frames."""
        tiles = self.get_buffer("pictures")[tokens].permute(0, 1, 3, 2, 4, 5)
        return tiles.reshape(-1, ROWS * TILE, COLUMNS * TILE, 3)


def starting_contexts(play: Play) -> dict[str, np.ndarray]:
    """Return a context int64 [16, 82] for each of STARTS: where its things are in sight, and the player is well."""
    firsts = play.sequences(CONTEXT_FRAMES)
    last = play.tokens[firsts + CONTEXT_FRAMES - 1, 1:]
    ground, items = last[:, : MAP_ROWS * COLUMNS], last[:, MAP_ROWS * COLUMNS :]
    well = np.all([items[:, i] >= item_code(i, 5) for i in range(len(ITEMS[:4]))], 0)
    found = {}
    for name, things in STARTS.items():
        counts = []
        for thing in things:
            codes = [code for code, tile in enumerate(MAP) if thing in (tile.above or tile.material,)]
            counts.append(np.isin(ground, codes).sum(1))
        evenness = np.sum(np.log1p(np.minimum(counts, 8)), 0) * well * np.all(np.array(counts) > 0, 0)
        found[name] = play.take(firsts[[evenness.argmax()]], CONTEXT_FRAMES)[0].reshape(CONTEXT_FRAMES, -1)
    return found


def world_toml() -> WorldToml:
    """Return the content of world.toml."""
    actions = [(action.name, BUTTONS.get(action.name, action.name.partition("_")[2])) for action in ACTIONS]
    return WorldToml(
        name="Crafter",
        codes=CODES,
        grid=(ROWS, COLUMNS),
        size=(ROWS * TILE, COLUMNS * TILE),
        aspect=(1, 1),
        context_frames=CONTEXT_FRAMES,
        frames_per_second=FRAMES_PER_SECOND,
        top_k=0,
        buttons={button: action.keys for action, (_, button) in zip(ACTIONS, actions, strict=True) if action.keys},
        actions=[(name, (button,) if name != "noop" else ()) for name, button in actions],
    )


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--decoder", type=Path, required=True, help="folder that train.py wrote")
    parser.add_argument("--data", type=Path, default=Path("build/crafter/data"))
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "world")
    options = parser.parse_args()
    starts = starting_contexts(load_play(options.data, "held_out"))
    write_world(options.out, world_toml(), load_decoder(options.decoder), TilesToFrames(), starts)


if __name__ == "__main__":
    main()
