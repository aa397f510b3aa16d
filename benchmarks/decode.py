"""Milliseconds per decoded token, per step of a batch and per prompt: our engine, PyTorch, onnxruntime, OpenVINO and
llama.cpp, dense and with replay.

    python benchmarks/decode.py --json out.json --plot out.png
    python benchmarks/decode.py --docs          # tables of docs/measurements/speed.md, and docs/images/speed.png
    python benchmarks/decode.py --quick         # a small decoder, about two minutes
    python benchmarks/decode.py --workloads batch,prefill --kept rows.json --docs    # tables of batch.md
    python benchmarks/decode.py --workloads batch --batches 8,32 --precisions w8a8 --kept rows.json

All engines decode the same random Llama with the same threads at the same context. Each engine is a process, which is
stopped between its blocks of tokens. The blocks of a group's engines alternate. docs/measurements/speed.md says how
peers are set up, and docs/measurements/batch.md what is different for batches and prompts.
"""

import argparse
import json
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from compile import Case, write_checkpoint
from pages import MEASUREMENTS, ROOT, write_table
from speed.batch_pages import batch_tables
from speed.batch_plan import BATCHES, LAYERS, PROMPTS, BatchPlan, Size
from speed.batch_rows import Kept
from speed.batch_run import measure as measure_batches
from speed.plan import LONG, PEERS, Plan
from speed.plot import plot
from speed.report import Row, conditions, rows_of, speedups, table
from speed.runner import Result, Say, run_group
from speed.sizes import BATCH, DECODE, PREFILL, WORKLOADS, Sizes

QUICK = Sizes(hidden=256, intermediate=512, layers=4, vocab=256, context=96, tokens_per_frame=32, rounds=2, samples=1)

QUICK_PRECISIONS = ("float32", "w4a8")

SETTABLE = (
    *("hidden", "intermediate", "layers", "vocab", "context"),
    *("tokens_per_frame", "threads", "rounds", "samples"),
)
"""Fields of `Sizes` that are options. The checkpoint that is written is a Llama with one key/value head per head."""


def told() -> Say:
    """Return a function that prints a line with the seconds since now."""
    started = time.monotonic()

    def say(text: str) -> None:
        print(f"{time.monotonic() - started:6.1f} s  {text}", file=sys.stderr, flush=True)

    return say


def checkpoint(folder: Path, sizes: Sizes, longest: int, say: Say) -> Path:
    """Return the folder of the random weights. Write them where they are missing."""
    place = folder / f"checkpoint-{sizes.layers}"
    if not (place / "config.json").exists():
        say("writing the checkpoint")
        write_checkpoint(
            place, Case(sizes.layers, sizes.hidden, sizes.intermediate, sizes.vocab, longest, "none", "cpu")
        )
    return place


def measure(plan: Plan, precisions: tuple[str, ...], keep: bool, say: Say) -> Iterator[list[list[Row]]]:
    """Yield the rows of all groups measured so far, after each group. Delete a group's files unless `keep`."""
    groups: list[list[Result]] = []
    for precision in precisions:
        groups.append(run_group(plan.jobs(precision), say))
        if not keep:
            shutil.rmtree(plan.folder / precision, ignore_errors=True)
        together = [r for group in groups for r in group]
        reference, every = _reference(together), _bandwidth(together)
        yield [rows_of(group, reference, _bandwidth(group) or every) for group in groups]


def _reference(results: list[Result]) -> list[float]:
    """Return the logits of PyTorch eager, or of another engine that ran."""
    ran = sorted((r for r in results if r.logits), key=lambda r: r.job.engine != "pytorch eager")
    return ran[0].logits if ran else []


def _bandwidth(results: list[Result]) -> float:
    """Return the median of our engine's bandwidth readings in GB/s; 0 if there are none."""
    return statistics.median([g for r in results for g in r.gigabytes] or [0.0])


