"""What a draft of the MLPs spares, and what it costs: docs/explanation/drafts.md.

    python benchmarks/drafts.py quality --data build/doom/data --json quality.json
    python benchmarks/drafts.py shapes
    python benchmarks/drafts.py speed --quality quality.json
    python benchmarks/drafts.py wide

quality: the game decoder of examples/doom, with drafts fitted to calibration play and measured on the held-out
sequences of docs/measurements/doom.md, beside the plain gates with their thresholds of examples/doom/cases.json.
shapes: the decoders of drawn videos as they were trained, with a draft of a fifth and gate `learned` as it is shipped.
speed: frames/s of the game decoder, dense, with gate `learned` and with each draft, at thresholds within 1.10x.
wide: the same of 8 layers of 2048 x 5504 with random weights and a draft of an eighth. Four of five visits replay.
"""

import argparse
import json
import math
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from replay_doom.curves import Point, most_replay
from replay_doom.sequences import RICH, groups_of, spaced
from replay_doom.setup import COUNTED, DOOM, LIMITS, TOKENS_PER_FRAME, Counts, Setup
from replay_doom.weighting import natural_shares
from replay_quality.decoders import DECODERS, TRAINING_SEED
from speed.wide import wide

import fastcar_compile as fc
from fastcar_compile.tune.calibrate import program_of, search_of
from fastcar_compile.tune.evaluate import Case, Study, load_cases

SHARES = (0.28, 0.2, 0.14)
TARGETS = (0.4, 0.5, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95)
SEQUENCES, SEED = 96, 5
PLAIN = ("input_delta", "learned")


def spared(row: dict[str, Any], sizes: list[float], shares: dict[str, float]) -> tuple[float, float, float]:
    """Return replay, MLP bytes spared net of the drafts', and NLL over dense, with kinds of motion as in all play."""
    kinds = [(shares[name], row["groups"][name]) for name in shares if name in row["groups"]]
    weights = np.array([weight for weight, _ in kinds]) / sum(weight for weight, _ in kinds)
    layers = weights @ np.array([group["replay_by_layer"] for _, group in kinds])
    nll, dense = (float(weights @ [float(group[name]) for _, group in kinds]) for name in ("nll", "nll_dense"))
    return float(layers.mean()), float((layers * (1 - np.array(sizes))).mean()), nll / dense


def fitted(setup: Setup, share: float) -> fc.Draft:
    """Return the draft of a share, fitted to sequences of the calibration's play."""
    split, frames = setup.tokens("calibration"), setup.counts.frames
    random = np.random.default_rng(SEED)
    starts = np.sort(random.choice(split.sequences(frames), SEQUENCES, replace=False))
    began = time.perf_counter()
    found = fc.fit_draft(
        setup.dense.model(),
        split.take(starts, frames),
        share=share,
        prompt=TOKENS_PER_FRAME,
        counted=COUNTED,
        checkpoint=setup.work / "draft.checkpoint",
    )
    print(f"share {share}: fitted in {time.perf_counter() - began:.0f} s", flush=True)
    found.save(setup.work / f"draft-{share}.safetensors")
    return found


def sizes_of(draft: fc.Draft | None, layers: int, intermediate: int) -> list[float]:
    """Return each layer's draft as a share of its MLP's weights."""
    drafts = {} if draft is None else draft.layers
    return [drafts[i].size.share(intermediate, gated=True) if i in drafts else 0.0 for i in range(layers)]


def cases_of(setup: Setup, draft: fc.Draft) -> list[Case]:
    """Return cases of a draft: one threshold for all layers, near every target on calibration sequences."""
    split, counts = setup.tokens("calibration"), setup.counts
    videos = split.take(spaced(split, counts.calibration, counts.frames), counts.frames)
    config = fc.ReplayConfig(draft=draft)
    program = program_of(setup.dense.model(), videos.shape)
    search = search_of(program, config, videos, setup.setting)[0]
    return [Case("draft", config.model_copy(update={"threshold": values}), t)
            for values, t in zip(search.path(TARGETS), TARGETS, strict=True)]  # fmt: skip


