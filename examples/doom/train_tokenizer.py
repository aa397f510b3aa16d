"""Train the tokenizer on recorded frames. Resumable."""

import argparse
import sys
import time
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))  # code that the examples share

import numpy as np
import torch
from autoencoder import Autoencoder, to_pixels
from common.progress import Log
from common.training import Checkpoint, learning_rate
from data import load_shard, shard_paths
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import l1_loss, mse_loss

GRADIENT = 0.5
"""Weight of the loss of differences between neighbouring pixels: it keeps edges sharp."""


DARKEST = 0.02
"""Offset of the brightness curve: the game is dark, and the eye sees relative differences."""


def brightness(pixels: Tensor) -> Tensor:
    """Return pixels from 0 to 1 on a curve that is steep where they are dark."""
    return (pixels.clamp(min=-DARKEST / 2) + DARKEST).sqrt()


def reconstruction_loss(made: Tensor, pixels: Tensor) -> Tensor:
    """Return the L1 loss of the brightness of pixels [N, 3, 64, 64], and of its differences along rows and columns."""
    made, pixels = brightness(made), brightness(pixels)
    rows = l1_loss(made.diff(dim=2), pixels.diff(dim=2))
    columns = l1_loss(made.diff(dim=3), pixels.diff(dim=3))
    return l1_loss(made, pixels) + GRADIENT * (rows + columns)


def load_frames(folder: Path, split: str, shards: int) -> np.ndarray:
    """Return the frames uint8 [T, 64, 64, 3] of the first `shards` shards of a split."""
    return np.concatenate([load_shard(path).frames for path in shard_paths(folder, split)[:shards]])


@torch.inference_mode()
def held_out_psnr(model: Autoencoder, frames: np.ndarray) -> float:
    """Return the mean PSNR in dB of reconstructed frames."""
    pixels = to_pixels(frames)
    errors = mse_loss(model.eval()(pixels).clamp(0, 1), pixels, reduction="none").mean((1, 2, 3))
    return float((-10 * errors.log10()).mean())


def train(model: Autoencoder, frames: np.ndarray, held_out: np.ndarray, options: argparse.Namespace) -> None:
    """Train in place until `options.steps`."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.rate, betas=(0.9, 0.95), weight_decay=0.01)
    kept = Checkpoint(options.out.with_suffix(".checkpoint"), model, [optimizer])
    first, _ = kept.load()
    log = Log(options.out.with_suffix(".jsonl"), first)
    began, seen = time.perf_counter(), []
    for step in range(first, options.steps):
        optimizer.param_groups[0]["lr"] = learning_rate((step + 1) / options.steps, options.rate)
        chosen = np.random.default_rng([options.seed, step]).integers(0, len(frames), options.batch)
        pixels = to_pixels(frames[chosen]).contiguous(memory_format=torch.channels_last)
        loss = reconstruction_loss(model.train()(pixels), pixels)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        seen.append(loss.item())
        if (step + 1) % options.every == 0 or step + 1 == options.steps:
            entry = {"loss": float(np.mean(seen)), "held_out_psnr": held_out_psnr(model, held_out)}
            log.append(step + 1, entry, time.perf_counter() - began)
            seen = []
        kept.save(step + 1, [])


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=Path("build/doom/data"))
    parser.add_argument("--out", type=Path, default=Path("build/doom/tokenizer.safetensors"))
    parser.add_argument("--shards", type=int, default=15, help="training shards that are read into memory")
    parser.add_argument("--steps", type=int, default=6000)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--rate", type=float, default=1e-3, help="peak learning rate")
    parser.add_argument("--every", type=int, default=100, help="steps between two evaluations")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    model = Autoencoder()
    held_out = load_frames(options.data, "held_out", 5)
    train(model, load_frames(options.data, "train", options.shards), held_out[:: len(held_out) // 200], options)
    save_file({name: tensor.contiguous() for name, tensor in model.state_dict().items()}, options.out)


if __name__ == "__main__":
    main()
