"""Train the moving-shapes decoder on the CPU; every batch is fresh, so nothing is seen twice."""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path

import torch
from evaluate import HELD_OUT_SEED, teacher_forced_nll
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM
from video import BOS, TOKENS_PER_FRAME, TOKENS_PER_VIDEO, VOCAB_SIZE, make_videos, tokenize, with_bos

PEAK_RATE = 3e-3
WARM_UP = 0.03


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


def learning_rate(progress: float) -> float:
    """Linear warm-up, then cosine to 2 % of the peak; progress in [0, 1]."""
    if progress < WARM_UP:
        return PEAK_RATE * progress / WARM_UP
    phase = min(1.0, (progress - WARM_UP) / (1 - WARM_UP))
    return PEAK_RATE * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * phase)))


def train(minutes: float, batch: int, seed: int) -> tuple[LlamaForCausalLM, list[dict[str, float]]]:
    """Train for a wall-clock budget; returns the model and the held-out log."""
    torch.manual_seed(seed)
    model = build_model().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_RATE, betas=(0.9, 0.95), weight_decay=0.01)
    start, step, log = time.perf_counter(), 0, []
    while (progress := (time.perf_counter() - start) / (60 * minutes)) < 1:
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(progress)
        tokens = torch.from_numpy(with_bos(tokenize(make_videos(batch, seed=(seed + 1) * 10_000_000 + step))))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = model(tokens[:, :-1], use_cache=False).logits
        loss = cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        step += 1
        if step % 100 == 0:
            log.append({"step": step, "progress": round(progress, 4), "train_nll": round(loss.item(), 5)})
            print(log[-1], flush=True)
    model.eval()
    held_out = teacher_forced_nll(model, make_videos(16, HELD_OUT_SEED))
    log.append({"step": step, "progress": 1.0, "held_out_nll_frames_2_to_8": round(held_out, 5)})
    print(log[-1], flush=True)
    return model, log


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "model")
    parser.add_argument("--minutes", type=float, default=15.0)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    model, log = train(options.minutes, options.batch, options.seed)
    model.generation_config.eos_token_id = None
    model.save_pretrained(options.out)
    (options.out / "training_log.json").write_text(json.dumps(log, indent=1) + "\n")


if __name__ == "__main__":
    main()
