"""Measure the decoder on held-out play: loss by kind of tile and of motion, and free-running frames as strips.

Also writes sequences of held-out play for `fastcar calibrate` and `fastcar evaluate`.
"""

import argparse
import json
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))  # code that the examples share

import numpy as np
import torch
from common.rollout import Sampling, contexts_of, imagine, open_decoder
from common.strips import write_strip
from common.worlds import Play, load_decoder
from recording import WORLD, load_play
from tiles import CODES, COLUMNS, CONTEXT_FRAMES, FIRST_ACTION, MAP_ROWS, NAMES, TOKENS_PER_FRAME, render, tile_pictures
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel

SHOWN_EVERY, SHOWN_SIZE = 4, (96, 96)
"""Frames between two in a strip, and pixels of each."""

ROLLOUTS = 4
MAP_TOKENS = MAP_ROWS * COLUMNS
SEQUENCES, SEQUENCE_FRAMES = {"calibration.npy": 6, "videos.npy": 18}, 16
"""Sequences that are written, and their frames; no frame is in both files."""


def chosen(play: Play, length: int, count: int) -> np.ndarray:
    """Return int64 [count]: evenly spaced first frames of sequences of `length` frames."""
    every = play.sequences(length)
    return every[np.linspace(0, len(every) - 1, count).astype(np.int64)]


@torch.inference_mode()
def likelihood(model: PreTrainedModel, play: Play, count: int) -> dict[str, dict[str, float]]:
    """Return what the last frames of `count` sequences cost: the group of its tokens -> figures.

    Every frame has the true frames of its window before it. nll: nats per token. likeliest: share of tokens that the
    decoder finds likeliest. unchanged: share of tokens that the frame before has at the same place.
    """
    sequences = torch.from_numpy(play.take(chosen(play, CONTEXT_FRAMES, count), CONTEXT_FRAMES))
    nll, likeliest = [], []
    for part in sequences.split(8):
        logits = model(part[:, :-1], use_cache=False, logits_to_keep=TOKENS_PER_FRAME - 1).logits[..., :CODES]
        last = part[:, -(TOKENS_PER_FRAME - 1) :]
        nll.append(cross_entropy(logits.transpose(1, 2), last, reduction="none"))
        likeliest.append(logits.argmax(-1) == last)
    frames = sequences.reshape(count, CONTEXT_FRAMES, TOKENS_PER_FRAME)
    values = {
        "nll": torch.cat(nll).numpy(),
        "likeliest": torch.cat(likeliest).numpy(),
        "unchanged": (frames[:, -1, 1:] == frames[:, -2, 1:]).numpy(),
    }
    walks = [FIRST_ACTION + number for number, name in enumerate(NAMES) if name.startswith("move_")]
    walking = np.isin(frames[:, -1, 0].numpy(), walks)
    ground = np.arange(TOKENS_PER_FRAME - 1) < MAP_TOKENS
    groups = {
        "map, walking": np.outer(walking, ground),
        "map, otherwise": np.outer(~walking, ground),
        "inventory": np.outer(np.ones(count, bool), ~ground),
        "all": np.ones((count, TOKENS_PER_FRAME - 1), bool),
    }
    return {
        group: {name: round(float(value[where].mean()), 4) for name, value in values.items()}
        for group, where in groups.items()
    }


def rollouts(decoder: Path, play: Play, frames: int, out: Path) -> dict[str, float]:
    """Draw free-running frames beside the game; return the share of tiles that are the game's, by frame."""
    starts = chosen(play, CONTEXT_FRAMES + frames, ROLLOUTS + 2)[1:-1]
    context, actions, true = contexts_of(play, WORLD, starts, frames)
    with open_decoder(decoder, WORLD, ROLLOUTS, frames) as session:
        made = imagine(session, WORLD, context, actions, Sampling(top_k=CODES))
    pictures, shown = tile_pictures(), slice(SHOWN_EVERY - 1, None, SHOWN_EVERY)
    for number in range(ROLLOUTS):
        rows = {"game": render(true[number], pictures)[shown], "decoder": render(made[number], pictures)[shown]}
        write_strip(rows, SHOWN_SIZE, out / f"rollout_{number + 1}.png")
    equal = (made == true).mean((0, 2))
    return {str(frame): round(float(equal[frame - 1]), 4) for frame in (1, 4, 16, frames)}


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("build/crafter/data"))
    parser.add_argument("--decoder", type=Path, default=Path(__file__).parent / "world" / "decoder")
    parser.add_argument("--out", type=Path, default=Path("build/crafter/measured"))
    parser.add_argument("--count", type=int, default=400, help="sequences of the loss")
    parser.add_argument("--frames", type=int, default=64, help="of a rollout")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    options.out.mkdir(parents=True, exist_ok=True)
    play = load_play(options.data, "held_out")
    starts = chosen(play, SEQUENCE_FRAMES, sum(SEQUENCES.values()))
    sequences = play.take(starts[np.argsort(np.arange(len(starts)) % 4, kind="stable")], SEQUENCE_FRAMES)
    for name, part in zip(SEQUENCES, np.split(sequences, [SEQUENCES["calibration.npy"]]), strict=True):
        np.save(options.out / name, part)
    measured = {
        "likelihood": likelihood(load_decoder(options.decoder), play, options.count),
        "equal_tiles_by_frame": rollouts(options.decoder, play, options.frames, options.out),
    }
    print(json.dumps(measured, indent=1))
    (options.out / "measured.json").write_text(json.dumps(measured, indent=1) + "\n")


if __name__ == "__main__":
    main()
