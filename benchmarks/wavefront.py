"""Wavefront decoding of the game decoder against raster order: frames/s by turns, NLL under teacher forcing, replay.

    python benchmarks/wavefront.py --rounds 5 --threads 1 --draws 8 --json out.json

The sequences are those that the world ships, 16 frames each: the first 4 are a prompt, and image tokens of the other 12
count. Everything is compiled first, w8a8 and int8 keys and values. Rollouts draw these 12 frames freely, with the
sampling of the game and the actions of the recording; other draws of raster order show what chance alone does.

    python benchmarks/wavefront.py --wide

measures frames/s of a decoder whose weights come from memory: 8 layers of 2048 x 5504, random weights.

    python benchmarks/wavefront.py --parts --threads 2

says where the time of a dense frame goes, in raster order and with lag 2, with one thread and with so many, and what
bytes and products of weights would take alone: at the speed at which this machine reads as many bytes, again and again,
and at its peak of int8 products.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from safetensors.numpy import load_file
from scipy import linalg
from speed.bandwidth import ReadBandwidth
from speed.doom_report import parts_table
from speed.parts import parts_of
from speed.peak import Peak
from speed.wide import wide

import fastcar_compile as fc
from fastcar_compile.runtime.backends.cpu import CpuStepper
from fastcar_compile.runtime.guard import use_threads
from fastcar_compile.runtime.session import Session

ROOT = Path(__file__).parents[1] / "examples" / "doom"
PROMPT_FRAMES = 4
GRID, LEAD = (8, 8), 1
CORES = (2, 4)
LAGS = (8, 3, 2, 1)
"""As many columns as the grid has is raster order."""

CODES = 1000
"""Image tokens are those below; actions come behind them."""

CASE = "learned within 1.10x"
"""The calibrated thresholds in cases.json that replay within 1.10x of the dense NLL in raster order."""


@dataclass(frozen=True)
class Result:
    """One lag, dense or with replay.

    Attributes:
        rows: of the decoder. launches: decode steps of a frame, its action's included.
        seconds: of a frame, the least of all rounds. nll: per image token.
        replay: share of (token, layer) that replayed. skipped: share of (decode step, layer) whose MLP did not run.
        balanced: passes over the weights of a static mapping of rows over those of DRS, for each of CORES.
    """

    lag: int
    gate: str | None
    rows: int
    launches: int
    seconds: float
    nll: float
    replay: float
    skipped: float
    balanced: tuple[float, ...]


def thresholds() -> list[float | None]:
    """Return the thresholds of CASE."""
    cases = json.loads((ROOT / "cases.json").read_text())
    return next(case["replay"]["threshold"] for case in cases if case["calibration"] == CASE)


def compiled(lag: int, gate: bool, folder: Path, isa: str = "native") -> fc.Artifact:
    """Return the decoder with the rows that a lag needs, for an instruction set of this CPU."""
    rows = fc.Wavefront(GRID, lag, LEAD).rows
    replay = None
    if gate:
        weights = ROOT / "gates" / "learned.safetensors"
        replay = fc.ReplayConfig(gate="learned", gate_weights=weights, threshold=thresholds())
    place = folder / f"{lag}-{gate}"
    sizes: dict[str, Any] = {"max_seq_len": 17 * 65, "rows": None if rows == 1 else rows, "host_cpus": [isa]}
    return fc.compile(ROOT / "world" / "decoder", "cpu", quant="w8a8", kv="int8", replay=replay, output=place, **sizes)


def order(wavefront: fc.Wavefront, first: int, last: int) -> Iterator[int]:
    """Yield the positions of the tokens first .. last - 1 in the order in which `generate` chooses them."""
    at = first
    while at < last:
        yield at
        if wavefront.begins(at) and last - at >= wavefront.size:
            end = last - at == wavefront.size
            for rows in wavefront.launches[: -1 if end else None]:
                yield from (at + row.predicts for row in rows if row.predicts is not None and row.predicts > 0)
            at += wavefront.size
        at += 1


class Forced:
    """A sampler that returns the true tokens, and adds up their NLL."""

    def __init__(self, sequence: np.ndarray, places: Iterator[int]) -> None:
        self.sequence, self.places, self.nll, self.count = sequence, places, 0.0, 0

    def __call__(self, logits: np.ndarray) -> np.ndarray:
        """Return the token of the next place."""
        place = next(self.places)
        token = self.sequence[place]
        if place % (GRID[0] * GRID[1] + LEAD) >= LEAD:
            row = logits[0].astype(np.float64)
            self.nll += float(np.log(np.exp(row - row.max()).sum()) + row.max() - row[token])
            self.count += 1
        return np.array([token])


def computing(wavefront: fc.Wavefront, decisions: np.ndarray) -> Iterator[np.ndarray]:
    """Yield of each decode step which rows compute, bool [rows, L]; decisions bool [tokens, L, 1], as recorded."""
    at = 0
    while at < len(decisions):
        whole = at % wavefront.frame == 0 and len(decisions) - at >= wavefront.size - 1
        for rows in wavefront.launches if whole else [()]:
            if at == len(decisions):  # nothing follows the last token, which is not read
                break
            # A row in front of the grid is alone. A query for a first column never replays.
            extra = [row.extra for row in rows] or [False]
            computes = np.ones((len(extra), decisions.shape[1]), np.bool_)
            own = len(extra) - sum(extra)
            computes[~np.array(extra)] = ~decisions[at : at + own, :, 0]
            at += own
            yield computes


def balanced(steps: list[np.ndarray], cores: int) -> float:
    """Return the passes of a static mapping, row k on core k mod `cores`, over those of rows that DRS maps anew."""
    static = sum(np.max([step[core::cores].sum(0) for core in range(cores)], 0).sum() for step in steps)
    dynamic = sum((-(-step.sum(0) // cores)).sum() for step in steps)
    return float(static / dynamic)


class Drawn:
    """A sampler that draws image tokens as the game does, and takes the actions of a sequence."""

    def __init__(self, sequence: np.ndarray, places: Iterator[int], seed: int) -> None:
        self.tokens, self.places = sequence.copy(), places
        self.draw = fc.Sampling(temperature=1.0, top_k=40, seed=seed).start(np.zeros((1, 0), np.int64))

    def __call__(self, logits: np.ndarray) -> np.ndarray:
        """Return the token of the next place."""
        place = next(self.places)
        if place % (GRID[0] * GRID[1] + LEAD) >= LEAD:
            self.tokens[place] = self.draw(logits[:, :CODES])[0]
        return self.tokens[place : place + 1]


def pictures(tokens: np.ndarray) -> np.ndarray:
    """Return the frames of a sequence behind the prompt, float [frames, height, width, 3] in 0 .. 1."""
    session: Any = onnxruntime.InferenceSession(ROOT / "world" / "pixels.onnx", providers=["CPUExecutionProvider"])
    frames = tokens.reshape(-1, GRID[0] * GRID[1] + LEAD)[PROMPT_FRAMES:, LEAD:].reshape(-1, 1, *GRID)
    return np.concatenate([session.run(["frames"], {"tokens": f})[0] for f in frames]) / 255.0


def motion(videos: np.ndarray) -> np.ndarray:
    """Return what describes two successive frames: brightness of 8 x 8 areas, float [N, 128]; of [V, frames, ...]."""
    gray = videos.mean(-1)
    areas = gray.reshape(*gray.shape[:2], 8, gray.shape[2] // 8, 8, gray.shape[3] // 8).mean((3, 5))
    flat = areas.reshape(*gray.shape[:2], 64)
    return np.concatenate([flat[:, :-1], flat[:, 1:]], -1).reshape(-1, 128)


def distance(made: np.ndarray, true: np.ndarray) -> float:
    """Return the Frechet distance of the 8 directions in which the game's features differ most (as FVD measures)."""
    _, _, directions = np.linalg.svd(true - true.mean(0), full_matrices=False)
    one, other = ((features - true.mean(0)) @ directions[:8].T for features in (made, true))
    spread: Any = linalg.sqrtm(np.cov(one.T) @ np.cov(other.T))
    covariances = np.trace(np.cov(one.T) + np.cov(other.T) - 2 * spread.real)
    return float(((one.mean(0) - other.mean(0)) ** 2).sum() + covariances)


