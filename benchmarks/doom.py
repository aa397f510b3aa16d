"""Milliseconds per token and frames per second of the game decoder: our engine, dense and with replay, and peers.

    python benchmarks/doom.py --docs            # the shipped decoder; tables of docs/measurements/doom_speed.md
    chrt -r 1 python benchmarks/doom.py --docs  # the same on a busy machine: no other process interrupts the engines
    python benchmarks/doom.py --decoder FOLDER --contexts FILE --thresholds FILE --json rows.json
    python benchmarks/doom.py --quick           # two rounds, two of our precisions, onnxruntime

All engines decode the same weights with the same threads at the end of a full window of 16 frames. Each engine is a
process, which is stopped between its blocks of one frame. The blocks of all engines alternate.
docs/measurements/speed.md says how peers are set up.
"""

import argparse
import json
import math
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from decode import working_folder
from pages import MEASUREMENTS, ROOT, write_table
from speed.doom_plan import OWN, PEERS, DoomPlan, sizes_of
from speed.doom_report import CLOSEST, Parts, against_peers, parts_table, table
from speed.engines import OURS
from speed.report import Row, conditions, rows_of
from speed.runner import Result, environment, run_group
from speed.sizes import Sizes

from fastcar_compile.artifact.thresholds import Thresholds

WORLD = ROOT / "examples" / "doom" / "world"
FRAMES = 16
"""Frames of the decoder's window."""


@dataclass(frozen=True)
class Measured:
    """Rows of the table, and the parts of our step."""

    rows: list[Row]
    parts: Parts


def measure(plan: DoomPlan, quick: bool) -> Measured:
    """Measure all engines by turns, then the parts of our step."""
    started = time.monotonic()

    def say(text: str) -> None:
        print(f"{time.monotonic() - started:6.1f} s  {text}", file=sys.stderr, flush=True)

    own, peers = ((*OWN[:1], CLOSEST), PEERS[2:3]) if quick else (OWN, PEERS)
    jobs = plan.jobs(own, peers)
    results = run_group(jobs, say, reads=0)
    say("parts of a step")
    chosen = next(job for job in jobs if job.engine == OURS and (job.precision, job.kv) == CLOSEST)
    command = [sys.executable, "-W", "ignore", "-m", "speed.parts", json.dumps(chosen.to_json())]
    run = subprocess.run(command, capture_output=True, text=True, env=environment(chosen), cwd=Path(__file__).parent)
    if run.returncode:
        raise RuntimeError(f"the parts of a step could not be measured: {run.stderr.strip()[-500:]}")
    return Measured(rows_of(results, _reference(results), 0.0), json.loads(run.stdout))


def _reference(results: list[Result]) -> list[float]:
    """Return the logits of our float32 engine, which PyTorch's and the others' are compared with."""
    return next(r.logits for r in results if r.logits)


def tables_of(sizes: Sizes, measured: Measured) -> dict[str, str]:
    """Return what the page shows, by its marker."""
    alone = os.sched_getscheduler(0) in (os.SCHED_RR, os.SCHED_FIFO)
    priority = "All engines have real-time priority, so other processes do not interrupt them.\n" if alone else ""
    return {
        "machine": conditions(sizes, measured.rows) + priority,
        "rows": table(measured.rows, sizes.tokens_per_frame),
        "ratios": "".join(f"- {line}\n" for line in against_peers(measured.rows)),
        "parts": parts_table(measured.parts),
    }


def parse() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--decoder", type=Path, default=WORLD / "decoder", help="Hugging Face folder")
    parser.add_argument("--contexts", type=Path, default=WORLD / "starts.safetensors", help="real play, as tokens")
    parser.add_argument(
        "--thresholds", type=Path, help="of `fastcar calibrate` or the shipped cases.json; default: no play"
    )
    parser.add_argument("--target", type=float, default=0.5, help="share to replay, which names a case of cases.json")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--quick", action="store_true", help="few engines and rounds")
    parser.add_argument("--json", type=Path, help="write rows and parts here")
    parser.add_argument("--docs", action="store_true", help="write the tables of docs/measurements/doom_speed.md")
    parser.add_argument("--folder", type=Path, help="keep all files here, and use existing ones")
    return parser.parse_args()


def thresholds_of(path: Path | None, target: float) -> tuple[str, tuple[float, ...]]:
    """Return gate and thresholds of a file. A layer that never replays has plus infinity, which no TAS passes.

    Args:
        target: of a file of cases, as the quality benchmark writes them: the share of the case `tas, mean of heads`.
    """
    if path is None:
        return "tas", ()
    read = json.loads(path.read_text("utf-8"))
    if isinstance(read, list):
        case = next(c for c in read if c["calibration"] == "tas, mean of heads" and c["target"] == target)
        values = case["replay"]["threshold"]
        return "tas", tuple(math.inf if value is None else float(value) for value in values)
    found = Thresholds.load(path)
    return found.gate, tuple(math.inf if value is None else value for value in found.values)


def main() -> None:
    """Measure, print, and write the requested files."""
    options = parse()
    gate, thresholds = thresholds_of(options.thresholds, options.target)
    sizes = sizes_of(options.decoder, FRAMES, options.threads, 2 if options.quick else options.rounds)
    with working_folder(options.folder) as folder:
        contexts = options.contexts.resolve()
        plan = DoomPlan(sizes, options.decoder.resolve(), contexts, folder, gate, thresholds)
        measured = measure(plan, options.quick)
    tables = tables_of(sizes, measured)
    print("\n".join(tables.values()))
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps({"rows": measured.rows, "parts": measured.parts}, indent=1) + "\n", "utf-8")
    if options.docs:
        for name, text in tables.items():
            write_table(MEASUREMENTS / "doom_speed.md", name, text)


if __name__ == "__main__":
    main()
