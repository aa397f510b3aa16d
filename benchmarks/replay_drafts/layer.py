"""Time and memory of the fit of one large layer."""

import resource
import time

import torch
from torch import Tensor

from fastcar_compile.tune.training.surrogate import Mlp, Moments, candidates, sizes_of

HIDDEN, INNER = 4096, 11008
BATCHES, VIDEOS, FRAMES, PLACES = 8, 2, 8, 64
"""Tokens come in batches [VIDEOS, FRAMES, PLACES]."""

STAYS = 0.8
"""Correlation of an input with the one of the same place a frame earlier."""

PAIRS = 1024
"""Of a batch: together as many as `fit_draft` takes of this hidden size."""


def layer() -> None:
    """Print time and peak memory of each part: moments of random inputs, then drafts of all sizes with their gates."""
    random = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random)

    up, gate, down = draw(INNER, HIDDEN), draw(INNER, HIDDEN), draw(HIDDEN, INNER)
    mlp = Mlp(torch.nn.functional.silu, up / HIDDEN**0.5, None, down / INNER**0.5, gate / HIDDEN**0.5)
    # Variances of a decoder's inputs fall about as 1 / k along their principal directions.
    spread = torch.arange(1, HIDDEN + 1).float().rsqrt()
    turn = torch.linalg.qr(draw(HIDDEN, HIDDEN)).Q * (HIDDEN / spread.square().sum()).sqrt()
    sizes = sizes_of(mlp)
    began = time.perf_counter()
    with torch.no_grad():
        moments = Moments(mlp, torch.randperm(INNER, generator=random)[: max(s.neurons for s in sizes)], random)
        for _ in range(BATCHES):
            frames = [draw(VIDEOS, PLACES, HIDDEN)]
            for _ in range(FRAMES - 1):
                frames.append(STAYS * frames[-1] + (1 - STAYS**2) ** 0.5 * draw(VIDEOS, PLACES, HIDDEN))
            x = torch.stack(frames, 1) * spread @ turn.T
            moments.add(x, mlp.neurons(x) @ mlp.down.T, PAIRS)
        show(f"{BATCHES * VIDEOS * FRAMES * PLACES} tokens, moments of {len(moments.gram)} features", began)
        began = time.perf_counter()
        found = candidates(moments, sizes, random)
    show(f"drafts and gates of {len(sizes)} sizes", began)
    power = float(moments.square) / moments.count
    for size, parts in zip(sizes, found, strict=True):
        share = mlp.share(size) if size.neurons else 0.0
        print(f"{size}: {share:.1%} of the weights, error {float(parts['error']) / power:.3f} of the outputs' square")


def show(what: str, began: float) -> None:
    """Print seconds and the process's peak memory so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1 << 20)
    print(f"{what}: {time.perf_counter() - began:.0f} s, peak {peak:.1f} GiB", flush=True)
