"""Wavefront decoding of the game decoder against raster order: frames/s by turns, NLL under teacher forcing, replay.

    python benchmarks/wavefront.py --rounds 5 --threads 1 --json out.json

The sequences are those that the world ships, 16 frames each: the first 4 are a prompt, and image tokens of the other 12
count. Everything is compiled first, w8a8 and int8 keys and values.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

import fastcar_compile as fc

ROOT = Path(__file__).parents[1] / "examples" / "doom"
PROMPT_FRAMES = 4
GRID, LEAD = (8, 8), 1
LAGS = (8, 3, 2, 1)
"""As many columns as the grid has is raster order."""

CASE = "learned within 1.10x"
"""The calibrated thresholds in cases.json that replay within 1.10x of the dense NLL in raster order."""


@dataclass(frozen=True)
class Result:
    """One lag, dense or with replay.

    Attributes:
        rows: of the decoder. launches: decode steps of a frame, its action's included.
        seconds: of a frame, the least of all rounds. nll: per image token.
        replay: share of (token, layer) that replayed. skipped: share of (decode step, layer) whose MLP did not run.
    """

    lag: int
    gate: str | None
    rows: int
    launches: int
    seconds: float
    nll: float
    replay: float
    skipped: float


def thresholds() -> list[float | None]:
    """Return the thresholds of CASE."""
    cases = json.loads((ROOT / "cases.json").read_text())
    return next(case["replay"]["threshold"] for case in cases if case["calibration"] == CASE)


def compiled(lag: int, gate: bool, folder: Path) -> fc.Artifact:
    """Return the decoder with the rows that a lag needs."""
    rows = fc.Wavefront(GRID, lag, LEAD).rows
    replay = None
    if gate:
        weights = ROOT / "gates" / "learned.safetensors"
        replay = fc.ReplayConfig(gate="learned", gate_weights=weights, threshold=thresholds())
    place = folder / f"{lag}-{gate}"
    sizes: dict[str, Any] = {"max_seq_len": 17 * 65, "rows": None if rows == 1 else rows}
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


def skipped(wavefront: fc.Wavefront, decisions: np.ndarray) -> float:
    """Return the share of (decode step, layer) in which every row replays; decisions bool [tokens, L, 1]."""
    at, shares = 0, list[Any]()
    while at < len(decisions):
        whole = at % wavefront.frame == 0 and len(decisions) - at >= wavefront.size - 1
        for rows in wavefront.launches if whole else [()]:
            if at == len(decisions):  # nothing follows the last token, which is not read
                break
            own = 1 if not rows else sum(not row.extra for row in rows)
            every = decisions[at : at + own, :, 0].all(0) & (len(rows) == own or not rows)
            shares.append(every)
            at += own
    return float(np.mean(shares))


def measure(artifacts: dict[tuple[int, bool], fc.Artifact], rounds: int, threads: int) -> list[Result]:
    """Return the results of all lags, dense and with replay, timed by turns."""
    sequences = load_file(ROOT / "world" / "starts.safetensors")["tokens"].reshape(6, -1).astype(np.int64)
    frame = GRID[0] * GRID[1] + LEAD
    first = PROMPT_FRAMES * frame + LEAD
    count = sequences.shape[1] - first
    seconds: dict[tuple[int, bool], list[float]] = {key: [] for key in artifacts}
    found: dict[tuple[int, bool], tuple[float, float, float]] = {}
    for key, artifact in artifacts.items():
        wavefront, session = fc.Wavefront(GRID, key[0], LEAD), artifact.session("cpu", threads=threads, record=True)
        nll, tokens, replay, whole = 0.0, 0, [], []
        for sequence in sequences:
            forced = Forced(sequence, order(wavefront, first, sequences.shape[1]))
            session.generate(sequence[None, :first], count, forced, wavefront=wavefront)
            nll, tokens = nll + forced.nll, tokens + forced.count
            replay.append(session.stats.replay_ratio)
            whole.append(skipped(wavefront, session.stats.decisions))
        found[key] = (nll / tokens, float(np.mean(replay)), float(np.mean(whole)))
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
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        artifacts = {(lag, gate): compiled(lag, gate, Path(folder)) for gate in (False, True) for lag in LAGS}
        results = measure(artifacts, options.rounds, options.threads)
    dense = results[0]
    print("| lag | gate | rows | decode steps a frame | frames/s | of raster dense | NLL | replay | MLPs skipped |")
    print("|---|---|---|---|---|---|---|---|---|")
    for r in results:
        cells = (r.lag, r.gate or "none", r.rows, r.launches, f"{1 / r.seconds:.1f}")
        cells += (f"{dense.seconds / r.seconds:.2f}x", f"{r.nll:.3f} ({r.nll / dense.nll:.3f}x)")
        print("|", " | ".join(map(str, (*cells, f"{r.replay:.1%}", f"{r.skipped:.1%}"))), "|")
    if options.json:
        options.json.write_text(json.dumps([asdict(r) for r in results], indent=1) + "\n")


if __name__ == "__main__":
    main()
