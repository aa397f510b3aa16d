"""Drafts of the game decoder, fitted and distilled, and what they have to beat."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from replay_doom.curves import Point, most_replay
from replay_doom.sequences import spaced
from replay_doom.setup import COUNTED, DOOM, TOKENS_PER_FRAME, Setup

import fastcar_compile as fc
from fastcar_compile.tune.calibrate import program_of, search_of
from fastcar_compile.tune.evaluate import Case, load_cases
from fastcar_compile.tune.training import distill, train

SHARES = (0.28, 0.2, 0.14)
DISTILLED, STEPS, REPLAY, RATE = (0.28, 0.2), 500, 0.8, 0.01
"""The shares that are distilled, the steps, and the replay and peak rate in them."""

TARGETS = (0.4, 0.5, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95, 0.98, 1.0)
SEQUENCES, SEED = 96, 5
PLAIN = ("input_delta", "learned")
OPEN = 1e3
"""A threshold that every score passes."""


def means(row: dict[str, Any], shares: dict[str, float]) -> tuple[float, float, float, float]:
    """Return replay, MLP bytes spared net of the drafts', and the NLL with replay and dense.

    Args:
        shares: of kinds of motion, of which those that the row has are taken.
    """
    kinds = [(shares[name], row["groups"][name]) for name in shares if name in row["groups"]]
    weights = np.array([weight for weight, _ in kinds]) / sum(weight for weight, _ in kinds)
    replay, net, nll, dense = (
        float(weights @ [float(group[name]) for _, group in kinds])
        for name in ("replay_ratio", "mlp_weights_spared", "nll", "nll_dense")
    )
    return replay, net, nll, dense


def point_of(row: dict[str, Any], shares: dict[str, float]) -> tuple[float, float, float]:
    """Return replay, net bytes spared, and NLL over dense; arguments as for `means`."""
    replay, net, nll, dense = means(row, shares)
    return replay, net, nll / dense


def sequences(setup: Setup, steps: int = 0) -> np.ndarray:
    """Return the sequences that a draft is fitted to, and then more: as many as the steps read without a repetition."""
    split, frames = setup.tokens("calibration"), setup.counts.frames
    random, every = np.random.default_rng(SEED), split.sequences(frames)
    starts = np.sort(random.choice(every, SEQUENCES, replace=False))
    wanted = steps * batch_of(frames)
    more = random.choice(every, max(0, wanted - SEQUENCES), replace=False)
    return split.take(np.concatenate([starts, more]), frames)


def batch_of(frames: int) -> int:
    """Return the sequences that a step of a distillation decodes."""
    return round(distill.STEP_TOKENS / (frames * TOKENS_PER_FRAME))


def fitted(setup: Setup, share: float, steps: int = 0) -> fc.Draft:
    """Return the draft of a share, fitted to sequences of the calibration's play; with `steps` distilled on more."""
    began = time.perf_counter()
    found = fc.fit_draft(
        setup.dense.model(),
        sequences(setup, steps),
        share=share,
        distill_steps=steps,
        distill_replay=REPLAY,
        distill_rate=RATE,
        prompt=TOKENS_PER_FRAME,
        counted=COUNTED,
        checkpoint=setup.work / "draft.checkpoint",
    )
    print(f"share {share}, {steps} steps: fitted in {time.perf_counter() - began:.0f} s", flush=True)
    found.save(file_of(setup, share, steps))
    return found


def file_of(setup: Setup, share: float, steps: int = 0) -> Any:
    """Return where the draft of a share is kept."""
    return setup.work / f"draft-{share}{'-distilled' if steps else ''}.safetensors"


