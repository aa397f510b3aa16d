"""Where the time of `fastcar_compile.compile` goes, and how it compares with another checkout.

    python benchmarks/compile_time.py
    python benchmarks/compile_time.py --hidden 2048 --intermediate 5504 --vocab 1024 --quant w8a8
    python benchmarks/compile_time.py --layers 32 --hidden 4096 --intermediate 11008 --vocab 32000 --quant w4a8 \\
        --targets cpu --rounds 1 --folder big
    python benchmarks/compile_time.py --against ../before --rounds 5 --json out.json
    python benchmarks/compile_time.py --cached --model examples/moving_shapes/tuned/model --targets zcu102

Every build compiles a folder of random weights, which `compile.py` writes, in a process of its own and anew. With
--cached a build fills an empty cache, the next one has another threshold, and the last one equals it. Two checkouts run
by turns, and medians count. Other work on the machine changes CPU seconds too, of both alike: their ratio says more
than either of them. Importing modules counts as its own stage, whenever it happens.
"""

from __future__ import annotations

import argparse
import builtins
import importlib
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

TARGETS = ("cpu", "zcu102")
HERE = Path(__file__).resolve().parent.parent
IMPORT, LLVM, OTHER = "imports", "LLVM", "other"
WEIGHTS, HLS, PLACING = "weights: quantise, write", "HLS sources, step program", "hashing and placing"
STAGES = {
    "checking the model folder": OTHER,
    "capturing the decode step": "capture and export",
    "rewriting the graph": "passes",
    "rewriting the graph and choosing the hardware design": "passes",
    "choosing the hardware design": HLS,
    "writing the weights": WEIGHTS,
    "exporting to ONNX": "ONNX",
    "writing the HLS project and the DRS table": HLS,
    "lowering with TVM": "TVM without LLVM",
    "checking and placing the files": PLACING,
}
"""What `progress` is told -> row of the table."""


@dataclass(frozen=True)
class Seconds:
    """CPU seconds of a process and its children, and wall seconds."""

    cpu: float
    wall: float

    @staticmethod
    def now() -> Seconds:
        """Return both clocks."""
        usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        return Seconds(sum(u.ru_utime + u.ru_stime for u in usages), time.perf_counter())

    def __add__(self, other: Seconds) -> Seconds:
        return Seconds(self.cpu + other.cpu, self.wall + other.wall)

    def __sub__(self, other: Seconds) -> Seconds:
        return Seconds(self.cpu - other.cpu, self.wall - other.wall)


@dataclass(frozen=True)
class Row:
    """Medians of one target in one checkout.

    Attributes:
        total: of `fastcar_compile.compile`, imports included.
        rounds: CPU seconds of `total` in each round.
    """

    checkout: str
    target: str
    total: Seconds
    stages: dict[str, Seconds]
    rounds: tuple[float, ...]


class Clock:
    """Adds up seconds by stage; inside of a `timed` function they count for that function instead."""

    def __init__(self) -> None:
        self.stages: dict[str, Seconds] = {}
        self._stage, self._since = OTHER, Seconds.now()

    def enter(self, stage: str) -> str:
        """Begin a stage; return the one before."""
        now, before = Seconds.now(), self._stage
        self.stages[before] = self.stages.get(before, Seconds(0, 0)) + (now - self._since)
        self._stage, self._since = stage, now
        return before

    def timed(self, owner: Any, name: str, stage: str) -> None:
        """Count what a function of a third party takes as a stage."""
        inner: Callable[..., Any] = getattr(owner, name)

        def outer(*args: Any, **kwargs: Any) -> Any:
            before = self.enter(stage)
            try:
                return inner(*args, **kwargs)
            finally:
                self.enter(before)

        setattr(owner, name, outer)

    def say(self, name: str) -> None:
        """Begin the stage of what `progress` is told. Before code is generated, LLVM's share of it is set apart."""
        self.enter(STAGES[name])
        if name == "writing the weights":
            importlib.import_module("tvm")
            self.timed(sys.modules["tvm.tirx.build"], "codegen_build", LLVM)
            self.timed(sys.modules["tvm_ffi.module"].Module, "write_to_file", LLVM)


def timed_build(model: Path, target: str, output: Path, **options: Any) -> dict[str, Seconds]:
    """Compile a folder in this process, with the package that is first on its path; return seconds by stage."""
    os.environ["FASTCAR_NO_CACHE"] = "1"  # for builds that name no cache
    clock = Clock()
    for owner, name in ((builtins, "__import__"), (importlib, "import_module")):
        clock.timed(owner, name, IMPORT)
    import fastcar_compile as fc

    if "threshold" in options:
        options["replay"] = fc.ReplayConfig(gate="input_delta", threshold=options.pop("threshold"))
    fc.compile(model, target=target, **options, output=output, progress=clock.say)
    clock.enter(OTHER)
    return clock.stages