def parse() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in SETTABLE:
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=None)
    parser.add_argument("--quick", action="store_true", help="a small decoder and few tokens")
    parser.add_argument("--precisions", default="", help=f"of {', '.join(PEERS)}, separated by commas")
    parser.add_argument("--workloads", default=DECODE, help=f"of {', '.join(WORKLOADS)}")
    parser.add_argument("--batches", default=",".join(map(str, BATCHES)), help="rows")
    parser.add_argument("--prompts", default=",".join(map(str, PROMPTS)), help="tokens")
    parser.add_argument("--host-cpu", default="native", help="our instruction set in batches and prompts")
    parser.add_argument("--kept", type=Path, default=None, help="rows of batches and prompts: read, and written again")
    parser.add_argument("--json", type=Path, default=None, help="write the rows of one video here, after every group")
    parser.add_argument("--plot", type=Path, default=None, help="write the picture of one video here")
    parser.add_argument("--docs", action="store_true", help="write tables and pictures of docs/measurements")
    parser.add_argument("--folder", type=Path, default=None, help="keep all files here, and use existing ones")
    options = parser.parse_args()
    chosen = options.precisions or ",".join(QUICK_PRECISIONS if options.quick else PEERS)
    options.precisions, options.workloads = tuple(chosen.split(",")), tuple(options.workloads.split(","))
    for what, given, known in (
        ("precision", options.precisions, tuple(PEERS)),
        ("workload", options.workloads, WORKLOADS),
    ):
        if unknown := [p for p in given if p not in known]:
            parser.error(f"unknown {what} {unknown[0]!r}; known: {', '.join(known)}")
    return options


def sizes_of(options: argparse.Namespace, usual: Sizes) -> Sizes:
    """Return the sizes of the command line; those that it leaves out are the usual ones."""
    given = {name: getattr(options, name) for name in SETTABLE if getattr(options, name) is not None}
    return replace(usual, **given)


@contextmanager
def working_folder(given: Path | None) -> Iterator[Path]:
    """Yield the given folder, or a temporary one."""
    if given is not None:
        given.mkdir(parents=True, exist_ok=True)
        yield given.resolve()
        return
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


def one_video(options: argparse.Namespace, folder: Path, say: Say) -> None:
    """Measure the decode step of one video, print, and write the requested files.

    A group's rows are printed, and written to `--json`, when the group ends: an interrupted run keeps them.
    """
    sizes = sizes_of(options, QUICK if options.quick else Sizes())
    weights = checkpoint(folder, sizes, max(*LONG, 2 * sizes.context), say)
    plan = Plan(sizes, weights, folder, extras=not options.quick)
    rows: list[Row] = []
    for groups in measure(plan, options.precisions, options.folder is not None, say):
        rows = [row for group in groups for row in group]
        print(table(groups[-1]), flush=True)
        if options.json is not None:
            options.json.write_text(json.dumps(rows, indent=1) + "\n", "utf-8")
    ratios = "\n".join(f"- {line}" for line in speedups(rows)) + "\n"
    print(ratios)
    if options.plot is not None:
        plot(rows, options.plot)
    if options.docs:
        for name, text in {"machine": conditions(sizes, rows), "rows": table(rows), "ratios": ratios}.items():
            write_table(MEASUREMENTS / "speed.md", name, text)
        plot(rows, ROOT / "docs" / "images" / "speed.png")


def batches_and_prompts(options: argparse.Namespace, folder: Path, say: Say) -> None:
    """Measure batches and prompts, print, and write the requested files."""
    prompts = [int(n) for n in options.prompts.split(",")] if PREFILL in options.workloads else []
    batches = [int(n) for n in options.batches.split(",")] if BATCH in options.workloads else []
    usual = QUICK if options.quick else replace(Sizes(), layers=LAYERS)
    sizes = replace(sizes_of(options, usual), longest=max(*PROMPTS, *prompts))
    weights = checkpoint(folder, sizes, max(sizes.longest, 2 * sizes.context), say)
    plan = BatchPlan(sizes, weights, folder, options.rounds or 0, host_cpu=options.host_cpu)
    kept = Kept(options.kept)
    chosen = [*(Size(BATCH, n) for n in batches), *(Size(PREFILL, n) for n in prompts)]
    measure_batches(plan, options.precisions, chosen, kept, say, options.folder is not None)
    for name, text in batch_tables(kept.rows).items():
        print(text)
        if options.docs:
            write_table(MEASUREMENTS / "batch.md", name, text)


def main() -> None:
    """Measure, print, and write the requested files."""
    options, say = parse(), told()
    with working_folder(options.folder) as folder:
        if DECODE in options.workloads:
            one_video(options, folder, say)
        if {BATCH, PREFILL} & set(options.workloads):
            batches_and_prompts(options, folder, say)


if __name__ == "__main__":
    main()
