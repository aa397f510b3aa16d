"""Coupled Jacobi decoding against sequential decoding, by turns: frames/s, decode steps, and tokens that differ.

    python benchmarks/jacobi.py --decoder game --rounds 6 --threads 1 --json out.json
    python benchmarks/jacobi.py --decoder widened --quant w4a8 --windows 4 8 auto --rows 8
    python benchmarks/jacobi.py --decoder crafter --replay --parts
    python benchmarks/jacobi.py --decoder widened --batcher 4 --rows 8 --rounds 3
    python benchmarks/jacobi.py --decoder crafter --backend eager --numerics exact --rounds 1 --frames 2 --rows 16
    python benchmarks/jacobi.py --decoder game --replay --board zcu102 --rows 8 --windows 8 --frames 2

Each round plays the next start that the world ships, with the actions of its recording again. A frame is one call of
`generate`: it reads the last image token and the action, and draws the image tokens as the game does. Every decoding
plays all frames of a round, then the next decoding does, with the same noise of draws. The first round warms up. Ratios
are medians of what a round gives. Exact decodings have to make the same tokens, and so have those of one decoder of
native numerics, whose window of 1 is sequential: if they do not, the command fails.

Sequential decoding has a decoder of one row; `native` is the fastest. Keys and values are int8. The game `widened`
(speed/widened.py) has the same function, and its weights come from memory.

--replay: MLPs replay, where thresholds cost at most 1.05x the NLL: of the game's gate `learned`, of Crafter's draft.
--parts: where the time of a decode step goes (speed/parts.py).
--batcher 4: tokens/s of so many sequences of a batcher instead, with decoders of one row and of several.
--board zcu102: the kernel of whole steps in C simulation, one round of each window, against one position at a time on
    `cpu`: tokens, decisions and states have to be equal.
--cores: of an accelerator; prints the passes over the weights of MLPs of a static mapping of rows over those of DRS.
"""

import argparse
import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from speed.clock import Clock
from speed.doom_report import parts_table
from speed.parts import parts_of
from speed.widened import widened, widened_gate

import fastcar_compile as fc
from fastcar_compile.artifact.reader import StoredArtifact
from fastcar_compile.gates.weights import GateWeights
from fastcar_compile.runtime.backends import cpu, hls_csim
from fastcar_compile.runtime.backends.base import BACKENDS, BackendOptions, Stepper
from fastcar_compile.runtime.session import Session
from fastcar_compile.runtime.streams import TokenStream
from fastcar_play.world import World, load_world

EXAMPLES = Path(__file__).parents[1] / "examples"
WORLDS = {"game": "doom", "crafter": "crafter", "widened": "doom"}
CASE = "learned within 1.05x"
"""The thresholds of examples/doom/cases.json."""

PAGE = [-9.993658, -7.054743, -7.737266, -6.380743]
"""The thresholds of the page of Crafter (Makefile)."""


@dataclass(frozen=True)
class Case:
    """One decoding. rows: of the decoder. window: of Jacobi decoding; None: sequential. dense: no MLP ever replays."""

    numerics: str
    rows: int | None = None
    window: int | str | None = None
    dense: bool = False

    @property
    def name(self) -> str:
        """What tables call it."""
        how = f"Jacobi {self.window}, {self.rows} rows" if self.window else "sequential"
        return f"{how}, {self.numerics}{', dense' if self.dense else ''}"

    @property
    def same(self) -> "Case":
        """The sequential decoding that has the same tokens."""
        if self.numerics == "exact":
            return EXACT
        return self if self.window is None else replace(self, window=1)

    @property
    def decoder(self) -> "Case":
        """The case that has the same decoder, and decodes one position at a time: windows share decoders."""
        return replace(self, window=None)

    @property
    def how(self) -> dict[str, Any]:
        """What `generate` takes."""
        window: Any = self.window
        return {"jacobi": fc.Jacobi(window)} if window else {}


FASTEST, EXACT = Case("native"), Case("exact")
Artifacts = dict[Case, fc.Artifact]  # of each decoder


def cases(windows: Sequence[str], rows: Sequence[int], replay: bool, numerics: Sequence[str]) -> list[Case]:
    """Return sequential decoding, and Jacobi decoding with each window that each number of rows has room for."""
    given = [w if w == "auto" else int(w) for w in windows]
    found = [case for case in (Case("native", dense=replay), FASTEST, EXACT) if case.numerics in numerics]
    found = list(dict.fromkeys(found))  # without replay the first is the second
    for kind, r in product(numerics, sorted(rows)):
        windows_of = given if kind == "exact" else [1, *given]
        found += [Case(kind, r, w) for w in windows_of if isinstance(w, str) or w <= r]
    return found


