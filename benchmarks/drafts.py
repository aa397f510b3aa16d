"""What a draft of the MLPs spares, and what it costs: docs/explanation/drafts.md.

    python benchmarks/drafts.py quality --data build/doom/data --json quality.json
    python benchmarks/drafts.py quality --only "distilled, share 0.28" --limit 1.05 --json quality.json
    python benchmarks/drafts.py rollouts --quality quality.json --rollouts 24
    python benchmarks/drafts.py precisions --quality quality.json
    python benchmarks/drafts.py speed --quality quality.json
    python benchmarks/drafts.py shapes
    python benchmarks/drafts.py layer
    python benchmarks/drafts.py wide

quality: the game decoder of examples/doom, with drafts fitted to calibration play and measured on the held-out
sequences of docs/measurements/doom.md, beside the plain gates with their thresholds of examples/doom/cases.json. Two
drafts are distilled. So are narrower MLPs, which every row uses.
rollouts: frames that are generated one after the other, by the rules of docs/measurements/doom.md.
precisions: the held-out sequences with quantised decoders and drafts.
layer: time and memory of the fit of one layer of 4096 x 11008 with random weights and inputs.
shapes: the decoders of drawn videos as they were trained, with gate `learned` as it is shipped and a draft of a fifth,
fitted and distilled.
speed: frames/s of the game decoder, dense, with gate `learned` and with two drafts, at thresholds within 1.10x.
wide: the same of 8 layers of 2048 x 5504 with random weights and a draft of an eighth. Four of five visits replay.
"""

import argparse
import json
import math
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from replay_doom.rollouts import likenesses, rolled, start_of
from replay_doom.sequences import RICH, groups_of, spaced
from replay_doom.setup import COUNTED, DOOM, LIMITS, TOKENS_PER_FRAME, Counts, Setup
from replay_doom.weighting import natural_shares
from replay_drafts.layer import layer
from replay_drafts.methods import (
    DISTILLED,
    REPLAY,
    STEPS,
    TARGETS,
    by_chance,
    cost_at,
    file_of,
    means,
    methods,
    most,
    point_of,
)
from replay_quality.decoders import DECODERS, TRAINING_SEED, Decoder
from speed.wide import wide

import fastcar_compile as fc
from fastcar_compile.tune.calibrate import PRECISIONS, program_of, search_of
from fastcar_compile.tune.evaluate import Case, Study

NETS = (0.5, 0.6, 0.66, 0.7)
"""Net bytes at which costs are compared."""

ROUNDS = 3
DRIFT_FRAMES = (1, 2, 4, 8, 16, 32, 64)


def held_out(setup: Setup, quant: str = "none") -> Study:
    """Return a study on the held-out sequences of docs/measurements/doom.md."""
    split, counts = setup.tokens("held_out"), setup.counts
    starts = spaced(split, counts.held_out, counts.frames, RICH)
    return Study(
        program_of(setup.dense.model(), (len(starts), counts.frames * TOKENS_PER_FRAME), quant=quant),
        split.take(starts, counts.frames),
        decoder="trained",
        prompt=setup.setting.prompt,
        counted=COUNTED,
        groups=groups_of(split, starts, counts.frames, counts.prompt),
    )


