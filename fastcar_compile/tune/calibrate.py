"""Choose one threshold per layer, for a target replay ratio or a limit on the NLL, from a few videos."""

import hashlib
import itertools
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
import torch
from torch import nn

from fastcar_compile.artifact.thresholds import ExpectedLayers, Thresholds
from fastcar_compile.config import ReplayConfig
from fastcar_compile.errors import InputError, names_text
from fastcar_compile.frontend.capture import capture
from fastcar_compile.frontend.model_facts import ModelFacts
from fastcar_compile.gates import GATES, Gate, gate_named
from fastcar_compile.gates.weights import weights_in
from fastcar_compile.ir.pass_manager import run_pipeline
from fastcar_compile.ir.program import DecoderProgram
from fastcar_compile.passes.pipeline import QUANTIZE, analysis_pipeline
from fastcar_compile.runtime.compiled import Artifact
from fastcar_compile.support.values import check_kind, number, path_of, reporter, shown, token_range, token_table, whole
from fastcar_compile.tune.evaluator import Evaluator, of_prefill, with_rows
from fastcar_compile.tune.journal import Journal
from fastcar_compile.tune.rule import Rules
from fastcar_compile.tune.search import Search, Values

CONFIDENCE = 0.9
"""Confidence of the interval. A test counts how often it holds on drawn videos."""

GOAL = 0.02
"""The interval that a calibration should have: two points to either side."""


def expected(search: Search, values: Values) -> ExpectedLayers | None:
    """Return the share that other videos will replay with these thresholds. None: one video says nothing of others.

    Each video is left out once. All layers' thresholds are shifted alike until the other videos replay as much as all
    did, and the share of the video that was left out counts.
    """
    distance, other = search.beside(values)
    shares = np.array([search.outcome(chosen).shares for chosen in (values, other)])
    return interval(shares, distance, search.searched) if shares.shape[1] > 1 else None


def interval(shares: np.ndarray, distance: float, searched: int = 0) -> ExpectedLayers:
    """Return what other videos will replay.

    Args:
        shares: float64 [2, n], n >= 2: of each video, at the thresholds and at those shifted by `distance`.
        searched: videos that found the layers' shares; 0: all.
    """
    count = shares.shape[1]
    left = np.array([_left_out(shares, video, distance) for video in range(count)])
    # A video's own share moves the thresholds of the fold that it judges, so it deviates by n / (n - 1) too much.
    error = float(left.std(ddof=1)) * (count - 1) / count / math.sqrt(count)
    # Few videos give an uncertain deviation, so Student's t is used and not the normal distribution.
    half, middle = error * student(count - 1), float(left.mean())
    replay, low, high = np.clip((middle, middle - half, middle + half), 0.0, 1.0).tolist()
    # The number of videos whose interval is GOAL to either side, if they deviate as much as these.
    deviation = error * math.sqrt(count)
    needed = next(n for n in itertools.count(2) if student(n - 1) * deviation / math.sqrt(n) <= GOAL)
    videos = {"videos": count, "searched": searched or count, "videos_needed": needed}
    return ExpectedLayers(replay=replay, low=low, high=high, confidence=CONFIDENCE, **videos)


def _left_out(shares: np.ndarray, video: int, distance: float) -> float:
    """Return the share of a video where the others replay as much as all did. Shares are linear in a shift.

    Args:
        shares: [2, videos], at the thresholds and at those shifted by `distance`.
    """
    others = np.delete(shares, video, 1).mean(1)
    slope = (others[1] - others[0]) / distance
    # Where the shift changes nothing, as with many equal scores, the video's own share stands.
    if slope <= 0:
        return float(shares[0, video])
    own = (shares[1] - shares[0])[video] / distance
    return float(shares[0, video] + own * (shares[0].mean() - others[0]) / slope)


def student(freedom: int) -> float:
    """Return the quantile of Student's t distribution that ends the interval of CONFIDENCE.

    Expansion 26.7.5 of Abramowitz and Stegun, Handbook of Mathematical Functions; exact for one and two degrees.
    """
    tail = (1 + CONFIDENCE) / 2
    if freedom == 1:
        return math.tan(math.pi * (tail - 0.5))
    if freedom == 2:
        return (2 * tail - 1) / math.sqrt(2 * tail * (1 - tail))
    z = NormalDist().inv_cdf(tail)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + sum(term / freedom**power for power, term in enumerate(terms, 1))