def rollouts(artifacts: dict[tuple[int, bool], fc.Artifact], draws: int) -> Iterator[tuple[object, ...]]:
    """Yield rows of a table: rollouts of every lag, dense and with replay, and other draws of raster order."""
    sequences = load_file(ROOT / "world" / "starts.safetensors")["tokens"].reshape(6, -1).astype(np.int64)
    first = PROMPT_FRAMES * (GRID[0] * GRID[1] + LEAD) + LEAD
    true = np.stack([pictures(sequence) for sequence in sequences])
    cases = [(key, 0) for key in artifacts]
    for (lag, gate), seed in [(cases[0][0], 1000), *cases]:
        wavefront, made = fc.Wavefront(GRID, lag, LEAD), list[np.ndarray]()
        with artifacts[lag, gate].session("cpu") as session:
            for draw, sequence in product(range(draws), sequences):
                drawn = Drawn(sequence, order(wavefront, first, len(sequence)), seed + draw)
                session.generate(sequence[None, :first], len(sequence) - first, drawn, wavefront=wavefront)
                made.append(pictures(drawn.tokens))
        errors = ((np.stack(made).reshape(draws, *true.shape) - true) ** 2).mean((0, 1, 3, 4, 5))
        ratios = [f"{-10 * np.log10(errors[frame]):.1f}" for frame in (0, 3, 11)]
        name = f"{lag}, other draws" if seed else str(lag)
        yield name, "learned" if gate else "none", *ratios, f"{distance(motion(np.stack(made)), motion(true)):.4f}"


