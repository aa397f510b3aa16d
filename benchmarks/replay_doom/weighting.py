"""Rows as if kinds of motion had their natural shares: a third of the measured sequences were chosen for shooting."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from replay_doom.sequences import KINDS
from replay_doom.setup import TokenSplit

Shares = Mapping[str, float]
_MEANS = ("replay_ratio", "nll", "nll_dense", "token_agreement", "ssim")


def natural_shares(split: TokenSplit) -> dict[str, float]:
    """Return the share of each kind of motion in all recorded frames."""
    counts = np.bincount(split.kinds, minlength=len(KINDS))
    return dict(zip(KINDS, (counts / counts.sum()).tolist(), strict=True))


def weighted(row: Mapping[str, Any], shares: Shares) -> dict[str, Any]:
    """Return the row with means of its kinds in place of means of all its frames. Kinds that it lacks count nothing."""
    present = [kind for kind in KINDS if kind in row["groups"]]
    weights = np.array([shares[kind] for kind in present])
    weights = weights / weights.sum()
    groups = [row["groups"][kind] for kind in present]
    means = {name: float(weights @ [float(group[name]) for group in groups]) for name in _MEANS}
    errors = weights @ [10 ** (-float(group["psnr"]) / 10) for group in groups]
    layers = weights @ np.array([group["replay_by_layer"] for group in groups])
    psnr = -10 * math.log10(errors) if errors else math.inf
    return {**row, **means, "psnr": psnr, "replay_by_layer": layers.tolist()}