@dataclass(frozen=True)
class Played:
    """Frames of one case in one round. All times are milliseconds of a frame.

    Attributes:
        tokens: int64 [frames, image tokens]. steps: decode steps of a frame. accepted: tokens of a decode step.
        read: of the last token and the action. decode: of the decode steps. rest: of draws, guesses and all else.
        computing: which rows of each decode step computed, bool [rows, L].
    """

    tokens: np.ndarray = field(repr=False)
    frame: float
    steps: float
    accepted: float
    read: float
    decode: float
    computing: list[np.ndarray] = field(repr=False)

    @property
    def rest(self) -> float:
        """What no forward takes."""
        return self.frame - self.read - self.decode


def play(session: Session, clock: Clock, world: World, number: int, frames: int, **how: Any) -> Played:
    """Play `frames` frames behind a start, with draws of its number."""
    start, drawn = world.starts[number % len(world.starts)], world.file.sampling
    sampling = fc.Sampling(drawn.temperature, drawn.top_k or None, seed=number)
    session.reset()
    session.prefill(start.reshape(1, -1)[:, :-1])
    last, made, seconds = start[-1, -1], list[np.ndarray](), 0.0
    clock.read.clear()
    clock.steps.clear()
    clock.computing.clear()
    for frame in range(frames):
        prompt = np.array([[last, start[frame % len(start), 0]]], np.int64)
        begin = time.perf_counter()
        made.append(session.generate(prompt, world.file.image.tokens, sampling, reset=False, **how)[0])
        seconds += time.perf_counter() - begin
        last = made[-1][-1]
    steps, each = len(clock.steps) / frames, 1e3 / frames
    accepted = (world.file.image.tokens - 1) / steps
    read, decode = each * sum(clock.read), each * sum(clock.steps)
    return Played(np.stack(made), each * seconds, steps, accepted, read, decode, [*clock.computing])


def replay_of(name: str) -> fc.ReplayConfig:
    """Return when the MLPs of a decoder replay."""
    if name == "crafter":
        return fc.ReplayConfig(draft=fc.Draft.load(EXAMPLES / "crafter" / "draft.safetensors"), threshold=PAGE)
    found = json.loads((EXAMPLES / "doom" / "cases.json").read_text("utf-8"))
    threshold = next(case["replay"]["threshold"] for case in found if case["calibration"] == CASE)
    weights: Any = EXAMPLES / "doom" / "gates" / "learned.safetensors"
    if name == "widened":
        weights = widened_gate(GateWeights.load(weights))
    return fc.ReplayConfig(gate="learned", gate_weights=weights, threshold=threshold)


def compiled(every: Sequence[Case], world: World, folder: Path, options: argparse.Namespace, **more: Any) -> Artifacts:
    """Return the artifacts of decoders. more: options of `compile`."""
    name: str = options.decoder
    model = widened(folder / "model") if name == "widened" else world.folder / "decoder"
    common: dict[str, Any] = {"target": "cpu", "quant": options.quant, "kv": "int8", "host_cpus": [options.isa]}
    replay = replay_of(name) if options.replay else None
    common["max_seq_len"] = (world.file.context_frames + options.frames) * world.file.tokens_per_frame

    def artifact(case: Case) -> fc.Artifact:
        own = {"rows": case.rows, "numerics": case.numerics, "replay": None if case.dense else replay}
        return fc.compile(model, output=folder / case.name, **own, **common | more)

    return {decoder: artifact(decoder) for decoder in dict.fromkeys(case.decoder for case in every)}


def measure(
    every: Sequence[Case], artifacts: Artifacts, world: World, options: argparse.Namespace
) -> dict[Case, list[Played]]:
    """Return what each case plays in each round, by turns."""
    opener = BACKENDS.load(options.backend)
    opened = {decoder: timed(artifact, opener, options) for decoder, artifact in artifacts.items()}
    found: dict[Case, list[Played]] = {case: [] for case in every}
    for number, case in product(range(options.rounds + 1), every):
        found[case].append(play(*opened[case.decoder], world, number, options.frames, **case.how))
    return found


def timed(
    artifact: fc.Artifact, opener: Callable[..., Stepper], options: argparse.Namespace, **more: Any
) -> tuple[Session, Clock]:
    """Return a session, and the clock of its stepper."""
    clocks = list[Clock]()

    def opened(artifact: StoredArtifact, options: BackendOptions) -> Stepper:
        stepper = opener(artifact, options)
        clocks.append(Clock(stepper))
        return stepper

    return artifact.session(opened, threads=options.threads, **more), clocks[0]


