"""Prompts to videos with the structure of VILA-U: guidance pairs of different lengths, four codes a position.

The weights are random, so the videos are noise; what they show is the way from a text to a file. Words are letters
here, and codes are colours.
"""

import sys
from pathlib import Path

import numpy as np
import torch
from structure import SMALL, build

import fastcar_compile as fc
from fastcar_compile.support.packages import require

require("video", "imageio", "PIL")  # the last line saves videos

BATCH, FRAMES = 4, 4
REPLAY = fc.ReplayConfig(gate="tas", rotary="key", threshold=">0")  # the rule of the authors' code
body, head = build(SMALL, BATCH)
out = Path(sys.argv[1] if len(sys.argv) > 1 else "build/vila_u")
sizes = {"target": "cpu", "quant": "w8a8", "batch_size": BATCH}
artifact = fc.compile(body, **sizes, rows=1, replay=REPLAY, output=out / "body")
depth = fc.compile(head, **sizes, replay=None, prefill_chunk=1, output=out / "head")


def encode(text: str) -> torch.Tensor:
    return body.embed_tokens(torch.tensor([ord(letter) % SMALL.words for letter in text])).detach()


def decode(tokens: np.ndarray) -> np.ndarray:
    colours = (tokens[..., :3] % 256).astype(np.uint8).reshape(-1, SMALL.side, SMALL.side, 3)
    return colours.repeat(16, 1).repeat(16, 2)


pipeline = fc.VideoPipeline(artifact, encode, decode, depth=depth)
guided = fc.Sampling(top_k=900, top_p=0.96, guidance=3.0, seed=1)
for name, video in zip("ab", pipeline(["a red fox in the snow", "rain"], FRAMES, guided), strict=True):
    video.save(out / f"{name}.gif")
    print(video, f"{pipeline.session.stats.replay_ratio:.0%} of the MLPs replayed", out / f"{name}.gif")