def quality(setup: Setup, output: Path | None, only: Sequence[str], limit: float) -> None:
    """Print replay and bytes spared within each limit, and what each method costs at the same bytes.

    Args:
        output: gets it as JSON, with each method's thresholds within `limit`. only: methods; none: all.
    """
    study = held_out(setup)
    shares, compared = natural_shares(setup.tokens("held_out")), methods(setup, only)
    rows = {name: study.rows(cases) for name, cases in compared.items()}
    for share in DISTILLED:
        name, other = f"distilled, share {share}", f"by chance, share {share}"
        if name not in compared:
            continue
        compared[other] = [by_chance(case, row) for case, row in zip(compared[name], rows[name], strict=True)]
        rows[other] = study.rows(compared[other])
    found = dict[str, Any]()
    for kind, own in {"all": shares, **{name: {name: 1.0} for name in shares}}.items():
        points = {name: [point_of(row, own) for row in rows[name]] for name in compared}
        for name, measured in points.items():
            found[f"{name}, {kind}"] = sorted(measured)
            text = "; ".join(
                f"{limit:.2f}x: replay {r:.1%}, net bytes {n:.1%}"
                for limit in LIMITS
                for r, n in [most(measured, limit)]
            )
            costs = ", ".join(f"{net:.0%} {cost_at(measured, net):.3f}x" for net in NETS)
            print(
                f"{name}, {kind}: {text}; at net bytes {costs}; most {max(n for _, n, _ in measured):.1%}", flush=True
            )
    for name, cases in compared.items():
        measured = [(*point_of(row, shares), case) for case, row in zip(cases, rows[name], strict=True)]
        within = [(replay, case) for replay, _, cost, case in measured if cost <= limit]
        if within:
            found[f"{name}, thresholds"] = max(within, key=lambda pair: pair[0])[1].to_json()
    if output is not None:
        output.write_text(json.dumps(found, indent=1) + "\n", "utf-8")


def rollouts(setup: Setup, found: dict[str, Any]) -> None:
    """Print PSNR by generated frame of gate `learned` and of drafts within quality's limit, beside other draws."""
    start = start_of(setup)
    made = rolled(setup, setup.dense, chosen(setup, found), start)
    for name, result in likenesses(setup, start, made).items():
        for against in ("dense", "true"):
            errors = result["errors"][against]
            psnr = " ".join(f"{-10 * math.log10(max(errors[n - 1], 1e-6)):.1f}" for n in DRIFT_FRAMES)
            print(f"{name}, replay {result['replay_ratio']:.1%}, PSNR against {against}: {psnr}", flush=True)


def precisions(setup: Setup, found: dict[str, Any]) -> None:
    """Print NLL and replay of quantised decoders, dense and with the thresholds of float32."""
    shares, cases = natural_shares(setup.tokens("held_out")), chosen(setup, found)
    for quant in PRECISIONS:
        for name, row in zip(cases, held_out(setup, quant).rows(list(cases.values())), strict=True):
            replay, _, nll, dense = means(row, shares)
            print(f"{quant}, {name}: replay {replay:.1%}, NLL {nll:.4f}, {nll / dense:.3f}x of dense {dense:.4f}")


def chosen(setup: Setup, found: dict[str, Any]) -> dict[str, Case]:
    """Return the cases within a limit that `quality` found, of gate `learned` and of drafts of the distilled shares."""
    cases = dict[str, Case]()
    plain = {"learned": {"gate_weights": setup.dense.gate_weights()}}
    files = {f"draft, share {share}": file_of(setup, share) for share in DISTILLED}
    files |= {f"distilled, share {share}": file_of(setup, share, STEPS) for share in DISTILLED}
    for name in (*plain, *files):
        if (kept := found.get(f"{name}, thresholds")) is None:
            continue
        if name in plain:
            replay = Case.from_json(kept).replay
            assert replay is not None
            cases[name] = Case(name, replay.model_copy(update=plain[name]))
        else:
            config = fc.ReplayConfig(draft=fc.Draft.load(files[name]), threshold=kept["replay"]["threshold"])
            cases[name] = Case(name, config)
    return cases


def shapes() -> None:
    """Print replay and bytes spared of the drawn decoders, and the fit's time."""
    for decoder in (d for d in DECODERS if not d.tuned):
        held_out = decoder.held_out()
        study = Study(program_of(decoder.model(), held_out.shape), held_out, decoder=decoder.name)
        calibration = decoder.calibration(decoder.calibration_videos)
        for name, replay in drawn(decoder):
            search = search_of(program_of(decoder.model(), calibration.shape), replay, calibration)[0]
            cases = [Case("path", replay.model_copy(update={"threshold": v}), t)
                     for v, t in zip(search.path(TARGETS), TARGETS, strict=True)]  # fmt: skip
            points = [
                (row["replay_ratio"], row["mlp_weights_spared"], row["nll"] / row["nll_dense"])
                for row in study.rows(cases)
            ]
            for limit in LIMITS:
                replayed, net = most(points, limit)
                print(
                    f"{decoder.name}, {name}, {limit:.2f}x: replay {replayed:.1%}, net bytes {net:.1%} of at most "
                    f"{max(n for _, n, _ in points):.1%}",
                    flush=True,
                )


