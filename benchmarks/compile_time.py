"""Where the time of `fastcar_compile.compile` goes, and how it compares with another checkout.

    python benchmarks/compile_time.py
    python benchmarks/compile_time.py --against ../before --rounds 5 --json out.json

Every build is a two-layer Llama of random weights in a process of its own. Two checkouts run by turns, and medians
count. Other work on the machine changes CPU seconds too, of both alike: their ratio says more than either of them.
Third parties' modules are imported first, as their own stage: what remains is what this package decides.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

TARGETS = ("cpu", "zcu102")
HERE = Path(__file__).resolve().parent.parent
IMPORT, LLVM, OTHER = "import", "LLVM", "other"
STAGES = {
    "checking the model folder": OTHER,
    "capturing the decode step": "capture and export",
    "rewriting the graph": "passes",
    "choosing the hardware design": "HLS sources",
    "writing the weights": "graphs and weights",
    "exporting to ONNX": "ONNX",
    "writing the HLS project and the DRS table": "HLS sources",
    "lowering with TVM": "TVM without LLVM",
    "checking and placing the files": "hashing and placing",
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
        compile: everything after the imports.
        stages: name -> seconds; `import` is not part of `compile`.
        rounds: CPU seconds of `compile` in each round.
    """

    checkout: str
    target: str
    compile: Seconds
    stages: dict[str, Seconds]
    rounds: tuple[float, ...]


class Clock:
    """Adds up seconds by stage; inside of a `timed` function they count for that function instead."""

    def __init__(self) -> None:
        self.stages: dict[str, Seconds] = {}
        self._stage, self._since = IMPORT, Seconds.now()

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


def build(target: str, folder: Path) -> dict[str, Any]:
    """Compile in this process, with the package that is first on its path; return seconds by stage."""
    clock = Clock()
    import torch
    import tvm_ffi.module
    from transformers import LlamaConfig, LlamaForCausalLM

    import fastcar_compile as fc
    import fastcar_compile.codegen.onnx.export
    import fastcar_compile.codegen.tvm.build

    clock.timed(sys.modules["tvm.tirx.build"], "codegen_build", LLVM)
    clock.timed(tvm_ffi.module.Module, "write_to_file", LLVM)
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 17}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)).eval()
    compile_decoder = fc.compile

    def stage(name: str) -> None:
        clock.enter(STAGES[name])

    clock.enter(OTHER)
    compile_decoder(
        model,
        target=target,
        tokens_per_frame=8,
        max_seq_len=65,
        batch_size=2,
        replay=fc.ReplayConfig(threshold=(0.0, 0.0)),
        prefill_chunk=16,
        output=folder / "artifact",
        progress=stage,
    )
    clock.enter(OTHER)
    return {name: asdict(seconds) for name, seconds in clock.stages.items()}


def child(checkout: Path, target: str) -> dict[str, Seconds]:
    """Return the seconds of one build in a process of its own."""
    environment = {**os.environ, "PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--child", target, folder]
        run = subprocess.run(command, env=environment, cwd=checkout, stdout=subprocess.PIPE, text=True, check=True)
    return {name: Seconds(**values) for name, values in json.loads(run.stdout.splitlines()[-1]).items()}


def measure(checkouts: Sequence[Path], targets: Sequence[str], rounds: int) -> list[Row]:
    """Return a row per checkout and target; the checkouts run by turns."""
    places = [(checkout, target) for target in targets for checkout in checkouts]
    runs: dict[tuple[Path, str], list[dict[str, Seconds]]] = {place: [] for place in places}
    for _ in range(rounds):
        for place in places:
            runs[place].append(child(*place))
    return [_row(checkout, target, found) for (checkout, target), found in runs.items()]


def _row(checkout: Path, target: str, runs: Sequence[dict[str, Seconds]]) -> Row:
    totals = [sum((s for name, s in run.items() if name != IMPORT), Seconds(0, 0)) for run in runs]
    names = dict.fromkeys(name for run in runs for name in run)
    stages = {name: _median([run.get(name, Seconds(0, 0)) for run in runs]) for name in names}
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=checkout, stdout=subprocess.PIPE, text=True, check=True
    )
    return Row(commit.stdout.strip(), target, _median(totals), stages, tuple(t.cpu for t in totals))


def _median(values: Sequence[Seconds]) -> Seconds:
    return Seconds(statistics.median(v.cpu for v in values), statistics.median(v.wall for v in values))


def table(rows: Sequence[Row]) -> str:
    """Return the rows as a table: CPU seconds by stage, then CPU and wall seconds of all but the imports."""
    names = [name for name in dict.fromkeys([IMPORT, *STAGES.values(), LLVM]) if name != OTHER] + [OTHER]
    lines = [f"{'CPU s':<22}" + "".join(f"{row.target + ' ' + row.checkout:>22}" for row in rows)]
    for name in names:
        found = [row.stages.get(name, Seconds(0, 0)).cpu for row in rows]
        lines.append(f"{name:<22}" + "".join(f"{value:>22.2f}" for value in found))
    lines.append(f"{'compile, CPU s':<22}" + "".join(f"{row.compile.cpu:>22.2f}" for row in rows))
    lines.append(f"{'compile, wall s':<22}" + "".join(f"{row.compile.wall:>22.2f}" for row in rows))
    return "\n".join(lines)


def parse() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", type=Path, default=None, help="another checkout, whose package is compared")
    parser.add_argument("--targets", default=",".join(TARGETS), help="names separated by commas")
    parser.add_argument("--rounds", type=int, default=3, help="builds of each target and checkout; medians count")
    parser.add_argument("--json", type=Path, default=None, help="write the rows here")
    parser.add_argument("--child", nargs=2, default=None, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    """Measure, print, and write the rows."""
    options = parse()
    if options.child:
        print(json.dumps(build(options.child[0], Path(options.child[1]))))
        return
    checkouts = [HERE] if options.against is None else [options.against.resolve(), HERE]
    rows = measure(checkouts, options.targets.split(","), options.rounds)
    if options.json is not None:
        result = {"load": os.getloadavg()[0], "rows": [asdict(row) for row in rows]}
        options.json.write_text(json.dumps(result, indent=1, sort_keys=True) + "\n", "utf-8")
    print(table(rows))


if __name__ == "__main__":
    main()
