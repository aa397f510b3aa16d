"""Measure tokenizer and decoder on held-out play, scenario by scenario, and draw reconstructions and rollouts."""

import argparse
import io
import json
import math
import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))  # code that the examples share

import numpy as np
import torch
from autoencoder import Autoencoder, load_autoencoder
from common.rollout import Sampling, contexts_of, imagine, open_decoder
from common.strips import write_strip
from common.worlds import load_decoder
from data import load_shard, shard_paths
from decoder import SCENARIOS, WORLD, TokenSplit, load_tokens
from PIL import Image
from skimage.metrics import peak_signal_noise_ratio, structural_similarity
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel
from world_format import CODES, CONTEXT_FRAMES, GRID, SIZE, TOKENS_PER_FRAME

import fastcar_compile as fc

ROLES = ("decoder", "tokenizer", "nothing")
"""What was trained on a scenario: decoder and tokenizer, the tokenizer alone, or nothing."""

KINDS = ("still", "turning", "walking", "shooting")
BITS = GRID * GRID * math.log2(CODES)
"""Bits of a frame's image tokens."""

SHOWN_EVERY = 4
"""Frames between two that a strip of a rollout shows."""

SHOWN_FRAMES = 12
"""Frames in a strip of reconstructions."""

SHOWN_SIZE = (128, 96)
"""Width and height of a frame in a strip: the frames are stored 1:1 and shown 4:3."""

ROLLOUTS = 2
"""Rollouts of a scenario, and plays that are generated at a time."""


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


@dataclass(frozen=True)
class Held:
    """Held-out play of one scenario: its pictures and its tokens, in the same order."""

    scenario: str
    role: str
    frames: np.ndarray
    split: TokenSplit

    def chosen(self, length: int, count: int) -> np.ndarray:
        """Return int64 [count]: evenly spaced first frames of sequences of `length` frames."""
        every = self.split.sequences(length)
        return every[np.linspace(0, len(every) - 1, count).astype(np.int64)]


def load_held_out(folder: Path) -> list[Held]:
    """Return all held-out play: what the decoder knows first, then what nothing was trained on last."""
    found = []
    for split in ("held_out", "held_out_scenario"):
        shards: dict[str, list[np.ndarray]] = {}
        for path in shard_paths(folder, split):
            shard = load_shard(path)
            shards.setdefault(shard.scenario, []).append(shard.frames)
        for name, frames in shards.items():
            trained = ROLES[0] if name in SCENARIOS else ROLES[1]
            role = ROLES[2] if split == "held_out_scenario" else trained
            found.append(Held(name, role, np.concatenate(frames), load_tokens(folder, split, (name,))))
    return sorted(found, key=lambda held: (ROLES.index(held.role), held.scenario))


def reconstruction(model: Autoencoder, held: Held, count: int) -> dict[str, float]:
    """Return PSNR and SSIM of the tokenizer and of a JPEG of the same bits, on `count` frames."""
    frames = held.frames[np.linspace(0, len(held.frames) - 1, count).astype(np.int64)]
    psnr, ssim = quality(model.decode(model.encode(frames)), frames)
    jpeg_psnr, jpeg_ssim = quality(np.stack([jpeg(frame, BITS) for frame in frames]), frames)
    return {"psnr": psnr, "ssim": ssim, "jpeg_psnr": jpeg_psnr, "jpeg_ssim": jpeg_ssim}


@torch.inference_mode()
def nll_by_kind(model: PreTrainedModel, held: Held, count: int) -> dict[str, dict[str, float]]:
    """Return the NLL in nats per image token of `count` sequences' last frames: kind of motion -> frames, nll.

    Every frame has 15 true frames before it. `all` is every frame.
    """
    starts = held.chosen(CONTEXT_FRAMES, count)
    losses = []
    for part in torch.from_numpy(held.split.take(starts, CONTEXT_FRAMES)).split(8):
        logits = model(part[:, :-1], use_cache=False, logits_to_keep=TOKENS_PER_FRAME - 1).logits
        last = part[:, -(TOKENS_PER_FRAME - 1) :]
        losses.append(cross_entropy(logits.transpose(1, 2), last, reduction="none").mean(1))
    nll, kinds = torch.cat(losses).numpy(), held.split.kinds[starts + CONTEXT_FRAMES - 1]
    groups = {name: nll[kinds == kind] for kind, name in enumerate(KINDS)} | {"all": nll}
    return {name: {"frames": len(of), "nll": float(of.mean())} for name, of in groups.items() if len(of)}


