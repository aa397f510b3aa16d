"""Drift: frames that are generated one after the other, dense and with replay, under the same actions and draws."""

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import fastcar_compile as fc
from fastcar_compile.runtime.compiled import Artifact
from fastcar_compile.tune.evaluate import Case, load_cases
from fastcar_compile.tune.evaluate.frames import likeness
from replay_doom.sequences import flat_actions, spaced
from replay_doom.setup import CODES, LEARNED, LIMITS, MEAN, TOKENS_PER_FRAME, Decoder, Setup
from replay_doom.stages import within

CONTEXT = 16
"""True frames that a rollout begins with: the decoder's window."""

TOP_K = 40
SEEDS = {"dense": 0, "dense, other draws": 1}
"""Replay has the draws of seed 0. Other draws show how far apart two dense rollouts are."""


Made = tuple[np.ndarray, float]
"""A rollout: tokens int64 [N, frames * 65], and the replayed share of t >= F."""


@dataclass(frozen=True)
class Start:
    """What rollouts begin with: tokens int64 [N, 16 * 65] and the actions to follow int64 [N, frames]."""

    context: np.ndarray
    actions: np.ndarray
    true: np.ndarray


def start_of(setup: Setup) -> Start:
    """Return starts from held-out play, as many of each scenario."""
    split, counts = setup.tokens("held_out"), setup.counts
    length = CONTEXT + counts.rollout_frames
    each = max(1, counts.rollouts // len(set(split.scenarios)))
    tokens = split.take(spaced(split, each + 2, length)[_inner(each, len(set(split.scenarios)))], length)
    cut = CONTEXT * TOKENS_PER_FRAME
    later = tokens[:, cut:]
    return Start(tokens[:, :cut], flat_actions(later), later)


def _inner(each: int, scenarios: int) -> np.ndarray:
    """Return the places of all sequences but each scenario's first and last, which begin and end an episode."""
    return np.concatenate([np.arange(1, each + 1) + s * (each + 2) for s in range(scenarios)])


def roll(artifact: Artifact, start: Start, thresholds: Any, seed: int) -> Made:
    """Return what a session generates."""
    rows = len(start.context)
    choose = fc.Sampling(top_k=TOP_K, seed=seed).start(np.zeros((rows, 0), np.int64))
    frames: list[np.ndarray] = []
    with artifact.session(threads=1) as session:
        session.set_threshold(thresholds)
        session.prefill(start.context)
        for actions in start.actions.T:
            token = actions.copy()
            frames.append(token)
            for _ in range(TOKENS_PER_FRAME - 1):
                token = choose(session.step(token)[:, :CODES])
                frames.append(token)
            session.step(token)
        return np.stack(frames, 1), float(session.stats.eligible_replay_ratio)


def rollouts(setup: Setup, decoder: Decoder) -> dict[str, Any]:
    """Return `rolled` of two gates within the greater limit, and keep the tokens for pictures."""
    cases = {case.calibration: case for case in load_cases(decoder.folder / "cases.json", decoder.gate_weights())}
    chosen = {variant.name: cases[within(variant, LIMITS[-1])] for variant in (LEARNED, MEAN)}
    start = start_of(setup)
    made = rolled(setup, decoder, chosen, start)
    kept: dict[str, Any] = {"true": start.true} | {name: tokens for name, (tokens, _) in made.items()}
    np.savez(setup.work / decoder.name / "rollouts.npz", **kept)
    return likenesses(setup, start, made)


def rolled(setup: Setup, decoder: Decoder, cases: Mapping[str, Case], start: Start) -> dict[str, Made]:
    """Return what dense, other draws of it, and every case generate."""
    made = dict[str, Made]()
    for name, case in cases.items():
        with tempfile.TemporaryDirectory() as scratch:
            artifact = _compiled(decoder, case, start, Path(scratch) / "artifact")
            if not made:
                made |= {name: roll(artifact, start, None, seed) for name, seed in SEEDS.items()}
            assert case.replay is not None
            thresholds = list(case.replay.thresholds(artifact.manifest.decoder.config.num_layers))
            made[name] = roll(artifact, start, thresholds, SEEDS["dense"])
            setup.say(f"rollouts of {name}")
    return made


def _compiled(decoder: Decoder, case: Case, start: Start, folder: Path) -> Artifact:
    """Return the decoder compiled for the CPU with a case's gate."""
    assert case.replay is not None
    length = start.context.shape[1] + start.true.shape[1]
    options: dict[str, Any] = {"batch_size": len(start.context), "max_seq_len": length, "output": folder}
    return fc.compile(decoder.model(), target="cpu", replay=case.replay, tokens_per_frame=TOKENS_PER_FRAME, **options)


def likenesses(setup: Setup, start: Start, made: Mapping[str, Made]) -> dict[str, Any]:
    """Return for each rollout the share replayed, and by frame its likeness to the dense one and to the game."""
    frames = setup.pixels()
    pictures = {name: frames(tokens) / 255.0 for name, (tokens, _) in made.items()}
    true = frames(start.true) / 255.0
    image = np.arange(start.true.shape[1]) % TOKENS_PER_FRAME > 0
    found: dict[str, Any] = {}
    for name, (tokens, share) in made.items():
        same = (tokens == made["dense"][0])[:, image].reshape(len(tokens), -1, TOKENS_PER_FRAME - 1)
        against = {"dense": pictures["dense"], "true": true}
        alike = {what: likeness(pictures[name], other) for what, other in against.items()}
        found[name] = {
            "replay_ratio": share,
            "agreement": same.mean((0, 2)).tolist(),
            "errors": {what: like.errors.mean(0).tolist() for what, like in alike.items()},
            "ssim": {what: like.similarity.mean(0).tolist() for what, like in alike.items()},
        }
    return found
