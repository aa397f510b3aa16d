"""Record Crafter that a scripted agent plays, as tokens. A shard that exists is kept.

It is always day and the player never tires: night is random noise over the picture, and sleep is a dark screen.
"""

import argparse
import sys
from collections.abc import Iterator
from multiprocessing import Pool
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))  # code that the examples share

import crafter
import numpy as np
from common.worlds import Format, Play
from safetensors.numpy import load_file, save_file
from tiles import (
    CODES,
    COLUMNS,
    CONTEXT_FRAMES,
    EMPTY,
    FIRST_ACTION,
    ITEMS,
    MAP_CODES,
    MAP_ROWS,
    MOST,
    NAMES,
    ROWS,
    TOKENS_PER_FRAME,
    Tile,
    item_code,
)

WORLD = Format(CODES, TOKENS_PER_FRAME, CONTEXT_FRAMES)

LONGEST = 600
"""Frames of the longest episode. Making a world takes as long as 2,500 frames of it."""

SEEDS = {"train": 1_000_000, "held_out": 3_000_000}
"""First seed of each split's episodes."""

EQUIPPED = 0.6
"""Share of episodes in which the player begins with tools and materials, so that all of the game is seen."""

MOVES = {(-1, 0): "move_left", (1, 0): "move_right", (0, -1): "move_up", (0, 1): "move_down"}
TARGETS = {
    "tree": 0.24, "stone": 0.16, "coal": 0.08, "iron": 0.06, "diamond": 0.06, "water": 0.12, "grass": 0.04, "cow": 0.12,
    "zombie": 0.08,
}  # fmt: skip
"""What the agent walks to, with weights."""