def quality(setup: Setup, output: Path | None) -> None:
    """Print replay and bytes spared within each limit."""
    split, counts = setup.tokens("held_out"), setup.counts
    starts = spaced(split, counts.held_out, counts.frames, RICH)
    study = Study(
        program_of(setup.dense.model(), (len(starts), counts.frames * TOKENS_PER_FRAME)),
        split.take(starts, counts.frames),
        decoder="trained",
        prompt=setup.setting.prompt,
        counted=COUNTED,
        groups=groups_of(split, starts, counts.frames, counts.prompt),
    )
    shares, config = natural_shares(split), setup.dense.model().config
    kinds = {"all": shares, "turning": {"turning": 1.0}}
    plain = load_cases(DOOM / "cases.json", setup.dense.gate_weights())
    methods: dict[str, tuple[list[float], list[Case]]] = {
        gate: (sizes_of(None, 5, 1), [c for c in plain if c.gate == gate]) for gate in PLAIN
    }
    for share in SHARES:
        draft = fitted(setup, share)
        sizes = sizes_of(draft, config.num_hidden_layers, config.intermediate_size)
        methods[f"draft, {sum(sizes) / len(sizes):.0%}"] = sizes, cases_of(setup, draft)
    found = dict[str, Any]()
    for name, (sizes, cases) in methods.items():
        rows = study.rows(cases)
        for kind, own in kinds.items():
            points = sorted(spared(row, sizes, own) for row in rows)
            replays = [Point(0.0, 1.0), *(Point(r, cost) for r, _, cost in points)]
            nets = [Point(0.0, 1.0), *sorted((Point(n, cost) for _, n, cost in points), key=lambda p: p.replay)]
            most = {limit: (most_replay(replays, limit), most_replay(nets, limit)) for limit in LIMITS}
            found[f"{name}, {kind}"] = [list(point) for point in points]
            text = "; ".join(f"{limit:.2f}x: replay {r:.1%}, net bytes {n:.1%}" for limit, (r, n) in most.items())
            print(f"{name}, {kind}: {text}", flush=True)
        within = [c for c, r in zip(cases, rows, strict=True) if spared(r, sizes, shares)[2] <= LIMITS[-1]]
        best = max(within, key=lambda case: spared(rows[cases.index(case)], sizes, shares)[0])
        found[f"{name}, thresholds"] = best.to_json()
    if output is not None:
        output.write_text(json.dumps(found, indent=1) + "\n", "utf-8")


def shapes() -> None:
    """Print replay and bytes spared of the drawn decoders, and the fit's time."""
    for decoder in (d for d in DECODERS if not d.tuned):
        model, videos = decoder.model(), decoder.videos(SEQUENCES, TRAINING_SEED)
        began = time.perf_counter()
        draft = fc.fit_draft(model, videos, share=SHARES[1])
        print(f"{decoder.name}: fitted in {time.perf_counter() - began:.0f} s", flush=True)
        held_out, config = decoder.held_out(), model.config
        study = Study(program_of(model, held_out.shape), held_out, decoder=decoder.name)
        sizes = sizes_of(draft, config.num_hidden_layers, config.intermediate_size)
        learned = fc.TrainedGate.load(decoder.folder / "gates" / "learned.safetensors").replay_config()
        for replay, own in ((learned, [0.0] * len(sizes)), (fc.ReplayConfig(draft=draft), sizes)):
            calibration = decoder.calibration(decoder.calibration_videos)
            search = search_of(program_of(model, calibration.shape), replay, calibration)[0]
            cases = [Case("path", replay.model_copy(update={"threshold": v}), t)
                     for v, t in zip(search.path(TARGETS), TARGETS, strict=True)]  # fmt: skip
            rows = study.rows(cases)
            costs = [row["nll"] / row["nll_dense"] for row in rows]
            nets = [
                sum(r * (1 - s) for r, s in zip(row["replay_by_layer"], own, strict=True)) / len(own) for row in rows
            ]
            name = "learned" if replay is learned else f"draft, {sum(sizes) / len(sizes):.0%}"
            for limit in LIMITS:
                found = [
                    most_replay([Point(0.0, 1.0), *sorted(map(Point, shares, costs), key=lambda p: p.replay)], limit)
                    for shares in ([row["replay_ratio"] for row in rows], nets)
                ]
                print(
                    f"{decoder.name}, {name}, {limit:.2f}x: replay {found[0]:.1%}, net bytes {found[1]:.1%}", flush=True
                )


def turns(
    sessions: dict[str, fc.Session], tokens: np.ndarray, prompt: int, frame: int, rounds: int
) -> dict[str, float]:
    """Return the least seconds of a frame of each session; the first frame behind the prompt never replays."""
    seconds = dict.fromkeys(sessions, math.inf)
    for _ in range(rounds):
        for name, session in sessions.items():
            session.reset()
            began = 0.0
            session.prefill(tokens[:, :prompt])
            for at in range(prompt, tokens.shape[1]):
                if at == prompt + frame:
                    began = time.perf_counter()
                session.step(tokens[:, at])
            frames = (tokens.shape[1] - prompt - frame) / frame
            seconds[name] = min(seconds[name], (time.perf_counter() - began) / frames)
    return seconds


def show(seconds: dict[str, float], sessions: dict[str, fc.Session], threads: int) -> None:
    """Print frames/s, those over dense, and what replayed."""
    for name, value in seconds.items():
        replay = sessions[name].stats.replay_ratio
        print(
            f"{threads} threads, {name}: {1 / value:.2f} frames/s, {seconds['dense'] / value:.2f}x, replay {replay:.1%}"
        )