def continued(
    session: fc.Session, split: TokenSplit, starts: np.ndarray, frames: int, sampling: Sampling
) -> np.ndarray:
    """Return the image codes int64 [N, frames, 64] of as many plays at a time as the session has rows."""
    parts = [
        imagine(session, WORLD, *contexts_of(split, WORLD, part, frames)[:2], sampling)
        for part in np.split(starts, len(starts) // ROLLOUTS)
    ]
    return np.concatenate(parts)


def one_step(session: fc.Session, autoencoder: Autoencoder, held: Held, count: int) -> dict[str, dict[str, float]]:
    """Return PSNR and SSIM against the true pixels of one frame after 16 true ones: drawn, most likely, and copied."""
    starts = held.chosen(CONTEXT_FRAMES + 1, count)
    true, tokens = held.frames[starts + CONTEXT_FRAMES], held.split.tokens[:, 1:].astype(np.int64)
    made = {
        "drawn": continued(session, held.split, starts, 1, Sampling())[:, 0],
        "most likely": continued(session, held.split, starts, 1, Sampling(top_k=1))[:, 0],
        "true tokens": tokens[starts + CONTEXT_FRAMES],
        "frame before": tokens[starts + CONTEXT_FRAMES - 1],
    }
    pairs = {name: quality(autoencoder.decode(codes), true) for name, codes in made.items()}
    return {name: {"psnr": psnr, "ssim": ssim} for name, (psnr, ssim) in pairs.items()}


def rollout(session: fc.Session, autoencoder: Autoencoder, held: Held, options: argparse.Namespace) -> list[float]:
    """Draw ROLLOUTS rollouts beside the truth and return the mean PSNR of each against the true pixels."""
    starts = held.chosen(CONTEXT_FRAMES + options.frames, ROLLOUTS + 2)[1:-1]
    codes, found = continued(session, held.split, starts, options.frames, Sampling()), []
    for number, (start, made) in enumerate(zip(starts, codes, strict=True), 1):
        pictures, true = autoencoder.decode(made), held.frames[start + CONTEXT_FRAMES :][: options.frames]
        shown = slice(SHOWN_EVERY - 1, None, SHOWN_EVERY)
        rows = {f"{held.scenario} {number}: game": true[shown], "decoder": pictures[shown]}
        write_strip(rows, SHOWN_SIZE, options.out / f"rollout_{held.scenario}_{number}.png")
        found.append(quality(pictures, true)[0])
    return found


def measure(
    held: Held, options: argparse.Namespace, autoencoder: Autoencoder, session: fc.Session | None
) -> dict[str, object]:
    """Return everything about one scenario and draw its pictures. Without a session: of the tokenizer alone."""
    result: dict[str, object] = {"role": held.role, "frames": len(held.frames)}
    result["reconstruction"] = reconstruction(autoencoder, held, options.count // 4)
    frames = held.frames[:: len(held.frames) // SHOWN_FRAMES][:SHOWN_FRAMES]
    rows = {f"{held.scenario}: game": frames, "tokens": autoencoder.decode(autoencoder.encode(frames))}
    write_strip(rows, SHOWN_SIZE, options.out / f"tokens_{held.scenario}.png")
    if session is not None:
        result["nll"] = nll_by_kind(load_decoder(options.decoder), held, options.count)
        result["one_step"] = one_step(session, autoencoder, held, options.count // 4)
        result["rollout_psnr"] = rollout(session, autoencoder, held, options)
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
    parser.add_argument("--scenarios", nargs="*", help="default: all")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    options.out.mkdir(parents=True, exist_ok=True)
    autoencoder = load_autoencoder(options.tokenizer)
    session = options.decoder and open_decoder(options.decoder, WORLD, ROLLOUTS, options.frames)
    measured: dict[str, object] = {}
    for held in load_held_out(options.data):
        if options.scenarios is None or held.scenario in options.scenarios:
            measured[held.scenario] = measure(held, options, autoencoder, session)
            print(held.scenario, json.dumps(measured[held.scenario]), flush=True)
    (options.out / "measured.json").write_text(json.dumps(measured, indent=1) + "\n")


if __name__ == "__main__":
    main()