class Game:
    """The game without night, tiredness and pictures.

    Attributes:
        player, world: those of the game.
    """

    def __init__(self, seed: int) -> None:
        self._env: Any = crafter.Env(length=0, seed=seed, reward=False)
        self._env._update_time = self._stay_awake
        self._env._obs = lambda: None
        # The game keeps a chunk's animals in a set, whose order differs from run to run, and draws one of them.
        balance = self._env._balance_chunk
        self._env._balance_chunk = lambda chunk, animals: balance(
            chunk, sorted(animals, key=lambda one: tuple(one.pos))
        )
        self._env.reset()
        self.player, self.world = self._env._player, self._env._world

    def _stay_awake(self) -> None:
        self._env._world.daylight = 1.0
        if self._env._player:
            self._env._player._fatigue = 0

    def step(self, action: str) -> bool:
        """Play one step; return whether the player is dead."""
        self._env.step(self._env.action_names.index(action))
        return self.player.health <= 0

    def at(self, x: int, y: int) -> tuple[str | None, Any]:
        """Return the material and what stands on it, so many tiles right of the player and below."""
        return self.world[self.player.pos + np.array((x, y))]

    def codes(self) -> np.ndarray:
        """Return the frame's image codes int16 [81]."""
        codes = np.full((ROWS, COLUMNS), EMPTY, np.int16)
        for y in range(MAP_ROWS):
            for x in range(COLUMNS):
                material, above = self.at(x - COLUMNS // 2, y - MAP_ROWS // 2)
                codes[y, x] = MAP_CODES[Tile(material, above.texture if above else None)]
        items = codes[MAP_ROWS:].reshape(-1)
        for number, name in enumerate(ITEMS):
            items[number] = item_code(number, self.player.inventory[name])
        return codes.reshape(-1)


class Agent:
    """A player with a plan of some steps: to walk on, to fetch something in sight, to build, to make, or to wait."""

    def __init__(self, game: Game, rng: np.random.Generator) -> None:
        self._game, self._rng, self._plan = game, rng, iter(())

    def choose(self) -> str:
        """Return the next action."""
        if self._rng.random() < 0.03:
            return str(self._rng.choice(NAMES))
        while (action := next(self._plan, None)) is None:
            plans = (self._wander, self._fetch, self._build, self._wait)
            self._plan = plans[self._rng.choice(len(plans), p=(0.3, 0.56, 0.1, 0.04))]()
        return action

    def _wander(self) -> Iterator[str]:
        """Walk on in one direction, round what is in the way."""
        heading = np.array(list(MOVES)[self._rng.integers(4)]) * 9
        for _ in range(int(self._rng.integers(2, 16))):
            yield MOVES[self._toward(heading + self._rng.integers(-1, 2, 2))]

    def _wait(self) -> Iterator[str]:
        yield from ["noop"] * int(self._rng.integers(1, 5))

    def _build(self) -> Iterator[str]:
        """Place something, then make what the tables and furnaces in reach allow."""
        inventory = self._game.player.inventory
        if inventory["wood"] > 2 and self._rng.random() < 0.7:
            yield "place_table"
            if inventory["stone"] > 4:
                yield str(self._rng.choice([name for name in MOVES.values()]))
                yield "place_furnace"
        else:
            yield str(self._rng.choice(["place_stone", "place_stone", "place_furnace", "place_plant"]))
        for item in ("wood_pickaxe", "stone_pickaxe", "iron_pickaxe", "wood_sword", "stone_sword", "iron_sword"):
            if not inventory[item] and self._rng.random() < 0.5:
                yield f"make_{item}"

    def _kind(self) -> str:
        """Return what to fetch: water or a cow where it is needed, else something that the tools can take."""
        inventory = self._game.player.inventory
        if min(inventory["drink"], inventory["food"]) < 4 and self._rng.random() < 0.7:
            return "water" if inventory["drink"] < inventory["food"] else "cow"
        weights = dict(TARGETS)
        if not inventory["wood_pickaxe"]:
            weights |= {"stone": 0.0, "coal": 0.0}
        if inventory["wood"] > 6:
            weights["tree"] = 0.02
        return str(self._rng.choice(list(weights), p=np.array(list(weights.values())) / sum(weights.values())))

    def _fetch(self) -> Iterator[str]:
        """Walk to the nearest thing of a kind in sight and use it."""
        kind = self._kind()
        for _ in range(24):
            offset = self._nearest(kind)
            if offset is None:
                return
            step = self._toward(offset)
            if abs(offset).sum() > 1:
                yield MOVES[step]
            else:
                if self._game.player.facing != step:
                    yield MOVES[step]
                for _ in range(int(self._rng.integers(1, 7 if kind in ("cow", "zombie", "water") else 2))):
                    yield "do"
                if self._rng.random() < 0.5:
                    return

    def _nearest(self, kind: str) -> np.ndarray | None:
        found = []
        for y in range(-3, 4):
            for x in range(-4, 5):
                material, above = self._game.at(x, y)
                if (x or y) and kind in ((above.texture,) if above else (material,)):
                    found.append((abs(x) + abs(y) + 0.5 * self._rng.random(), x, y))
        return np.array(min(found)[1:]) if found else None

    def _toward(self, offset: np.ndarray) -> tuple[int, int]:
        """Return a step that comes nearer; to another side where the way is blocked."""
        first = int(self._rng.random() * abs(offset).sum() >= abs(offset[0]))
        for axis in (first, 1 - first):
            step = [0, 0]
            step[axis] = int(np.sign(offset[axis]))
            if step[axis] and (abs(offset).sum() == 1 or self._game.player.is_free(self._game.player.pos + step)):
                return step[0], step[1]
        return list(MOVES)[self._rng.integers(4)]


def episode(seed: int) -> np.ndarray:
    """Return int16 [T, 82]: the action that led to each frame, then its image codes. Same seed, same episode."""
    game, rng = Game(seed), np.random.default_rng(seed)
    agent = Agent(game, rng)
    if rng.random() < EQUIPPED:
        for item in ITEMS[4:]:
            game.player.inventory[item] = int(rng.integers(0, 2 if "_" in item else MOST + 1))
    frames = np.empty((LONGEST, TOKENS_PER_FRAME), np.int16)
    frames[0] = FIRST_ACTION, *game.codes()
    for number in range(1, LONGEST):
        action = agent.choose()
        if game.step(action):
            return frames[:number]
        frames[number] = FIRST_ACTION + NAMES.index(action), *game.codes()
    return frames


def record(split: str, folder: Path, shard: int, episodes: int, pool: Any) -> None:
    """Write a shard, unless it is there."""
    path = folder / split / f"{shard:03}.safetensors"
    if path.exists():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    first = SEEDS[split] + 10_000 * shard
    played = pool.map(episode, range(first, first + episodes))
    bounds = np.cumsum([0, *(len(frames) for frames in played)])
    scratch = path.with_suffix(".part")
    save_file({"tokens": np.concatenate(played), "bounds": np.stack([bounds[:-1], bounds[1:]], 1)}, scratch)
    scratch.rename(path)
    print(f"{split}: {path.name}, {bounds[-1]} frames", flush=True)


def load_play(folder: Path, split: str) -> Play:
    """Read all shards of a split.

    Raises:
        SystemExit: there is none.
    """
    shards = [load_file(path) for path in sorted((folder / split).glob("*.safetensors"))]
    if not shards:
        raise SystemExit(
            f"{folder / split} holds no shards: record them with examples/crafter/recording.py --out {folder}"
        )
    firsts = np.cumsum([0, *(len(shard["tokens"]) for shard in shards)])
    bounds = [shard["bounds"] + first for shard, first in zip(shards, firsts[:-1], strict=True)]
    return Play(np.concatenate([shard["tokens"] for shard in shards]), np.concatenate(bounds))


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("build/crafter/data"))
    parser.add_argument("--shards", type=int, default=8)
    parser.add_argument("--episodes", type=int, default=60, help="of a shard of training")
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    with Pool(options.processes) as pool:
        record("held_out", options.out, 0, options.episodes // 2, pool)
        for shard in range(options.shards):
            record("train", options.out, shard, options.episodes, pool)


if __name__ == "__main__":
    main()