def drawn(decoder: Decoder) -> Iterator[tuple[str, fc.ReplayConfig]]:
    """Yield what is compared for a decoder of drawn videos."""
    model, videos, share = decoder.model(), decoder.videos(STEPS, TRAINING_SEED), DISTILLED[-1]
    yield "learned", decoder.config("learned")
    with tempfile.TemporaryDirectory() as folder:
        for name, steps in (("draft", 0), ("distilled", STEPS)):
            began = time.perf_counter()
            draft = fc.fit_draft(
                model, videos, share=share, distill_steps=steps, distill_replay=REPLAY, checkpoint=Path(folder, "fit")
            )
            print(f"{decoder.name}, {name}: {time.perf_counter() - began:.0f} s", flush=True)
            yield name, fc.ReplayConfig(draft=draft)


def turns(sessions: dict[str, fc.Session], tokens: np.ndarray, prompt: int, frame: int) -> dict[str, float]:
    """Return the least seconds of a frame of each session; the first frame behind the prompt never replays."""
    seconds = dict.fromkeys(sessions, math.inf)
    for _ in range(ROUNDS):
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


def speed(setup: Setup, found: dict[str, Any]) -> None:
    """Print frames/s of the game decoder at the thresholds within the greater limit."""
    common: dict[str, Any] = {"target": "cpu", "quant": "w8a8", "kv": "float16", "max_seq_len": 1040}
    configs: dict[str, Any] = {"dense": None}
    configs |= {name: case.replay for name, case in chosen(setup, found).items()}
    split = setup.tokens("held_out")
    tokens = split.take(spaced(split, 1, setup.counts.frames)[:1], setup.counts.frames)
    with tempfile.TemporaryDirectory() as folder:
        model = setup.dense.model()
        artifacts = {n: fc.compile(model, output=Path(folder, n), replay=r, **common) for n, r in configs.items()}
        for threads in (1, 2):
            sessions = dict(opened(artifacts, threads))
            show(turns(sessions, tokens, setup.setting.prompt, TOKENS_PER_FRAME), sessions, threads)


def wide_speed() -> None:
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
            show(turns(sessions, tokens, 1, frame), sessions, threads)


def main() -> None:
    """Run the requested measurement."""
    alone = {"shapes": shapes, "layer": layer, "wide": wide_speed}
    read = {"rollouts": rollouts, "precisions": precisions, "speed": speed}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=[*alone, *read, "quality"])
    parser.add_argument(
        "--data", type=Path, default=DOOM.parents[1] / "build" / "doom" / "data", help="recorded if missing"
    )
    parser.add_argument("--work", type=Path, default=DOOM.parents[1] / "build" / "doom" / "drafts")
    parser.add_argument("--quality", type=Path, help="what quality wrote with --json")
    parser.add_argument("--only", nargs="+", default=[], help='methods of quality, such as "distilled, share 0.28"')
    parser.add_argument("--limit", type=float, default=LIMITS[-1], help="NLL over dense of what quality's JSON has")
    parser.add_argument("--rollouts", type=int, default=Counts.rollouts)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.what in alone:
        alone[options.what]()
        return
    options.work.mkdir(parents=True, exist_ok=True)
    setup = Setup(options.data, DOOM / "world", DOOM, options.work, Counts(rollouts=options.rollouts), print)
    for split in ("calibration", "held_out"):
        setup.record(split)
    if options.what == "quality":
        quality(setup, options.json, options.only, options.limit)
    else:
        read[options.what](setup, json.loads(options.quality.read_text("utf-8")))


if __name__ == "__main__":
    main()