def child(checkout: Path, model: Path, target: str, output: Path, options: dict[str, Any]) -> dict[str, Seconds]:
    """Return the seconds of one build in a process of its own."""
    environment = {**os.environ, "PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, "--child", str(model), target, str(output), json.dumps(options)]
    run = subprocess.run(command, env=environment, cwd=checkout, stdout=subprocess.PIPE, text=True, check=True)
    return {name: Seconds(**values) for name, values in json.loads(run.stdout.splitlines()[-1]).items()}


def measure(
    checkouts: Sequence[Path], targets: Sequence[str], model: Path, rounds: int, options: dict[str, Any]
) -> list[Row]:
    """Return a row per checkout and target; the checkouts run by turns."""
    places = [(checkout, target) for target in targets for checkout in checkouts]
    runs: dict[tuple[Path, str], list[dict[str, Seconds]]] = {place: [] for place in places}
    for _ in range(rounds):
        for checkout, target in places:
            with tempfile.TemporaryDirectory(dir=model.parent) as folder:
                runs[checkout, target].append(child(checkout, model, target, Path(folder, "artifact"), options))
    return [_row(checkout, target, found) for (checkout, target), found in runs.items()]


def measure_cached(targets: Sequence[str], model: Path, rounds: int, options: dict[str, Any]) -> list[Row]:
    """Return rows of each target: the build that fills a cache, one of another threshold, and that one again."""
    sweep = {"first": 0.25, "another threshold": 0.5, "equal": 0.5}
    runs: dict[str, list[dict[str, Seconds]]] = {f"{name}, {target}": [] for target in targets for name in sweep}
    for _, target in ((number, target) for number in range(rounds) for target in targets):
        # The artifacts of a sweep stay: removing one changes the states of the files that it shares with the cache.
        with tempfile.TemporaryDirectory(dir=model.parent) as folder:
            for name, threshold in sweep.items():
                given = {**options, "threshold": threshold, "cache": f"{folder}/cache"}
                runs[f"{name}, {target}"].append(child(HERE, model, target, Path(folder, name), given))
    return [_row(HERE, name, found) for name, found in runs.items()]


def _row(checkout: Path, target: str, runs: Sequence[dict[str, Seconds]]) -> Row:
    totals = [sum(run.values(), Seconds(0, 0)) for run in runs]
    names = dict.fromkeys(name for run in runs for name in run)
    stages = {name: _median([run.get(name, Seconds(0, 0)) for run in runs]) for name in names}
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=checkout, stdout=subprocess.PIPE, text=True, check=True
    )
    return Row(commit.stdout.strip(), target, _median(totals), stages, tuple(t.cpu for t in totals))


def _median(values: Sequence[Seconds]) -> Seconds:
    return Seconds(statistics.median(v.cpu for v in values), statistics.median(v.wall for v in values))


def table(rows: Sequence[Row]) -> str:
    """Return the rows as a table in Markdown: CPU seconds by stage, then CPU and wall seconds of all."""
    names = [name for name in dict.fromkeys([IMPORT, *STAGES.values(), LLVM]) if name != OTHER] + [OTHER]
    heads = ["CPU s", *(f"{row.target}, {row.checkout}" for row in rows)]
    lines = [heads, ["---"] * len(heads)]
    lines += [[name, *(f"{row.stages.get(name, Seconds(0, 0)).cpu:.2f}" for row in rows)] for name in names]
    lines += [["all, CPU s", *(f"{row.total.cpu:.2f}" for row in rows)]]
    lines += [["all, wall s", *(f"{row.total.wall:.2f}" for row in rows)]]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def parse() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", type=Path, default=None, help="another checkout, whose package is compared")
    parser.add_argument("--targets", default=",".join(TARGETS), help="names separated by commas")
    parser.add_argument("--rounds", type=int, default=3, help="builds of each target and checkout; medians count")
    parser.add_argument("--cached", action="store_true", help="builds that share a cache, instead of new ones")
    parser.add_argument("--model", type=Path, default=None, help="a folder to compile instead of random weights")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--intermediate", type=int, default=0, help="default: 2.75 x hidden")
    parser.add_argument("--vocab", type=int, default=64)
    parser.add_argument("--max-seq-len", type=int, default=2049)
    parser.add_argument("--quant", default="w8a8")
    parser.add_argument("--folder", type=Path, default=None, help="folder for the checkpoint and the artifacts")
    parser.add_argument("--json", type=Path, default=None, help="write the rows here")
    parser.add_argument("--child", nargs=4, default=None, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    """Measure, print, and write the rows."""
    options = parse()
    if options.child:
        model, target, output, words = options.child
        warnings.simplefilter("ignore")  # of fallbacks; the table is not about them
        found = timed_build(Path(model), target, Path(output), **json.loads(words))
        print(json.dumps({name: asdict(seconds) for name, seconds in found.items()}))
        return
    from compile import Case, write_checkpoint

    case = Case(
        *(options.layers, options.hidden, options.intermediate or options.hidden * 11 // 4, options.vocab),
        *(options.max_seq_len, options.quant, ""),
    )
    checkouts = [HERE] if options.against is None else [options.against.resolve(), HERE]
    given = {"quant": case.quant, "tokens_per_frame": 256}
    if options.folder is not None:
        options.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=options.folder) as place:
        model = Path(place).resolve() / "model"
        if options.model is None:
            write_checkpoint(model, case)
        else:
            model.symlink_to(options.model.resolve())
        targets = options.targets.split(",")
        if options.cached:
            rows = measure_cached(targets, model, options.rounds, given)
        else:
            rows = measure(checkouts, targets, model, options.rounds, given)
    if options.json is not None:
        result = {"load": os.getloadavg()[0], "rows": [asdict(row) for row in rows]}
        options.json.write_text(json.dumps(result, indent=1, sort_keys=True) + "\n", "utf-8")
    print(table(rows))


if __name__ == "__main__":
    main()
