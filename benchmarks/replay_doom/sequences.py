"""Which recorded sequences are used, and which of their frames show which kind of motion."""

import numpy as np

from replay_doom.setup import TOKENS_PER_FRAME, TokenSplit

KINDS = ("still", "turning", "walking", "shooting")
"""As `game.KINDS`, which needs vizdoom."""

SHOOTING = 3
RICH = 3
"""One of so many held-out sequences is chosen because it shows much shooting, which is rare."""


DRAWS = 200
"""Random choices of a scenario's sequences, of which the most representative one is taken."""


def scenario_of(split: TokenSplit, starts: np.ndarray) -> np.ndarray:
    """Return the scenario of each sequence."""
    return np.repeat(split.scenarios, np.diff(split.bounds, axis=1)[:, 0])[starts]


def spaced(split: TokenSplit, per_scenario: int, frames: int, rich: int = 0) -> np.ndarray:
    """Return the first frame of `per_scenario` sequences of each scenario, int64 [N], one scenario after the other.

    They are evenly spaced. The last one of `rich` is the one that shows most shooting instead, and overlaps no other.
    """
    every = split.sequences(frames)
    names, found = scenario_of(split, every), []
    for name in sorted(set(split.scenarios)):
        own = every[names == name]
        chosen = own[np.linspace(0, len(own) - 1, per_scenario).astype(np.int64)].tolist()
        for index in range(rich - 1, per_scenario, rich) if rich else ():
            chosen[index] = _shooting(split, own, chosen[:index] + chosen[index + 1 :], frames)
        found += chosen
    return np.array(found, np.int64)


def _shooting(split: TokenSplit, starts: np.ndarray, others: list[int], frames: int) -> int:
    """Return the sequence that shows most shooting and overlaps no other one."""
    shown = (split.kinds[starts[:, None] + np.arange(frames)] == SHOOTING).sum(1)
    free = (np.abs(starts[:, None] - np.array(others)[None]) >= frames).all(1)
    return int(starts[np.argmax(np.where(free, shown, -1))])


def representative(split: TokenSplit, count: int, frames: int, prompt: int) -> np.ndarray:
    """Return the first frame of `count` sequences in which as many image tokens stay as in all play, int64 [N].

    Tokens that stay from frame to frame say most of how much a sequence replays, and cost nothing to count. As many
    sequences of each scenario; of DRAWS random choices, the one whose mean is nearest to that of the scenario.
    """
    every = np.concatenate([np.arange(first, end - frames + 1, frames) for first, end in split.bounds])
    names, scenarios, random = scenario_of(split, every), sorted(set(split.scenarios)), np.random.default_rng(0)
    found = list[np.ndarray]()
    for place, name in enumerate(scenarios):
        own = every[names == name]
        stays = _staying(split, own, frames, prompt)
        number = (count + len(scenarios) - 1 - place) // len(scenarios)
        draws = [random.permutation(len(own))[:number] for _ in range(DRAWS)]
        best = min(draws, key=lambda chosen: abs(float(stays[chosen].mean() - stays.mean())))
        found.append(own[np.sort(best)])
    return np.concatenate(found)


def _staying(split: TokenSplit, starts: np.ndarray, frames: int, prompt: int) -> np.ndarray:
    """Return the share of image tokens that are as one frame before, after the first decoded frame, float64 [N]."""
    tokens = split.tokens[starts[:, None] + np.arange(prompt, frames)][:, :, 1:]
    return (tokens[:, 1:] == tokens[:, :-1]).mean((1, 2))


def groups_of(split: TokenSplit, starts: np.ndarray, frames: int, prompt: int) -> dict[str, np.ndarray]:
    """Return kind of motion or scenario -> the decoded frames that show it, bool [N, frames - prompt].

    A group without a frame after the first decoded one is left out, and so is the scenario where there is only one.
    """
    kinds = split.kinds[starts[:, None] + np.arange(prompt, frames)]
    found = {name: kinds == index for index, name in enumerate(KINDS)}
    names = scenario_of(split, starts)
    if len(set(names)) > 1:
        found |= {name: np.repeat(names == name, frames - prompt).reshape(kinds.shape) for name in sorted(set(names))}
    return {name: shown for name, shown in found.items() if shown[:, 1:].any()}


def drawn(split: TokenSplit, count: int, frames: int, seed: int) -> np.ndarray:
    """Return the tokens int64 [count, frames * 65] of random sequences."""
    starts = split.sequences(frames)
    return split.take(np.random.default_rng(seed).choice(starts, count), frames)


def flat_actions(tokens: np.ndarray) -> np.ndarray:
    """Return the action tokens int64 [N, frames] of sequences int64 [N, frames * 65]."""
    return tokens.reshape(len(tokens), -1, TOKENS_PER_FRAME)[:, :, 0]