def narrow(setup: Setup, draft: fc.Draft) -> fc.Draft:
    """Return a draft that never reads the cached output, distilled as others are, but with replay of every row."""
    layers = {i: gate_of(draft, i) for i in range(setup.dense.model().config.num_hidden_layers)}
    for i, own in draft.layers.items():
        layers[i] |= own.params() | {"gains": torch.zeros_like(own.gains)}
    batch = batch_of(setup.counts.frames)
    options = train.Options("learned", REPLAY, 1, STEPS, batch, 0, start=draft.digest, counted=COUNTED)
    setting = train.Setup(TOKENS_PER_FRAME, TOKENS_PER_FRAME, checkpoint=setup.work / "narrow.checkpoint")
    began = time.perf_counter()
    model, videos = setup.dense.model(), sequences(setup, STEPS)
    found = distill.distilled(model, videos, fc.Draft.of(layers), options, setting, RATE, OPEN)
    print(f"narrower MLPs: distilled in {time.perf_counter() - began:.0f} s", flush=True)
    return found


def gate_of(draft: fc.Draft, layer: int) -> dict[str, torch.Tensor]:
    """Return the gate of a layer."""
    assert draft.gate is not None
    return {name: t.float() for name, t in draft.gate.layer(layer).params().items()}


def cases_of(setup: Setup, draft: fc.Draft) -> list[Case]:
    """Return cases of a draft: one threshold for all layers, near every target on calibration sequences."""
    split, counts = setup.tokens("calibration"), setup.counts
    videos = split.take(spaced(split, counts.calibration, counts.frames), counts.frames)
    config = fc.ReplayConfig(draft=draft)
    program = program_of(setup.dense.model(), videos.shape)
    search = search_of(program, config, videos, setup.setting)[0]
    return [Case("draft", config.model_copy(update={"threshold": values}), t)
            for values, t in zip(search.path(TARGETS), TARGETS, strict=True)]  # fmt: skip


def by_chance(case: Case, row: dict[str, Any]) -> Case:
    """Return the case with decisions by chance, each layer as often as it replayed in a row of the case."""
    assert case.replay is not None
    # The evaluator keeps the MLP's input for a draft, whatever the gate; a compiled gate `random` would not.
    changes = {"gate": "random", "gate_weights": None, "threshold": tuple(row["replay_by_layer"])}
    return replace(case, replay=case.replay.model_copy(update=changes))


def methods(setup: Setup, only: Sequence[str] = ()) -> dict[str, list[Case]]:
    """Return what is compared, by its name in tables: cases of more and more replay. only: these names; none: all."""
    plain = load_cases(DOOM / "cases.json", setup.dense.gate_weights())

    def drafted(share: float, steps: int = 0) -> list[Case]:
        return cases_of(setup, fitted(setup, share, steps))

    def narrower() -> list[Case]:
        return cases_of(setup, narrow(setup, fitted(setup, DISTILLED[0])))

    makers: dict[str, Callable[[], list[Case]]] = {}
    makers |= {gate: partial(list, [case for case in plain if case.gate == gate]) for gate in PLAIN}
    makers |= {f"draft, share {share}": partial(drafted, share) for share in SHARES}
    makers |= {f"distilled, share {share}": partial(drafted, share, STEPS) for share in DISTILLED}
    makers["without cache"] = narrower
    found = {name: make() for name, make in makers.items() if not only or name in only}
    if "without cache" in found:
        found["narrower MLPs"] = found["without cache"][-1:]  # it replays every row
    return found


def cost_at(points: list[tuple[float, float, float]], net: float) -> float:
    """Return NLL over dense where so many net bytes are spared, between measured points; NaN beyond them."""
    found = sorted((n, cost) for _, n, cost in points)
    return float(np.interp(net, [0.0, *(n for n, _ in found)], [1.0, *(c for _, c in found)], right=np.nan))


def most(points: list[tuple[float, float, float]], limit: float) -> tuple[float, float]:
    """Return the most replay, and the most net bytes, within a limit of NLL over dense."""
    replays = [Point(0.0, 1.0), *(Point(r, cost) for r, _, cost in sorted(points))]
    nets = [Point(0.0, 1.0), *sorted((Point(n, cost) for _, n, cost in points), key=lambda p: p.replay)]
    return most_replay(replays, limit), most_replay(nets, limit)
