"""Measure tokenizer and decoder on held-out play, and draw reconstructions and rollouts."""

from __future__ import annotations

import argparse
import io
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from autoencoder import Autoencoder, load_autoencoder
from data import Shard, load_shard, shard_paths
from decoder import TokenSplit, load_decoder, load_tokens
from PIL import Image
from rollout import Sampling, contexts_of, imagine
from skimage.metrics import peak_signal_noise_ratio, structural_similarity
from strips import write_strip
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel
from world_format import CODES, CONTEXT_FRAMES, GRID, SIZE, TOKENS_PER_FRAME

KINDS = ("still", "turning", "walking", "shooting")
BITS = GRID * GRID * math.log2(CODES)
"""Bits of a frame's image tokens."""

SHOWN_EVERY = 4
"""Frames between two that a strip of a rollout shows."""


def quality(made: np.ndarray, true: np.ndarray) -> tuple[float, float]:
    """Return mean PSNR in dB and mean SSIM of frames uint8 [N, 64, 64, 3]."""
    psnr = [peak_signal_noise_ratio(a, b) for a, b in zip(true, made, strict=True)]
    ssim = [structural_similarity(a, b, channel_axis=2) for a, b in zip(true, made, strict=True)]
    return float(np.mean(psnr)), float(np.mean(ssim))


def scan_bits(encoded: bytes) -> int:
    """Return the bits of a baseline JPEG's entropy-coded data: without its tables and headers."""
    start = encoded.index(b"\xff\xda")
    header = int.from_bytes(encoded[start + 2 : start + 4], "big")
    return 8 * (len(encoded) - start - 2 - header - 2)


def jpeg(frame: np.ndarray, bits: float) -> np.ndarray:
    """Return the JPEG of a frame that is closest to it among those of at most `bits` entropy-coded bits.

    Tables and headers are free. The picture may be stored smaller: at 64 x 64 pixels hardly any quality fits.
    """
    best, result = -math.inf, np.full_like(frame, frame.mean((0, 1)).astype(np.uint8))
    image = Image.fromarray(frame)
    for side in (8, 16, 24, 32, 48, 64):
        for setting in (1, 5, 10, 20, 30, 40, 50, 60, 70, 80, 90):
            file = io.BytesIO()
            image.resize((side, side), Image.Resampling.BOX).save(file, "JPEG", quality=setting, optimize=True)
            if scan_bits(file.getvalue()) > bits:
                break
            made = Image.open(file).resize((SIZE, SIZE), Image.Resampling.BICUBIC)
            psnr = peak_signal_noise_ratio(frame, np.asarray(made))
            if psnr > best:
                best, result = psnr, np.asarray(made)
    return result


def reconstruction(model: Autoencoder, shards: Sequence[Shard], count: int) -> dict[str, dict[str, float]]:
    """Return PSNR and SSIM by scenario, of the tokenizer and of a JPEG of the same bits, on `count` frames of each."""
    result = {}
    for shard in shards:
        frames = shard.frames[np.linspace(0, len(shard.frames) - 1, count).astype(np.int64)]
        psnr, ssim = quality(model.decode(model.encode(frames)), frames)
        jpeg_psnr, jpeg_ssim = quality(np.stack([jpeg(frame, BITS) for frame in frames]), frames)
        result[shard.scenario] = {"psnr": psnr, "ssim": ssim, "jpeg_psnr": jpeg_psnr, "jpeg_ssim": jpeg_ssim}
    return result


@torch.inference_mode()
def nll_by_kind(model: PreTrainedModel, split: TokenSplit, count: int) -> dict[str, float]:
    """Return the NLL in nats per image token of `count` sequences' last frames: by kind of motion, and of all.

    Every frame has 15 true frames before it.
    """
    every = split.sequences(CONTEXT_FRAMES)
    starts = every[np.linspace(0, len(every) - 1, count).astype(np.int64)]
    losses = []
    for part in torch.from_numpy(split.take(starts, CONTEXT_FRAMES)).split(8):
        logits = model(part[:, :-1], use_cache=False, logits_to_keep=TOKENS_PER_FRAME - 1).logits
        last = part[:, -(TOKENS_PER_FRAME - 1) :]
        losses.append(cross_entropy(logits.transpose(1, 2), last, reduction="none").mean(1))
    nll, kinds = torch.cat(losses).numpy(), split.kinds[starts + CONTEXT_FRAMES - 1]
    found = {name: float(nll[kinds == kind].mean()) for kind, name in enumerate(KINDS) if (kinds == kind).any()}
    return {**found, "all": float(nll.mean())}


