"""The stages: train the gates, tune the decoder, calibrate, measure. Each goes on from where it was stopped."""

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import fastcar_compile as fc
from fastcar_compile.ir.pass_manager import run_pipeline
from fastcar_compile.ir.program import DecoderProgram
from fastcar_compile.passes.caches import QuantizeKvCache
from fastcar_compile.tune.calibrate import program_of, search_of
from fastcar_compile.tune.evaluate import Case, SinkWindow, Study, load_cases, save_cases
from fastcar_compile.tune.evaluate.cases import random_case
from replay_doom.sequences import RICH, drawn, groups_of, spaced
from replay_doom.setup import (
    COUNTED,
    LEARNED,
    LIMITS,
    MEAN,
    RANDOM,
    RANDOMLY,
    TARGETS,
    TOKENS_PER_FRAME,
    Decoder,
    Setup,
    Variant,
)

GATE_TARGET, TUNED_TARGET = 0.5, 0.8
"""Replayed share that gates are trained for, and that the decoder is tuned for."""

TUNED_RATE = 5e-4
GATE_SEED, TUNED_SEED = 11, 12
"""Of the drawn training sequences."""

WINDOWS = (SinkWindow(TOKENS_PER_FRAME, 16), SinkWindow(2 * TOKENS_PER_FRAME, 16))
PRECISIONS = {
    "float32": ("none", None),
    "int8 KV": ("none", "int8"),
    "w8a8": ("w8a8", None),
    "w8a8, int8 KV": ("w8a8", "int8"),
    "w4a8": ("w4a8", None),
    "w4a8, int8 KV": ("w4a8", "int8"),
}
"""Name -> what the linears are, and what the cached keys and values are."""

FULL = "full"
"""Label of the studies with all cases."""

SPLITS = {"held_out": "seen maps", "held_out_scenario": "unseen map"}
Rows = list[dict[str, Any]]


def train(setup: Setup, gate: str) -> None:
    """Train a gate of the decoder as it is: "tas" (a weight per head) or "learned"."""
    counts = setup.counts
    steps = counts.tas if gate == "tas" else counts.learned
    videos = drawn(setup.tokens("train"), steps * counts.batch, counts.train_frames, GATE_SEED)
    found = fc.train_gate(
        setup.dense.model(),
        videos,
        gate=gate,
        target_replay=GATE_TARGET,
        steps=steps,
        batch=counts.batch,
        prompt=counts.train_prompt * TOKENS_PER_FRAME,
        counted=COUNTED,
        checkpoint=setup.work / f"{gate}.safetensors",
        progress=setup.say,
    )
    _save_gate(found, setup.dense.gate_file(gate))


def tune(setup: Setup) -> None:
    """Tune a copy of the decoder together with gate `learned`, which begins as that of the decoder."""
    counts = setup.counts
    videos = drawn(setup.tokens("train"), counts.tuned * counts.batch, counts.train_frames, TUNED_SEED)
    found = fc.tune_decoder(
        setup.dense.model(),
        videos,
        gate="learned",
        target_replay=TUNED_TARGET,
        rate=TUNED_RATE,
        steps=counts.tuned,
        batch=counts.batch,
        prompt=counts.train_prompt * TOKENS_PER_FRAME,
        counted=COUNTED,
        start=fc.TrainedGate.load(setup.dense.gate_file("learned")),
        checkpoint=setup.work / "tuned.safetensors",
        progress=setup.say,
    )
    model: Any = found.model
    _save_gate(found.gate, setup.tuned.gate_file("learned"))
    model.bfloat16().save_pretrained(setup.tuned.weights)