def opened(artifacts: dict[str, fc.Artifact], threads: int) -> Iterator[tuple[str, fc.Session]]:
    """Yield a session of each artifact."""
    for name, artifact in artifacts.items():
        yield name, artifact.session("cpu", threads=threads)


def speed(setup: Setup, found: dict[str, Any], rounds: int) -> None:
    """Print frames/s of the game decoder at the thresholds within the greater limit."""
    common: dict[str, Any] = {"target": "cpu", "quant": "w8a8", "kv": "float16", "max_seq_len": 1040}
    configs: dict[str, Any] = {"dense": None}
    learned = fc.ReplayConfig.from_json(found["learned, thresholds"]["replay"])
    configs["learned"] = learned.model_copy(update={"gate_weights": setup.dense.gate_weights()})
    for share in SHARES:
        draft = fc.Draft.load(setup.work / f"draft-{share}.safetensors")
        name = next(n for n in found if n.startswith("draft") and n.endswith("thresholds") and _is(found[n], draft))
        configs[name.removesuffix(", thresholds")] = fc.ReplayConfig(
            draft=draft, threshold=found[name]["replay"]["threshold"]
        )
    split = setup.tokens("held_out")
    tokens = split.take(spaced(split, 1, setup.counts.frames)[:1], setup.counts.frames)
    with tempfile.TemporaryDirectory() as folder:
        model = setup.dense.model()
        artifacts = {n: fc.compile(model, output=Path(folder, n), replay=r, **common) for n, r in configs.items()}
        for threads in (1, 2):
            sessions = dict(opened(artifacts, threads))
            show(turns(sessions, tokens, setup.setting.prompt, TOKENS_PER_FRAME, rounds), sessions, threads)


def _is(case: dict[str, Any], draft: fc.Draft) -> bool:
    return case["replay"].get("draft") == draft.name


def wide_speed(rounds: int) -> None:
    """Print frames/s of the wide decoder: four of five visits of a slot replay."""
    frame, model = 16, wide()
    hidden, inner, layers = (
        getattr(model.config, n) for n in ("hidden_size", "intermediate_size", "num_hidden_layers")
    )
    neurons, rank, units = inner // 8 // 32 * 32, hidden // 8, 16
    shapes = {"gate_proj": (neurons, hidden), "up_proj": (neurons, hidden), "inner": (rank, hidden)}
    shapes |= {"outer": (hidden, neurons + rank), "bias": (hidden,), "gains": (16,), "w1": (units, 2 * hidden)}
    shapes |= {"b1": (units,), "w2": (units,), "b2": (1,)}
    parts = {name: torch.randn(shape) * 0.02 for name, shape in shapes.items()}
    draft = fc.Draft.of(dict.fromkeys(range(layers), parts | {"edges": torch.arange(15.0)}))
    options: dict[str, Any] = {"threshold": math.inf, "max_chain": 4}
    configs = {
        "dense": None,
        "plain": fc.ReplayConfig(gate="learned", gate_weights=draft.gate, **options),
        f"draft of {draft.layers[0].size.share(inner, gated=True):.0%}": fc.ReplayConfig(draft=draft, **options),
    }
    tokens = np.random.default_rng(0).integers(0, model.config.vocab_size, (1, frame * 12 + 1))
    common: dict[str, Any] = {
        "target": "cpu",
        "quant": "w8a8",
        "tokens_per_frame": frame,
        "max_seq_len": tokens.shape[1],
    }
    with tempfile.TemporaryDirectory() as folder:
        artifacts = {n: fc.compile(model, output=Path(folder, n), replay=r, **common) for n, r in configs.items()}
        for threads in (1, 2):
            sessions = dict(opened(artifacts, threads))
            show(turns(sessions, tokens, 1, frame, rounds), sessions, threads)


def main() -> None:
    """Run the requested measurement."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("quality", "shapes", "speed", "wide"))
    parser.add_argument(
        "--data", type=Path, default=DOOM.parents[1] / "build" / "doom" / "data", help="recorded if missing"
    )
    parser.add_argument("--work", type=Path, default=DOOM.parents[1] / "build" / "doom" / "drafts")
    parser.add_argument("--quality", type=Path, help="what quality wrote with --json")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    setup = Setup(options.data, DOOM / "world", DOOM, options.work, Counts(), print)
    if options.what in ("shapes", "wide"):
        shapes() if options.what == "shapes" else wide_speed(options.rounds)
        return
    for split in ("calibration", "held_out"):
        setup.record(split)
    if options.what == "quality":
        quality(setup, options.json)
    else:
        speed(setup, json.loads(options.quality.read_text("utf-8")), options.rounds)


if __name__ == "__main__":
    main()
