"""How soon the package and its commands answer, and how much memory decoding takes. Every figure is of fresh processes.

    python benchmarks/startup.py --artifact build/demo/artifact --json out.json

Without --artifact the demo decoder is compiled first. `first token` counts from the start of the process.
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

EXAMPLE = Path(__file__).parent.parent / "examples" / "moving_shapes"
FASTCAR = (sys.executable, "-m", "fastcar_compile")
DECODE = """
import json, resource, sys, time
import numpy as np
import fastcar_compile as fc

session = fc.load(sys.argv[1]).session("cpu")
logits = session.prefill(np.array([[16]]))
token = int(np.asarray(logits).argmax())
first = time.time()
for _ in range(63):
    token = int(np.asarray(session.step(np.array([token]))).argmax())
loaded = [name for name in ("torch", "transformers", "onnx") if name in sys.modules]
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
print(json.dumps({"first": first, "peak": peak, "loaded": loaded}))
"""
"""What `fastcar run` does, with the time and the memory of its first token taken inside of the process."""


@dataclass(frozen=True)
class Figure:
    """One measured value: the median of its rounds, and the most that it may be."""

    name: str
    value: float
    unit: str
    goal: float
    rounds: tuple[float, ...]

    @property
    def reached(self) -> bool:
        """Whether the goal holds."""
        return self.value <= self.goal


def run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Return a finished process; a failure ends the benchmark with its error."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stderr}")
    return done


def import_seconds() -> float:
    """Return the total of `python -X importtime -c "import fastcar_compile"`, without the interpreter's own imports."""
    report = run([sys.executable, "-X", "importtime", "-c", "import fastcar_compile"]).stderr
    line = next(line for line in report.splitlines() if re.search(r"\| fastcar_compile$", line))
    return int(line.split("|")[1]) / 1e6


def command_seconds(*words: str) -> Callable[[], float]:
    """Return a function that runs `fastcar` once and returns its wall time."""

    def measure() -> float:
        start = time.perf_counter()
        run([*FASTCAR, *words])
        return time.perf_counter() - start

    return measure


def decode(artifact: Path) -> tuple[float, float]:
    """Return seconds to the first token, and the peak resident memory in MB, of one decoding process."""
    start = time.time()
    report = json.loads(run([sys.executable, "-c", DECODE, str(artifact)]).stdout)
    if report["loaded"]:
        print(f"decoding loaded {', '.join(report['loaded'])}", file=sys.stderr)
    return report["first"] - start, report["peak"]


def figures(artifact: Path, rounds: int) -> Iterable[Figure]:
    """Return every figure; the first round only warms the disk's cache and does not count."""
    measures: list[tuple[str, float, Callable[[], float]]] = [
        ("import fastcar_compile", 0.3, import_seconds),
        ("fastcar --help", 1.0, command_seconds("--help")),
        ("fastcar targets", 1.0, command_seconds("targets")),
        ("fastcar inspect", 1.0, command_seconds("inspect", str(artifact))),
        ("fastcar run, 1 token", 2.0, command_seconds("run", str(artifact), "--prompt", "16", "--num-tokens", "1")),
    ]
    for name, goal, measure in measures:
        values = tuple(measure() for _ in range(rounds + 1))[1:]
        yield Figure(name, statistics.median(values), "s", goal, values)
    firsts, peaks = zip(*[decode(artifact) for _ in range(rounds + 1)][1:], strict=True)
    yield Figure("first token on cpu", statistics.median(firsts), "s", 2.0, firsts)
    yield Figure("peak resident, 64 tokens on cpu", statistics.median(peaks), "MB", 150.0, peaks)


def compiled(folder: Path) -> Path:
    """Return an artifact of the demo decoder, compiled into `folder`."""
    run([*FASTCAR, "compile", str(EXAMPLE / "model"), "--target", "zcu102", "-o", str(folder / "artifact")])
    return folder / "artifact"


def show(found: Sequence[Figure]) -> None:
    """Print the table, with the goal beside each figure."""
    print(f"{'':34}{'median':>10}{'goal':>10}   rounds")
    for figure in found:
        digits = 0 if figure.unit == "MB" else 2
        rounds = " ".join(f"{value:.{digits}f}" for value in figure.rounds)
        value, goal = (f"{number:.{digits}f} {figure.unit}" for number in (figure.value, figure.goal))
        print(f"{figure.name:34}{value:>10}{goal:>10}   {rounds}{'' if figure.reached else '   MISSED'}")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--artifact", type=Path, help="an artifact to open; default: the demo decoder's, compiled now")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()
    os.environ.pop("FASTCAR_TRACEBACK", None)
    with tempfile.TemporaryDirectory() as folder:
        artifact = options.artifact or compiled(Path(folder))
        found = list(figures(artifact, options.rounds))
    show(found)
    if options.json is not None:
        rows = [asdict(figure) | {"reached": figure.reached} for figure in found]
        options.json.write_text(json.dumps(rows, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