@dataclass(frozen=True)
class Setting:
    """How videos are read: tokens before decoding starts, `counted` and `search_videos` as `calibrate` takes them."""

    prompt: int = 1
    counted: tuple[int, int] | None = None
    search_videos: int | None = None

    def facts(self) -> dict[str, Any]:
        """Return JSON-safe values for a key: what changes a measurement."""
        return {"prompt": self.prompt} | ({} if self.counted is None else {"counted": self.counted})


def rules_of(replay: ReplayConfig, layers: int) -> Rules:
    """Return everything but the thresholds that decides a replay."""
    heads = replay.heads_of(layers) or (None,) * layers
    gates = tuple(_gate(replay, layer, chosen, layers) for layer, chosen in enumerate(heads))
    return Rules(gates, replay.max_chain, replay.couple_cfg, replay.refresh_every, replay.draft)


def _gate(replay: ReplayConfig, layer: int, heads: tuple[tuple[int, float], ...] | None, layers: int) -> Gate:
    """Return one layer's gate. An artifact holds no gate weights for a layer that never replays."""
    weights = replay.gate_weights
    if weights is None:
        return gate_named(replay.gate, heads, rotary=replay.rotary)
    if weights.layers and layer not in weights.layers and replay.thresholds(layers)[layer] is None:
        return gate_named("never")
    return gate_named(replay.gate, heads, weights.layer(layer))


PRECISIONS = ("none", "w8a8", "w4a8")
"""What a model can be measured in. An artifact has its own precision."""

BATCH_TOKENS, MOST_ROWS = 512, 8
"""Tokens of a chunk of all videos of a batch, and most videos per batch. An artifact of more rows uses its own."""

SEARCH_TOKENS = 16384
"""Where the videos hold more tokens, the layers' shares are found on some of them, of about as many tokens."""


def calibrate(
    source: Artifact | nn.Module,
    videos: Any,
    *,
    replay: ReplayConfig | None = None,
    tokens_per_frame: int | None = None,
    quant: str = "none",
    target_replay: float | None = None,
    max_nll_increase: float | None = None,
    prompt: int = 1,
    counted: tuple[int, int] | None = None,
    search_videos: int | None = None,
    journal: str | Path | None = None,
    progress: Callable[[str], None] | None = None,
) -> Thresholds:
    """Choose one threshold per layer on videos like those that will be decoded. Deterministic.

    docs/reference/gates.md describes the method. Give exactly one of `target_replay` and `max_nll_increase`.

    Args:
        source: an artifact, with the gate that it was compiled with. Or a decoder as `compile` takes it, with `replay`,
            `tokens_per_frame` (default: its config's) and `quant` (one of PRECISIONS); then nothing is compiled. A
            layer with threshold None never replays.
        videos: int64 [N, T], prompt included, not the videos that judge the result. With couple_cfg: the conditional
            videos, then their unconditional partners in the same order.
        target_replay: least share of the forwards t >= F that replay, 0 to 1.
        max_nll_increase: greatest relative increase of the NLL; 0.1 is ten per cent.
        prompt: tokens before decoding starts.
        counted: the ids first .. end - 1 count in the NLL. Others are given to the decoder, such as a world model's
            actions; their forwards replay like any. None: all count.
        search_videos: on how many of the videos the layers' shares are found (with couple_cfg: pairs); all of them meet
            the target. None: as many as hold SEARCH_TOKENS tokens. `max_nll_increase` measures all throughout.
        journal: file that keeps every measurement. An interrupted calibration continues from it.
        progress: called with one line after every measurement. The logger `fastcar_compile` has it too, at INFO.

    Raises:
        InputError: bad arguments or videos, a dense artifact, or a target that cannot be reached.
    """
    target_replay = None if target_replay is None else number("target_replay", target_replay)
    max_nll_increase = None if max_nll_increase is None else number("max_nll_increase", max_nll_increase)
    _check_goal(target_replay, max_nll_increase)
    check_kind("source", source, (Artifact, nn.Module), "an artifact, or a decoder as `compile` takes it")
    check_kind("replay", replay, (ReplayConfig, type(None)), "a ReplayConfig")
    say = reporter(progress)
    journal = None if journal is None else path_of("journal", journal)
    search_videos = None if search_videos is None else whole("search_videos", search_videos, 1)
    setting = Setting(whole("prompt", prompt, 1), token_range("counted", counted), search_videos)
    tokens_per_frame = None if tokens_per_frame is None else whole("tokens_per_frame", tokens_per_frame, 1)
    tokens = token_table("the videos", videos)
    if isinstance(source, Artifact):
        program, replay = _of_artifact(source)
    else:
        program, replay = program_of(source, tokens.shape, tokens_per_frame, quant), replay or ReplayConfig()
    search, key = search_of(program, replay, tokens, setting, journal, say)
    if target_replay is not None:
        values, goal = search.for_replay(target_replay), f"target_replay={target_replay:g}"
    else:
        # Losses are increases of the log NLL, so the relative limit becomes a logarithm.
        assert max_nll_increase is not None
        values, goal = search.for_loss(math.log1p(max_nll_increase)), f"max_nll_increase={max_nll_increase:g}"
    return _thresholds(search, values, replay.gate, goal, key)