def measure_wide(rounds: int, threads: int) -> None:
    """Print the frames/s of a decoder of 8 layers of 2048 x 5504 with random weights, by turns."""
    model, prompt = wide(), np.zeros((1, 64), np.int64)
    fronts = {lag: fc.Wavefront(GRID, lag) for lag in LAGS}
    with tempfile.TemporaryDirectory() as folder:
        common: dict[str, Any] = {"quant": "w8a8", "replay": None, "tokens_per_frame": 64, "max_seq_len": 256}
        artifacts = {
            lag: fc.compile(model, "cpu", rows=front.rows, output=Path(folder) / str(lag), **common)
            for lag, front in fronts.items()
        }
        sessions = {lag: artifact.session("cpu", threads=threads) for lag, artifact in artifacts.items()}
        seconds: dict[int, list[float]] = {lag: [] for lag in fronts}
        for _ in range(rounds + 1):
            for lag, session in sessions.items():
                begin = time.perf_counter()
                session.generate(prompt, 1)
                between = time.perf_counter()
                session.generate(prompt, 128, wavefront=fronts[lag])
                seconds[lag].append((time.perf_counter() - between - (between - begin)) / 2)
    print("| lag | rows | frames/s | of raster |\n|---|---|---|---|")
    for lag, values in seconds.items():
        least = min(values[1:])
        print(f"| {lag} | {fronts[lag].rows} | {1 / least:.2f} | {min(seconds[LAGS[0]][1:]) / least:.2f}x |")


PARTS_LAGS = {"raster": 8, "lag 2": 2}
FRAMES_OF_PARTS = (12, 13, 14)
"""The frames of each sequence that are timed."""


def _frames(
    artifact: fc.Artifact, lag: int, stepper: CpuStepper, counted: AbstractContextManager[object]
) -> list[float]:
    """Decode frames greedily, their actions too; return the seconds of each."""
    sequences, frame = load_file(ROOT / "world" / "starts.safetensors")["tokens"], GRID[0] * GRID[1] + LEAD
    session = Session(stepper, artifact.manifest.decoder.config, artifact.manifest.layers.thresholds)
    wavefront, seconds = fc.Wavefront(GRID, lag, LEAD), []
    for sequence in sequences.reshape(6, 1, -1).astype(np.int64):
        session.generate(sequence[:, : FRAMES_OF_PARTS[0] * frame], 1)
        for number in FRAMES_OF_PARTS:
            with counted:
                begin = time.perf_counter()
                action = sequence[:, number * frame : number * frame + LEAD]
                session.generate(action, frame, wavefront=wavefront, reset=False)
                seconds.append(time.perf_counter() - begin)
    return seconds


def _bounds(artifact: fc.Artifact, lag: int, threads: int) -> tuple[float, float]:
    """Return the milliseconds of a frame's bytes and of its products, of all int8 weights."""
    use_threads(threads)
    size = sum(a.size for a in artifact.arrays().values() if a.dtype == np.int8 and a.ndim == 2)
    launches = [range(1), *fc.Wavefront(GRID, lag, LEAD).launches]  # the action comes first, alone
    # Whole MiB, which threads and the loop of the read kernel divide.
    speed = max(ReadBandwidth(threads, -(-size >> 20) << 20).gigabytes_per_second(50)) * 1e6
    peak = max(Peak("int8", threads).gigamacs_per_second(3)) * 1e6
    return len(launches) * size / speed, sum(map(len, launches)) * size / peak