def _save_gate(gate: fc.TrainedGate, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    gate.save(path)


def calibrate(setup: Setup, decoder: Decoder, variant: Variant) -> None:
    """Choose thresholds of one gate: near every target, and of a shipped decoder the most replay within every limit."""
    counts, split = setup.counts, setup.tokens("calibration")
    videos = split.take(spaced(split, counts.calibration, counts.frames), counts.frames)
    config, folder = decoder.config(variant), _work(setup, decoder)
    program = program_of(decoder.model(), videos.shape)
    journal = folder / f"calibration-{variant.slug}.json"
    search = search_of(program, config, videos, setup.setting, journal, setup.say)[0]
    path = dict(zip(search.path(TARGETS), TARGETS, strict=True))  # beyond what a gate reaches, targets are equal
    chosen = [(variant.name, target, values) for values, target in path.items()]
    limits = LIMITS if decoder.shipped else ()
    chosen += [(within(variant, limit), None, search.for_loss(math.log(limit))) for limit in limits]
    cases = [Case(name, config.model_copy(update={"threshold": found}), target) for name, target, found in chosen]
    save_cases(cases, folder / f"cases-{variant.slug}.json")


def gather(setup: Setup, decoder: Decoder) -> None:
    """Write the decoder's cases.json of the calibrations that are done, if there are any."""
    folder = _work(setup, decoder)
    files = {v: folder / f"cases-{v.slug}.json" for v in decoder.variants}
    done = [path for path in files.values() if path.exists()]
    if not done:
        return
    cases = [case for path in done for case in load_cases(path, decoder.gate_weights())]
    layers = decoder.model().config.num_hidden_layers
    randoms = [replace(random_case(ratio, layers), calibration=RANDOMLY.name) for ratio in RANDOM]
    save_cases([Case("dense"), *cases, *randoms], decoder.folder / "cases.json")


def within(variant: Variant, limit: float) -> str:
    """Return the name of the case that was calibrated for a limit."""
    return f"{variant.name} within {limit:.2f}x"


def compared(cases: Sequence[Case]) -> list[Case]:
    """Return the dense case and those of two gates within the greater limit."""
    names = {within(variant, LIMITS[-1]) for variant in (MEAN, LEARNED)}
    return [case for case in cases if case.replay is None or case.calibration in names]


def study_of(setup: Setup, decoder: Decoder, split: str, program: DecoderProgram, label: str) -> Study:
    """Return a study on held-out sequences, with their kinds of motion and scenarios as groups."""
    counts, tokens = setup.counts, setup.tokens(split)
    starts = spaced(tokens, _per_scenario(setup, split, label), counts.frames, RICH)
    return Study(
        program,
        tokens.take(starts, counts.frames),
        decoder=f"{decoder.name}, {SPLITS[split]}",
        prompt=setup.setting.prompt,
        counted=COUNTED,
        groups=groups_of(tokens, starts, counts.frames, counts.prompt),
        detokenize=setup.pixels(),
        journal=_work(setup, decoder) / f"rows-{split}-{label}.json",
        progress=setup.say,
    )


def _per_scenario(setup: Setup, split: str, label: str) -> int:
    counts = setup.counts
    if label != FULL:
        return counts.precision
    return counts.held_out if split == "held_out" else counts.unseen


def shape_of(setup: Setup, split: str, label: str) -> tuple[int, int]:
    """Return the shape (N, T) of the sequences of a study."""
    scenarios = len(set(setup.tokens(split).scenarios))
    return scenarios * _per_scenario(setup, split, label), setup.counts.frames * TOKENS_PER_FRAME


def measure(setup: Setup, decoder: Decoder, split: str) -> Rows:
    """Return the rows of the decoder's cases on a split; of the trained decoder on seen maps also under windows."""
    gather(setup, decoder)
    cases = load_cases(decoder.folder / "cases.json", decoder.gate_weights())
    windows = [case.with_attention(window) for window in WINDOWS for case in compared(cases)]
    study = study_of(setup, decoder, split, program_of(decoder.model(), shape_of(setup, split, FULL)), FULL)
    windows = windows if decoder.shipped and split == "held_out" else []
    return _kept(setup, decoder, split, study.rows([*cases, *windows]))


def precisions(setup: Setup, decoder: Decoder) -> Rows:
    """Return rows of quantised decoders: dense, and two gates with the thresholds of float32."""
    chosen, rows = compared(load_cases(decoder.folder / "cases.json", decoder.gate_weights())), []
    for name, (linears, caches) in PRECISIONS.items():
        label = name.replace(", ", "-").replace(" ", "-")
        program = program_of(decoder.model(), shape_of(setup, "held_out", label), quant=linears)
        if caches is not None:
            program = run_pipeline(program, [QuantizeKvCache(caches)])
        study = study_of(setup, decoder, "held_out", program, label)
        rows += [row | {"precision": name} for row in study.rows(chosen)]
    return _kept(setup, decoder, "precisions", rows)


def _work(setup: Setup, decoder: Decoder) -> Path:
    folder = setup.work / decoder.name
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _kept(setup: Setup, decoder: Decoder, name: str, rows: Rows) -> Rows:
    (_work(setup, decoder) / f"{name}.json").write_text(json.dumps(rows, indent=1, sort_keys=True) + "\n", "utf-8")
    return rows


def loaded(setup: Setup, decoder: Decoder, name: str) -> Any:
    """Return the results of a stage; None: it was not run."""
    path = setup.work / decoder.name / f"{name}.json"
    return json.loads(path.read_text("utf-8")) if path.exists() else None
