"""Record the splits of the data set: shards of episodes. A shard that exists is kept."""

import argparse
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file

LONGEST = 300
"""Frames of the longest episode."""

SHORTEST = 20
"""Frames of the shortest episode that is kept: a training sequence."""

SHARD_FRAMES = 8000


@dataclass(frozen=True)
class Split:
    """A part of the data set.

    Attributes:
        first_seed: of its episodes. Shard k begins at `first_seed + 10000 k`, so no two splits share a seed.
        scenarios: None: those of training.
    """

    name: str
    first_seed: int
    scenarios: tuple[str, ...] | None = None


SPLITS = {
    split.name: split
    for split in (
        Split("train", 1_000_000),
        Split("calibration", 2_000_000),
        Split("held_out", 3_000_000),
        Split("held_out_scenario", 4_000_000, ("health_gathering",)),
    )
}


@dataclass(frozen=True)
class Shard:
    """Episodes of one scenario, one after the other.

    Attributes:
        frames: uint8 [T, 64, 64, 3]. actions, kinds: uint8 [T], see `game.Episode`.
        starts: int64 [E], index of each episode's first frame.
    """

    scenario: str
    frames: np.ndarray
    actions: np.ndarray
    kinds: np.ndarray
    starts: np.ndarray

    def bounds(self) -> Iterator[tuple[int, int]]:
        """Yield the first and one past the last frame of each episode."""
        ends = [*self.starts[1:].tolist(), len(self.actions)]
        yield from zip(self.starts.tolist(), ends, strict=True)


def write_atomically(tensors: dict[str, np.ndarray], path: Path, metadata: dict[str, str]) -> None:
    """Write a safetensors file. A kill while writing leaves no file of that name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(path.name + ".part")
    save_file(tensors, scratch, metadata=metadata)
    os.replace(scratch, path)


def record_shard(scenario: str, first_seed: int, frames: int) -> Shard:
    """Return at least `frames` frames of a scenario's episodes; an episode under SHORTEST frames is left out."""
    from game import episodes  # needs vizdoom; reading shards does not

    kept, total = [], 0
    recording = episodes(scenario, first_seed, LONGEST)
    while total < frames:
        episode = next(recording)
        if len(episode.actions) >= SHORTEST:
            kept.append(episode)
            total += len(episode.actions)
    recording.close()
    lengths = [len(episode.actions) for episode in kept]
    return Shard(
        scenario,
        np.concatenate([episode.frames for episode in kept]),
        np.concatenate([episode.actions for episode in kept]),
        np.concatenate([episode.kinds for episode in kept]),
        np.cumsum([0, *lengths[:-1]]),
    )


def save_shard(shard: Shard, path: Path) -> None:
    """Write a shard."""
    arrays = {"frames": shard.frames, "actions": shard.actions, "kinds": shard.kinds, "starts": shard.starts}
    write_atomically(arrays, path, {"scenario": shard.scenario})


def load_shard(path: Path) -> Shard:
    """Read a shard."""
    with safe_open(path, "numpy") as file:
        arrays = {name: file.get_tensor(name) for name in ("frames", "actions", "kinds", "starts")}
        return Shard(scenario=file.metadata()["scenario"], **arrays)


def shard_paths(folder: Path, split: str) -> list[Path]:
    """Return the shards of a split, sorted.

    Raises:
        SystemExit: there is none.
    """
    paths = sorted((folder / split).glob("*.safetensors"))
    if not paths:
        raise SystemExit(f"{folder / split} holds no shards: record them with examples/doom/data.py --out {folder}")
    return paths


def record_split(split: Split, folder: Path, shards: int, frames: int) -> None:
    """Record `shards` shards of each scenario of a split."""
    from game import TRAINING

    scenarios = split.scenarios or TRAINING
    for number in range(shards):
        for place, scenario in enumerate(scenarios):
            path = folder / split.name / f"{number:03}_{scenario}.safetensors"
            if path.exists():
                continue
            first_seed = split.first_seed + (number * len(scenarios) + place) * 10_000
            save_shard(record_shard(scenario, first_seed, frames), path)
            print(f"{split.name}: {path.name}", flush=True)


def statistics(folder: Path) -> dict[str, dict[str, object]]:
    """Return the episodes, frames and shares of kinds of every split that is there."""
    found: dict[str, dict[str, object]] = {}
    for split in SPLITS:
        if not (folder / split).is_dir():
            continue
        counts, episodes = np.zeros(4, np.int64), 0
        for path in shard_paths(folder, split):
            with safe_open(path, "numpy") as file:
                counts += np.bincount(file.get_tensor("kinds"), minlength=4)
                episodes += len(file.get_tensor("starts"))
        shares = [round(float(count / counts.sum()), 4) for count in counts]
        found[split] = {"episodes": episodes, "frames": int(counts.sum()), "kinds": shares}
    return found


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("build/doom/data"))
    parser.add_argument("--shards", type=int, default=6, help="of each training scenario")
    parser.add_argument("--frames", type=int, default=SHARD_FRAMES, help="of a training shard")
    options = parser.parse_args()
    record_split(SPLITS["held_out"], options.out, 1, options.frames // 2)
    record_split(SPLITS["held_out_scenario"], options.out, 1, options.frames // 2)
    record_split(SPLITS["calibration"], options.out, 1, options.frames // 4)
    record_split(SPLITS["train"], options.out, options.shards, options.frames)
    print(json.dumps(statistics(options.out), indent=1))


if __name__ == "__main__":
    main()