def simulated(world: World, folder: Path, options: argparse.Namespace) -> list[str]:
    """Print what the kernel of a board decodes in C simulation beside `cpu`; return the decodings that differ."""
    every = [case for case in cases(options.windows, options.rows, options.replay, ["exact"]) if case.rows]
    artifacts = compiled(every, world, folder, options, target=options.board, offload="all")
    print(
        "| decoding | tokens | differing | launches of a frame | replayed | decisions | states | seconds |\n"
        + "|---" * 8
        + "|"
    )
    wrong = list[str]()
    for case in every:
        artifact, begin = artifacts[case.decoder], time.perf_counter()
        runs, kept = list[tuple[Played, np.ndarray]](), list[bytes]()
        for opener, how in ((cpu.open_stepper, {"jacobi": fc.Jacobi(1)}), (hls_csim.open_stepper, case.how)):
            session, clock = timed(artifact, opener, options, record=True)
            runs.append((play(session, clock, world, 0, options.frames, **how), session.stats.decisions))
            session.save(folder / "kept")
            kept.append((folder / "kept").read_bytes())
        (one, expected), (own, decisions) = runs
        differing, equal = int((own.tokens != one.tokens).sum()), np.array_equal(decisions, expected)
        same = ["equal" if each else "differ" for each in (equal, kept[0] == kept[1])]
        row = (case.name, own.tokens.size, differing, f"{own.steps:.1f}", f"{decisions.mean():.1%}", *same)
        print(f"| {' | '.join(map(str, row))} | {time.perf_counter() - begin:.0f} |", flush=True)
        wrong += [case.name] if differing or "differ" in same else []
    return wrong


