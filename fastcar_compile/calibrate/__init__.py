"""Thresholds per layer for a given replay ratio or a given loss of likelihood, from a few videos."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fastcar_compile.calibrate.evaluator import Evaluator, Rules
from fastcar_compile.calibrate.search import Journal, Search, Values
from fastcar_compile.calibrate.thresholds import Thresholds
from fastcar_compile.config import ReplayConfig
from fastcar_compile.errors import InputError
from fastcar_compile.gates import GATES, gate_named
from fastcar_compile.ir import DecoderProgram
from fastcar_compile.runtime.artifact import Artifact


def calibrate(
    artifact: Artifact,
    videos: Any,
    *,
    target_replay: float | None = None,
    max_nll_increase: float | None = None,
    prompt: int = 1,
    journal: str | Path | None = None,
    progress: Callable[[str], None] | None = None,
) -> Thresholds:
    """Choose the thresholds of an artifact on videos that are like those it will decode.

    Damage curves (teacher-forced NLL over thresholds at quantiles of the recorded scores) are measured per layer, on
    the dense decoder and again on top of the other layers' choices; dynamic programming allocates the ratios, and
    exchanges between layers refine the result as measured jointly. Deterministic.

    Args:
        artifact: compiled with the gate to calibrate; a layer that was compiled with threshold None stays closed.
        videos: int64 [N, T], prompt included; not those that the result is judged by.
        target_replay: least share of the forwards t >= F that replay, 0 to 1.
        max_nll_increase: greatest relative increase of the NLL (0.1: ten per cent). Exactly one of the two.
        prompt: tokens before decoding starts.
        journal: file that keeps every measurement; an interrupted calibration goes on from it.
        progress: called with a line after every measurement.

    Raises:
        InputError: bad arguments or videos, a dense artifact, or a target that cannot be reached.
    """
    if (target_replay is None) == (max_nll_increase is None):
        raise InputError("exactly one of target_replay and max_nll_increase is needed")
    if target_replay is not None and not 0 <= target_replay <= 1:
        raise InputError(f"target_replay is {target_replay}", mend="give a share from 0 to 1")
    if max_nll_increase is not None and not 0 <= max_nll_increase < math.inf:
        raise InputError(f"max_nll_increase is {max_nll_increase}", mend="give 0.1 for ten per cent")
    replay = replay_of(artifact)
    tokens = np.ascontiguousarray(videos.numpy() if isinstance(videos, torch.Tensor) else np.asarray(videos))
    evaluator = Evaluator(artifact.program, tokens, rules_of(replay, artifact), prompt)
    key = _key(artifact.program, replay, tokens, prompt)
    book = Journal(None if journal is None else Path(journal), key)
    comparison = GATES[replay.gate].comparison
    search = Search(evaluator, comparison, [s.replay for s in artifact.sites], book, progress or (lambda _line: None))
    if target_replay is not None:
        values, goal = search.for_replay(target_replay), f"target_replay={target_replay:g}"
    else:
        assert max_nll_increase is not None
        values, goal = search.for_damage(math.log1p(max_nll_increase)), f"max_nll_increase={max_nll_increase:g}"
    return _thresholds(search, values, replay.gate, goal, key)


def replay_of(artifact: Artifact) -> ReplayConfig:
    """The replay options that an artifact was compiled with.

    Raises:
        InputError: it is dense.
    """
    data = artifact.manifest.sections["config"]["replay"]
    if data is None or not any(s.replay for s in artifact.sites):
        raise InputError("the artifact has no gate to calibrate", mend="compile it with a ReplayConfig")
    return ReplayConfig.from_json(data)


def rules_of(replay: ReplayConfig, artifact: Artifact) -> Rules:
    """What decides besides the thresholds."""
    gates = tuple(gate_named(replay.gate, s.heads) for s in artifact.sites)
    return Rules(gates, replay.max_chain, replay.couple_cfg, replay.refresh_every)


def _thresholds(search: Search, values: Values, gate: str, goal: str, key: str) -> Thresholds:
    found = search.outcome(values)
    return Thresholds(
        gate=gate,
        values=values,
        replay=found.replay,
        per_layer=found.ratios,
        nll=search.dense_nll * math.exp(found.damage),
        nll_dense=search.dense_nll,
        goal=goal,
        inputs=key,
    )


def _key(program: DecoderProgram, replay: ReplayConfig, videos: np.ndarray, prompt: int) -> str:
    digest = hashlib.sha256()
    for name, tensor in sorted(program.params.items()):
        digest.update(name.encode())
        digest.update(tensor.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    digest.update(json.dumps(replay.to_json() | {"threshold": None, "prompt": prompt}, sort_keys=True).encode())
    digest.update(json.dumps([program.config.prefill_chunk, program.config.tokens_per_frame]).encode())
    digest.update(videos.tobytes())
    return digest.hexdigest()


__all__ = ["Evaluator", "Rules", "Thresholds", "calibrate", "replay_of", "rules_of"]
