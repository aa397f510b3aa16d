"""Speed of `fc.calibrate` on several workers: the tables of docs/measurements/cluster.md.

It calibrates by turns in this process, on one worker with one thread, on two and on a Dask cluster of two, and ends
with an error where one of them finds other bytes. Then it says how long recorded tasks take on 1 to 1,000 workers.
"""

from __future__ import annotations

import argparse
import heapq
import json
import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from quality import options_of
from subjects import DATA, DRAWN, GAME, subject_of

import fastcar_compile as fc

COUNTS = (1, 2, 4, 10, 30, 100, 300, 1000)
"""Workers of the table of makespans."""

MANY = 1000
"""Slices of a large calibration; their times are drawn from those that were recorded."""

MALLOC = {"MALLOC_TRIM_THRESHOLD_": 1 << 30, "MALLOC_MMAP_THRESHOLD_": 1 << 25}
"""Environment of Dask's workers. Dask's own threshold makes glibc map and unmap every large tensor."""

Calls = list[list[float]]
"""Seconds of each task, by measurement."""


class Recorded(Executor):
    """Records the seconds that tasks take in their workers. `calls` has them by measurement."""

    def __init__(self, executor: Executor) -> None:
        self._executor, self._tasks = executor, list[tuple[Any, Future[Any]]]()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Submit a task, and return its result alone."""
        (task,) = args
        inner, outer = self._executor.submit(timed, fn, task), Future[Any]()
        self._tasks.append((task, inner))
        inner.add_done_callback(partial(_passed_on, outer))
        return outer

    @property
    def calls(self) -> Calls:
        """The seconds; the first task of every measurement has index 0."""
        found: Calls = []
        for task, future in self._tasks:
            if task.index == 0:
                found.append([])
            found[-1].append(future.result()[1])
        return found


def _passed_on(outer: Future[Any], inner: Future[Any]) -> None:
    if (error := inner.exception()) is not None:
        outer.set_exception(error)
    else:
        outer.set_result(inner.result()[0])


def timed(function: Callable[[Any], Any], task: Any) -> tuple[Any, float]:
    """Return what a task gives, and its seconds."""
    begun = time.perf_counter()
    return function(task), time.perf_counter() - begun


@contextmanager
def processes(count: int) -> Iterator[Executor]:
    """Open a pool of spawned processes that have imported what they need."""
    with ProcessPoolExecutor(count, multiprocessing.get_context("spawn"), _ready) as pool:
        list(pool.map(_wait, range(count)))
        yield pool


def _ready() -> None:
    import fastcar_compile.tune.workers  # noqa: F401


def _wait(_number: int) -> None:
    time.sleep(2)


@contextmanager
def dask(count: int) -> Iterator[Executor]:
    """Open a cluster of this machine whose workers have one thread and have imported what they need."""
    from dask import config
    from distributed import Client, LocalCluster

    options: dict[str, Any] = {"n_workers": count, "threads_per_worker": 1, "dashboard_address": None}
    config.set({"distributed.nanny.pre-spawn-environ": MALLOC})
    with LocalCluster(**options) as cluster, Client(cluster) as client:
        client.run(_ready)
        yield client.get_executor()


def makespan(calls: Calls, workers: int) -> float:
    """Return the seconds of all measurements, one after the other, each task given to the first free worker."""
    total = 0.0
    for tasks in calls:
        free = [0.0] * min(workers, len(tasks))
        for seconds in tasks:
            heapq.heapreplace(free, free[0] + seconds)
        total += max(free)
    return total


def speed(decoder: Any, gate: str, options: argparse.Namespace) -> Calls:
    """Print a row per way and round, and return the recorded tasks of one worker."""
    videos, model, replay = decoder.calibration(options.count), decoder.model(), decoder.config(gate)
    ways: dict[str, Callable[[], Any]] = {
        f"no executor, {torch.get_num_threads()} threads": nullcontext,
        "one process": partial(processes, 1),
        "two processes": partial(processes, 2),
        "Dask, two workers": partial(dask, 2),
    }
    print("| decoder | gate | who | round | seconds | over one process | same bytes |\n|---|---|---|---|---|---|---|")
    first, calls = "", list[list[float]]()
    for number in range(options.rounds):
        taken: dict[str, float] = {}
        for who, opened in sorted(ways.items(), key=lambda way: way[0] != "one process"):
            with opened() as executor:
                pool = Recorded(executor) if who == "one process" else executor
                begun = time.perf_counter()
                found = fc.calibrate(model, videos, replay=replay, executor=pool, **options_of(decoder, gate))
                taken[who] = time.perf_counter() - begun
                calls = pool.calls if isinstance(pool, Recorded) else calls
            text = json.dumps(found.to_json(), sort_keys=True)
            first = first or text
            ratio = f"{taken['one process'] / taken[who]:.2f}x"
            cells = (
                decoder.name,
                f"`{gate}`",
                who,
                number,
                f"{taken[who]:.1f}",
                ratio,
                "yes" if text == first else "NO",
            )
            print(f"| {' | '.join(map(str, cells))} |", flush=True)
            if text != first:
                raise SystemExit(f"{who}: {text}\nothers: {first}")
    return calls


def makespans(calls: Calls) -> None:
    """Print how long the recorded tasks take on more workers, and on MANY slices."""
    random = np.random.default_rng(0)
    large = [random.choice(tasks, MANY).tolist() for tasks in calls]
    # The first task of a slice computes everything, as a worker does that has seen neither slice nor thresholds.
    whole = max(calls, key=sum)
    unknown = [random.choice(whole, MANY).tolist() for _ in calls]
    slices = sorted({len(tasks) for tasks in calls})
    seconds = [s for tasks in calls for s in tasks]
    text = f"{len(calls)} measurements of {slices} slices. A task takes {np.mean(seconds):.2f} s"
    print(f"\n{text}, all {sum(seconds):.0f} s.\n")
    print(f"| workers | as recorded | {MANY} slices | {MANY} slices, nothing kept |\n|---|---|---|---|")
    for count in COUNTS:
        cells = (f"{makespan(each, count):,.0f} s" for each in (calls, large, unknown))
        print(f"| {count} | {' | '.join(cells)} |")


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options of the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--decoder", choices=(*DRAWN, GAME[0]), default=GAME[0])
    parser.add_argument("--gate", default="learned")
    parser.add_argument("--count", type=int, default=32, help="calibration videos")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--data", type=Path, default=DATA, help="recorded play")
    return parser.parse_args(arguments)


def main() -> None:
    options = parsed()
    makespans(speed(subject_of(options.decoder, options.data), options.gate, options))


if __name__ == "__main__":
    main()