def rows_of(found: dict[Case, list[Played]]) -> Iterator[dict[str, Any]]:
    """Yield a row for each case: medians over the rounds, the first of which warms up."""
    for case, each in found.items():
        pairs = zip(each, found[case.same], strict=True)
        wrong = sum(int((own.tokens != other.tokens).sum()) for own, other in pairs)
        row: dict[str, Any] = {"decoding": case.name, **asdict(case), "differing": wrong}
        for name in ("frame", "steps", "accepted", "read", "decode", "rest"):
            row[name] = statistics.median(getattr(played, name) for played in each[1:])
        for name, peer in {"of_native": FASTEST, "of_exact": EXACT}.items():
            pairs = zip(found[peer][1:], each[1:], strict=True) if peer in found else ()
            row[name] = statistics.median([other.frame / own.frame for other, own in pairs] or [math.nan])
        yield row


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the rows in Markdown."""
    heads = "decoding | frames/s | of native | of exact | decode steps a frame | tokens a step | differing tokens"
    lines = [f"| {heads} | ms a frame: reading | decode steps | draws and the rest |", "|---" * 10 + "|"]
    for r in rows:
        ratios = ("" if math.isnan(r[name]) else f"{r[name]:.2f}x" for name in ("of_native", "of_exact"))
        speed = " | ".join((f"{1e3 / r['frame']:.2f}", *ratios))
        times = " | ".join(f"{r[name]:.2f}" for name in ("read", "decode", "rest"))
        counts = f"{r['steps']:.1f} | {r['accepted']:.2f} | {r['differing']}"
        lines.append(f"| {r['decoding']} | {speed} | {counts} | {times} |")
    return "\n".join(lines)


def mappings(found: dict[Case, list[Played]], cores: Sequence[int]) -> str:
    """Return a table: rows of a layer that compute, and passes of a static mapping over those of DRS, by cores."""
    lines = [f"| decoding | rows that compute | {' | '.join(f'{n} cores' for n in cores)} |"]
    lines.append("|---" * (2 + len(cores)) + "|")
    for case, each in found.items():
        steps = [step for played in each for step in played.computing]
        computing = np.mean([step.sum(0).mean() for step in steps])
        ratios = " | ".join(f"{balanced(steps, n):.2f}x" for n in cores)
        lines.append(f"| {case.name} | {computing:.2f} | {ratios} |")
    return "\n".join(lines)


def balanced(steps: Sequence[np.ndarray], cores: int) -> float:
    """Return the passes of a static mapping, row k on core k mod `cores`, over those of rows that DRS maps anew."""
    static = sum(np.max([step[core::cores].sum(0) for core in range(cores)], 0).sum() for step in steps)
    dynamic = sum((-(-step.sum(0) // cores)).sum() for step in steps)
    return float(static / dynamic)


def parts(every: Sequence[Case], artifacts: Artifacts, world: World, options: argparse.Namespace) -> str:
    """Return a table of the milliseconds of a decode step by part, of each case."""

    def run(case: Case, stepper: Stepper, counted: AbstractContextManager[object]) -> list[float]:
        clock, manifest = Clock(stepper, counted), artifacts[case.decoder].manifest
        session = Session(stepper, manifest.decoder.config, manifest.layers.thresholds)
        play(session, clock, world, 0, min(options.frames, 4), **case.how)
        return clock.steps

    modes = dict[str, dict[str, float]]()
    for case in every:
        modes |= parts_of(artifacts[case.decoder], options.threads, {case.name: partial(run, case)})
    return parts_table({str(options.threads): modes})


def batched(world: World, folder: Path, options: argparse.Namespace) -> list[str]:
    """Print tokens/s of sequences that begin with the world's starts; return the decodings whose tokens differ.

    A sequence goes on for `--frames` frames. Reading the prompts, which sequences of one token measure, is left out.
    """
    every = [Case(numerics, rows) for numerics in ("native", "exact") for rows in (1, *options.rows)]
    artifacts = compiled(every, world, folder, options, batch_size=options.batcher)
    batchers = {case: fc.Batcher(artifact, threads=options.threads) for case, artifact in artifacts.items()}
    count, drawn = options.frames * world.file.tokens_per_frame, world.file.sampling
    seconds, tokens = {case: list[float]() for case in every}, {case: list[list[int]]() for case in every}

    def decode(case: Case, number: int, length: int) -> tuple[float, list[list[int]]]:
        begin, streams = time.perf_counter(), list[TokenStream]()
        for i in range(options.batcher * number, options.batcher * (number + 1)):
            start = world.starts[i % len(world.starts)]
            prompt = np.append(start.reshape(-1), start[0, 0])  # the recording's first action begins the next frame
            streams.append(batchers[case].submit(prompt, length, fc.Sampling(drawn.temperature, drawn.top_k, seed=i)))
        found = [stream.result() for stream in streams]
        return time.perf_counter() - begin, found

    for number, case in product(range(options.rounds + 1), every):
        read, _ = decode(case, number, 1)
        whole, found = decode(case, number, count)
        seconds[case].append(whole - read)
        tokens[case] += found
    for batcher in batchers.values():
        batcher.close()
    print("| rows of a sequence | numerics | tokens/s | of one row | differing tokens |\n|---|---|---|---|---|")
    wrong = list[str]()
    for case in every:
        one = Case(case.numerics, 1)
        gain = statistics.median(a / b for a, b in zip(seconds[one][1:], seconds[case][1:], strict=True))
        speed = options.batcher * (count - 1) / statistics.median(seconds[case][1:])
        differing = int((np.array(tokens[case]) != np.array(tokens[one])).sum())
        print(f"| {case.rows} | {case.numerics} | {speed:.0f} | {gain:.2f}x | {differing} |")
        wrong += [case.name] if differing and case.numerics == "exact" else []
    return wrong


def main() -> None:
    """Print tables, and write the rows as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--decoder", choices=WORLDS, default="game")
    parser.add_argument("--windows", nargs="+", default=["2", "4", "8", "16", "auto"])
    parser.add_argument("--rows", type=int, nargs="+", default=[8, 16], help="of the decoders of Jacobi decoding")
    parser.add_argument("--quant", default="w8a8")
    parser.add_argument("--backend", default="cpu")
    parser.add_argument("--numerics", nargs="+", default=["exact", "native"])
    parser.add_argument("--isa", default="native", help="avx2: an older one of this CPU")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--frames", type=int, default=16, help="of a round")
    parser.add_argument("--replay", action="store_true")
    parser.add_argument("--parts", action="store_true")
    parser.add_argument("--batcher", type=int, help="sequences")
    parser.add_argument("--board", help="zcu102")
    parser.add_argument("--cores", type=int, nargs="+")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    world = load_world(EXAMPLES / WORLDS[options.decoder] / "world")
    with tempfile.TemporaryDirectory() as folder:
        if options.batcher:
            wrong = batched(world, Path(folder), options)
            sys.exit(f"other tokens than those of one row: {', '.join(wrong)}" if wrong else 0)
        if options.board:
            wrong = simulated(world, Path(folder), options)
            sys.exit(f"other than one position at a time on cpu: {', '.join(wrong)}" if wrong else 0)
        every = cases(options.windows, options.rows, options.replay, options.numerics)
        artifacts = compiled(every, world, Path(folder), options)
        found = measure(every, artifacts, world, options)
        rows = list(rows_of(found))
        print(table(rows))
        if options.cores:
            print(mappings(found, options.cores))
        if options.parts:
            print(parts(every, artifacts, world, options))
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n", "utf-8")
    if wrong := [row["decoding"] for row in rows if row["differing"]]:
        sys.exit(f"other tokens than those of sequential decoding: {', '.join(wrong)}")


if __name__ == "__main__":
    main()