def measure_parts(every: Sequence[int]) -> None:
    """Print milliseconds by part of a frame, for each number of threads, and what bounds its linears."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        artifacts = {name: compiled(lag, gate=False, folder=Path(folder)) for name, lag in PARTS_LAGS.items()}
        for threads in every:
            found[str(threads)] = {}
            for name, artifact in artifacts.items():
                run = partial(_frames, artifact, PARTS_LAGS[name])
                found[str(threads)] |= parts_of(artifact, threads, {name: run})
                bounds = _bounds(artifact, PARTS_LAGS[name], threads)
                print(f"{threads} threads, {name}: bytes {bounds[0]:.2f} ms, products {bounds[1]:.2f} ms")
    print(parts_table(found))


def measure(artifacts: dict[tuple[int, bool], fc.Artifact], rounds: int, threads: int) -> list[Result]:
    """Return the results of all lags, dense and with replay, timed by turns."""
    sequences = load_file(ROOT / "world" / "starts.safetensors")["tokens"].reshape(6, -1).astype(np.int64)
    frame = GRID[0] * GRID[1] + LEAD
    first = PROMPT_FRAMES * frame + LEAD
    count = sequences.shape[1] - first
    seconds: dict[tuple[int, bool], list[float]] = {key: [] for key in artifacts}
    found: dict[tuple[int, bool], tuple[float, float, float, tuple[float, ...]]] = {}
    for key, artifact in artifacts.items():
        wavefront, session = fc.Wavefront(GRID, key[0], LEAD), artifact.session("cpu", threads=threads, record=True)
        nll, tokens, replay, steps = 0.0, 0, [], list[np.ndarray]()
        for sequence in sequences:
            forced = Forced(sequence, order(wavefront, first, sequences.shape[1]))
            session.generate(sequence[None, :first], count, forced, wavefront=wavefront)
            nll, tokens = nll + forced.nll, tokens + forced.count
            replay.append(session.stats.replay_ratio)
            steps += computing(wavefront, session.stats.decisions)
        whole = float(np.mean([~step.any(0) for step in steps]))
        gains = tuple(balanced(steps, cores) for cores in CORES)
        found[key] = (nll / tokens, float(np.mean(replay)), whole, gains)
    sessions = {key: artifact.session("cpu", threads=threads) for key, artifact in artifacts.items()}
    for number in range(rounds + 1):  # the first one warms up
        for key, session in sessions.items():
            wavefront, prompt = fc.Wavefront(GRID, key[0], LEAD), sequences[number % 6, None, :first]
            begin = time.perf_counter()
            session.generate(prompt, 1)
            prefill = time.perf_counter() - begin
            begin = time.perf_counter()
            session.generate(prompt, count, wavefront=wavefront)
            seconds[key].append((time.perf_counter() - begin - prefill) * frame / count)
    results = []
    for (lag, gate), values in found.items():
        wavefront, name = fc.Wavefront(GRID, lag, LEAD), "learned" if gate else None
        launches = len(wavefront.launches) + LEAD
        results.append(Result(lag, name, wavefront.rows, launches, min(seconds[lag, gate][1:]), *values))
    return results


def main() -> None:
    """Print a table, and write the results as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--draws", type=int, default=0, help="rollouts of each sequence")
    parser.add_argument("--wide", action="store_true")
    parser.add_argument("--parts", action="store_true")
    parser.add_argument("--isa", default="native", help="avx2: an older one of this CPU")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.wide:
        return measure_wide(options.rounds, options.threads)
    if options.parts:
        return measure_parts(sorted({1, options.threads}))
    with tempfile.TemporaryDirectory() as folder:
        artifacts = {
            (lag, gate): compiled(lag, gate, Path(folder), options.isa) for gate in (False, True) for lag in LAGS
        }
        results = measure(artifacts, options.rounds, options.threads)
        rolled = list(rollouts(artifacts, options.draws)) if options.draws else []
    dense = results[0]
    print(
        "| lag | gate | rows | decode steps a frame | frames/s | of raster dense | NLL | replay | MLPs skipped | DRS |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|")
    for r in results:
        cells = (r.lag, r.gate or "none", r.rows, r.launches, f"{1 / r.seconds:.1f}")
        gains = ", ".join(f"{gain:.2f}x on {cores}" for gain, cores in zip(r.balanced, CORES, strict=True))
        cells += (f"{dense.seconds / r.seconds:.2f}x", f"{r.nll:.3f} ({r.nll / dense.nll:.3f}x)")
        print("|", " | ".join(map(str, (*cells, f"{r.replay:.1%}", f"{r.skipped:.1%}", gains))), "|")
    print(
        "\n| lag | gate | PSNR of frame 1 | 4 | 12 | distance to the game |\n|---|---|---|---|---|---|" * bool(rolled)
    )
    for row in rolled:
        print("|", " | ".join(map(str, row)), "|")
    if options.json:
        found = {"results": [asdict(r) for r in results], "rollouts": rolled}
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    return None


if __name__ == "__main__":
    main()