@dataclass(frozen=True)
class Held:
    """A held-out split: its pictures and its tokens, in the same order."""

    frames: np.ndarray
    split: TokenSplit

    @classmethod
    def load(cls, folder: Path, name: str) -> Held:
        """Read a split."""
        frames = np.concatenate([load_shard(path).frames for path in shard_paths(folder, name)])
        return cls(frames, load_tokens(folder, name))


def one_step(model: PreTrainedModel, autoencoder: Autoencoder, held: Held, count: int) -> dict[str, float]:
    """Return PSNR and SSIM against the true pixels of one frame after 16 true ones: drawn, most likely, and copied."""
    every = held.split.sequences(CONTEXT_FRAMES + 1)
    starts = every[np.linspace(0, len(every) - 1, count).astype(np.int64)]
    context, actions, codes = contexts_of(held.split, starts, 1)
    true = held.frames[starts + CONTEXT_FRAMES]
    made = {
        "drawn": imagine(model, context, actions, Sampling())[:, 0],
        "most_likely": imagine(model, context, actions, Sampling(top_k=1))[:, 0],
        "true_tokens": codes[:, 0],
        "frame_before": held.split.tokens[starts + CONTEXT_FRAMES - 1, 1:].astype(np.int64),
    }
    result = {}
    for name, tokens in made.items():
        result[f"{name}_psnr"], result[f"{name}_ssim"] = quality(autoencoder.decode(tokens), true)
    return result


def rollouts(model: PreTrainedModel, autoencoder: Autoencoder, held: Held, frames: int, out: Path) -> dict[str, float]:
    """Draw one rollout of each scenario beside the truth and return its PSNR against the true pixels."""
    every = held.split.sequences(CONTEXT_FRAMES + frames)
    names = np.repeat(held.split.scenarios, np.diff(held.split.bounds, axis=1)[:, 0])[every]
    starts = np.array([every[names == name][np.count_nonzero(names == name) // 3] for name in np.unique(names)])
    context, actions, _ = contexts_of(held.split, starts, frames)
    codes = imagine(model, context, actions, Sampling())
    result = {}
    for name, start, made in zip(np.unique(names), starts, codes, strict=True):
        pictures, true = autoencoder.decode(made), held.frames[start + CONTEXT_FRAMES :][:frames]
        shown = slice(SHOWN_EVERY - 1, None, SHOWN_EVERY)
        write_strip({f"{name}: game": true[shown], "decoder": pictures[shown]}, out / f"rollout_{name}.png")
        result[str(name)] = quality(pictures, true)[0]
    return result


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=Path("build/doom/data"))
    parser.add_argument("--tokenizer", type=Path, default=Path("build/doom/tokenizer.safetensors"))
    parser.add_argument("--decoder", type=Path, help="default: measure the tokenizer alone")
    parser.add_argument("--out", type=Path, default=Path("build/doom/measured"))
    parser.add_argument("--count", type=int, default=200, help="frames or sequences of a figure")
    parser.add_argument("--frames", type=int, default=64, help="of a rollout")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    options.out.mkdir(parents=True, exist_ok=True)
    autoencoder = load_autoencoder(options.tokenizer)
    measured: dict[str, dict[str, object]] = {}
    for name in ("held_out", "held_out_scenario"):
        shards = [load_shard(path) for path in shard_paths(options.data, name)]
        measured[name] = {"reconstruction": reconstruction(autoencoder, shards, options.count // 4)}
        for shard in shards:
            frames = shard.frames[:: len(shard.frames) // 12][:12]
            rows = {f"{shard.scenario}: game": frames, "tokens": autoencoder.decode(autoencoder.encode(frames))}
            write_strip(rows, options.out / f"tokens_{shard.scenario}.png")
        if options.decoder is not None:
            model, held = load_decoder(options.decoder), Held.load(options.data, name)
            measured[name] |= {
                "nll": nll_by_kind(model, held.split, options.count),
                "one_step": one_step(model, autoencoder, held, options.count // 4),
                "rollout_psnr": rollouts(model, autoencoder, held, options.frames, options.out),
            }
    text = json.dumps(measured, indent=1)
    (options.out / "measured.json").write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
