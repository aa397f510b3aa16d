"""Train the moving-shapes decoder on the CPU; every batch is fresh, so nothing is seen twice."""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path

import torch
from evaluate import HELD_OUT_SEED, load_model, teacher_forced_nll
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM
from video import BOS, FRAMES, TOKENS_PER_FRAME, TOKENS_PER_VIDEO, VOCAB_SIZE, make_videos, tokenize, with_bos

PEAK_RATE = 3e-3
WARM_UP = 0.03
SHORT_FRAMES = 4


def build_model() -> LlamaForCausalLM:
    """The decoder: hidden 128, intermediate 352, 4 layers, 4 heads."""
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        intermediate_size=352,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=TOKENS_PER_VIDEO + 1,
        bos_token_id=BOS,
        eos_token_id=None,
        pad_token_id=None,
        tie_word_embeddings=False,
        attn_implementation="sdpa",
        dtype="float32",
    )
    config.tokens_per_frame = TOKENS_PER_FRAME
    return LlamaForCausalLM(config)


def learning_rate(progress: float, peak: float) -> float:
    """Linear warm-up, then cosine to 2 % of the peak; progress in [0, 1]."""
    if progress < WARM_UP:
        return peak * progress / WARM_UP
    phase = min(1.0, (progress - WARM_UP) / (1 - WARM_UP))
    return peak * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * phase)))


def update(model: LlamaForCausalLM, optimizer: torch.optim.Optimizer, tokens: torch.Tensor) -> float:
    """One optimizer step on tokens int64 [N, 1 + T]; returns the loss in nats per token."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(tokens[:, :-1], use_cache=False).logits
    loss = cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.item()


def train(
    model: LlamaForCausalLM, minutes: float, batch: int, seed: int, peak: float, short: float
) -> list[dict[str, float]]:
    """Train in place for a wall-clock budget; returns the log.

    The first `short` of the budget sees videos of 4 frames (more steps per second), the rest videos of 8.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=peak, betas=(0.9, 0.95), weight_decay=0.01)
    held_out = make_videos(8, HELD_OUT_SEED)
    start, step, log = time.perf_counter(), 0, []
    while (progress := (time.perf_counter() - start) / (60 * minutes)) < 1:
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(progress, peak)
        frames = SHORT_FRAMES if progress < short else FRAMES
        videos = make_videos(batch, seed=(seed + 1) * 10_000_000 + step, frames=frames)
        loss = update(model.train(), optimizer, torch.from_numpy(with_bos(tokenize(videos))))
        step += 1
        if step % 100 == 0:
            nll = teacher_forced_nll(model.eval(), held_out)
            log.append({"step": step, "progress": round(progress, 4), "frames": frames, "train_nll": round(loss, 5)})
            log[-1]["held_out_nll_frames_2_to_8"] = round(nll, 5)
            print(log[-1], flush=True)
    nll = teacher_forced_nll(model.eval(), make_videos(32, HELD_OUT_SEED))
    log.append({"step": step, "progress": 1.0, "held_out_nll_frames_2_to_8": round(nll, 5)})
    print(log[-1], flush=True)
    return log


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "model")
    parser.add_argument("--minutes", type=float, default=15.0, help="wall-clock budget")
    parser.add_argument("--batch", type=int, default=4, help="videos per step")
    parser.add_argument("--seed", type=int, default=0, help="of weights and data; another seed, other videos")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rate", type=float, default=PEAK_RATE, help="peak learning rate")
    parser.add_argument("--short", type=float, default=0.4, help="share of the budget spent on videos of 4 frames")
    parser.add_argument("--init", type=Path, help="model folder to continue from; its log is kept in front")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    model, log = build_model(), []
    if options.init is not None:
        model = load_model(options.init)
        log = json.loads((options.init / "training_log.json").read_text())
    log += train(model, options.minutes, options.batch, options.seed, options.rate, options.short)
    model.save_pretrained(options.out)
    (options.out / "training_log.json").write_text(json.dumps(log, indent=1) + "\n")


if __name__ == "__main__":
    main()