def _check_goal(target_replay: float | None, max_nll_increase: float | None) -> None:
    if (target_replay is None) == (max_nll_increase is None):
        hint = "give one of them, for example target_replay=0.5"
        raise InputError("exactly one of target_replay and max_nll_increase is needed", hint=hint)
    if target_replay is not None and not 0 <= target_replay <= 1:
        raise InputError(f"target_replay is {target_replay}", hint="give a share from 0 to 1")
    if max_nll_increase is not None and not 0 <= max_nll_increase < math.inf:
        raise InputError(f"max_nll_increase is {max_nll_increase}", hint="give 0.1 for ten per cent")


def search_of(
    program: DecoderProgram,
    replay: ReplayConfig,
    videos: np.ndarray,
    setting: Setting | None = None,
    journal: str | Path | None = None,
    progress: Callable[[str], None] | None = None,
) -> tuple[Search, str]:
    """Return a threshold search for this gate, and the SHA-256 of everything that its measurements depend on.

    Args:
        program: dense, with a prefill graph. videos: int64 [N, T]. setting: None: a prompt of one token.
        journal, progress: as for `calibrate`.

    Raises:
        InputError: the videos do not fit the program.
    """
    layers = program.config.num_layers
    able = tuple(t is not None for t in replay.thresholds(layers))
    setting = setting or Setting()
    key = program_key(program, replay.to_json() | {"threshold": None} | setting.facts(), videos)
    book = Journal(None if journal is None else Path(journal), f"{key} by video")

    def search(on: np.ndarray, kept: Journal) -> Search:
        chunk = program.config.prefill_chunk or 1  # without a prefill program the evaluator refuses, in words
        rows = batch_rows(len(on), chunk, replay.couple_cfg)
        wide = with_rows(program, rows)
        evaluator = Evaluator(wide, on, rules_of(replay, layers), setting.prompt, counted=setting.counted)
        where = "all videos" if len(on) == len(videos) else f"{len(on)} of {len(videos)} videos"

        def told(line: str) -> None:
            if progress is not None:
                progress(f"{where}: {line}")

        return Search(evaluator, GATES[replay.gate], able, kept, told, evaluator.spared)

    found, some = search(videos, book), some_of(videos, replay.couple_cfg, SEARCH_TOKENS, setting.search_videos)
    if len(some) < len(videos):
        # The search on some videos is built at its first use, and once: building measures the dense decoder.
        found.few = cache(lambda: search(some, book.part(f"{len(some)} videos")))
    return found, key


def batch_rows(videos: int, chunk: int, coupled: bool) -> int:
    """Return the rows of equal batches of about BATCH_TOKENS tokens per chunk; even where videos are pairs."""
    most = min(MOST_ROWS, max(1, round(BATCH_TOKENS / chunk)))
    # Equal batches waste the fewest rows: the last batch is filled up with copies.
    rows = -(-videos // -(-videos // most))
    return rows + rows % 2 if coupled else rows


def some_of(videos: np.ndarray, coupled: bool, tokens: int, wanted: int | None = None) -> np.ndarray:
    """Return as many videos as hold about so many tokens, evenly spaced among these; with `coupled`, whole pairs.

    Args:
        wanted: how many, or pairs, instead.
    """
    parts = 2 if coupled else 1
    units = len(videos) // parts
    count = wanted or max(1, round(tokens / (parts * videos.shape[1])))
    if count >= units:
        return videos
    # Even spacing takes videos from everywhere, also where the file is sorted by scene.
    chosen = np.arange(count) * units // count
    return np.concatenate([videos[part * units + chosen] for part in range(parts)])


def _of_artifact(artifact: Artifact) -> tuple[DecoderProgram, ReplayConfig]:
    """Return the program to calibrate and the options of its gates. Raise InputError when the artifact is dense."""
    replay, thresholds = artifact.manifest.options.replay, artifact.manifest.layers.thresholds
    if replay is None or all(t is None for t in thresholds):
        raise InputError("the artifact has no gate to calibrate", hint="compile it with a ReplayConfig")
    able = tuple(None if t is None else 1.0 for t in thresholds)
    changes: dict[str, Any] = {"threshold": able}
    if replay.gate_weights is not None:
        changes["gate_weights"] = weights_in(artifact.params, len(able))
    return of_prefill(artifact.program), replay.model_copy(update=changes)


def program_of(
    model: nn.Module, videos: tuple[int, ...], tokens_per_frame: int | None = None, quant: str = "none"
) -> DecoderProgram:
    """Return the dense program of a decoder: at most MOST_ROWS rows, prefill chunks of one frame.

    Its caches hold no more positions than the videos need.

    Args:
        videos: their shape (N, T). quant: one of PRECISIONS.

    Raises:
        InputError: the model does not give its tokens_per_frame or max_seq_len, or quant is unknown.
    """
    if not isinstance(quant, str) or quant not in PRECISIONS:
        raise InputError(f"quant is {shown(quant)}", hint=f"choose from {names_text(PRECISIONS, quant)}")
    facts = ModelFacts.of(model)
    frame, length = facts.tokens_per_frame if tokens_per_frame is None else tokens_per_frame, facts.max_seq_len
    if frame is None or length is None:
        raise InputError("the model does not say its tokens_per_frame and max_seq_len", hint="give tokens_per_frame")
    frame = whole("tokens_per_frame", frame, 1)
    # The last token of a video is a target and never an input.
    length = min(length, max(videos[1] - 1, frame))
    chunk = min(frame, length)
    rows = batch_rows(videos[0], chunk, coupled=False)
    program = capture(model, batch_size=rows, max_seq_len=length, tokens_per_frame=frame, prefill_chunk=chunk)
    return run_pipeline(program, [*analysis_pipeline(), *([] if quant == "none" else [QUANTIZE[quant]])])


def _thresholds(search: Search, values: Values, gate: str, goal: str, key: str) -> Thresholds:
    found = search.outcome(values)
    return Thresholds(
        gate=gate,
        values=values,
        replay=found.replay,
        per_layer=found.ratios,
        nll=search.dense_nll * math.exp(found.loss),
        nll_dense=search.dense_nll,
        goal=goal,
        inputs=key,
        expected=expected(search, values),
        spared=None if all(part == 1 for part in search.spared) else search.net(found),
    )


def program_key(program: DecoderProgram, options: dict[str, Any], videos: np.ndarray) -> str:
    """Return the SHA-256 of weights, JSON-safe options and videos: everything that a measurement depends on."""
    digest = hashlib.sha256()
    for name, tensor in sorted(program.params.items()):
        digest.update(name.encode())
        # Bytes are hashed, because numpy knows no bfloat16.
        digest.update(tensor.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    digest.update(json.dumps(options, sort_keys=True).encode())
    digest.update(json.dumps([program.config.prefill_chunk, program.config.tokens_per_frame]).encode())
    if program.config.ring is not None:
        digest.update(repr(program.config.ring).encode())
    digest.update(videos.tobytes())
    return digest.hexdigest()
