"""Other processes that measure: the same bytes as this process gives, whoever computes, and whoever dies."""

import json
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import BrokenExecutor, Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from decoders import llama
from gates.networks import networks

import fastcar_compile as fc
from fastcar_compile.cli.options import executor_of
from fastcar_compile.errors import InputError, UserError
from fastcar_compile.tune import calibrate, search, workers
from fastcar_compile.tune.calibrate import Setting, program_of
from fastcar_compile.tune.evaluate import Case, SinkWindow, Study
from fastcar_compile.tune.training import train
from fastcar_compile.tune.workers import Job, Subject, Task, Workers, answer

FRAME = 8
LEARNED = fc.ReplayConfig(gate="learned", gate_weights=networks(64, 5, 3), threshold=[0.0, None])
CASES = [
    Case("dense"),
    Case("fixed", fc.ReplayConfig(gate="input_delta", threshold=1.0, max_chain=1), 0.5),
    Case("fixed", LEARNED, 0.5, SinkWindow(6, 2)),
]


def videos() -> np.ndarray:
    """int64 [5, 1 + 4 frames] of few symbols: three slices of two rows."""
    return np.concatenate([np.full((5, 1), 16), np.random.default_rng(1).integers(0, 3, (5, 32))], 1)


def quick(patch: pytest.MonkeyPatch) -> None:
    """Small slices and a coarse search."""
    patch.setattr(calibrate, "MOST_ROWS", 2)
    patch.setattr(search, "QUANTILES", (0.4, 0.9))
    patch.setattr(search, "SPREADS", ())


@pytest.fixture(autouse=True)
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    quick(monkeypatch)


@pytest.fixture(scope="module")
def dask() -> Iterator[Executor]:
    """Two workers with one thread each."""
    from distributed import Client, LocalCluster

    options: dict[str, Any] = {"n_workers": 2, "threads_per_worker": 1, "dashboard_address": None}
    with LocalCluster(**options) as cluster, Client(cluster) as client:
        yield client.get_executor()


@pytest.fixture(scope="module")
def loky() -> Iterator[Executor]:
    from loky import get_reusable_executor

    pool = get_reusable_executor(2)
    yield pool
    pool.shutdown(wait=True)


def reports(executor: Executor | None, scratch: str | Path | None = None) -> str:
    """Thresholds, and the rows of a study, as JSON."""
    where: dict[str, Any] = {"executor": executor, "scratch": scratch}
    options: dict[str, Any] = {"replay": LEARNED, "tokens_per_frame": FRAME, "target_replay": 0.3, "search_videos": 2}
    found = fc.calibrate(llama(), videos(), **options, **where)
    rows = Study(llama(), videos(), decoder="tiny", tokens_per_frame=FRAME, **where).rows(CASES)
    return json.dumps([found.to_json(), rows], sort_keys=True)


@pytest.fixture(scope="module")
def expected() -> str:
    with pytest.MonkeyPatch.context() as patch:
        quick(patch)
        return reports(None)


class Watched(Executor):
    """Calls `meet(number)` before the task of each number is given to an executor."""

    def __init__(self, executor: Executor, meet: Callable[[int], None]) -> None:
        self._executor, self._meet, self.count = executor, meet, 0

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        self.count += 1
        self._meet(self.count)
        return self._executor.submit(fn, *args, **kwargs)


def test_tasks_are_data_and_files_are_checked(tmp_path: Path) -> None:
    program = program_of(llama(), (5, 33), FRAME)
    subject = Subject(program, LEARNED, videos(), Setting(), 2, SinkWindow(6, 2))
    with ThreadPoolExecutor(1) as pool:
        asked = Workers(pool, f"file://{tmp_path}")
        job = asked.job(subject)
        task = Task(job, 2, (0.1, None), "details", 1)
        data = json.loads(json.dumps(asdict(task)))
        assert data["job"]["videos"]["uri"].startswith(f"file://{tmp_path}/fastcar-")
        assert Job(**vars(job)) == asked.job(subject), "nothing is written twice"
        found, own = answer(task), subject.evaluator().answer(2, (0.1, None), "details")
        for name in ("losses", "predicted", "replayed"):
            np.testing.assert_array_equal(getattr(found, name), getattr(own, name))
        path = Path(job.videos.uri.removeprefix("file://"))
        path.write_bytes(path.read_bytes()[:-1] + b"\1")
        with pytest.raises(InputError, match=r"a file of this calibration has changed\n.*file://"):
            job.videos.path()
        path.unlink()
        with pytest.raises(InputError, match="does not find a file of this calibration"):
            workers.File(str(path), job.videos.sha256).path()
        del asked
    assert not list(tmp_path.iterdir()), "the files are gone with the workers"


def test_threads_give_the_same_bytes_and_a_failed_task_is_tried_again(expected: str) -> None:
    failed: list[int] = []

    def fail(number: int) -> None:
        if number in (3, 8, 12):
            failed.append(number)
        if number == 12:
            raise RuntimeError("no worker takes a task now")

    class Failing(Watched):
        def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
            future = super().submit(fn, *args, **kwargs)
            if self.count in (3, 8):
                future.result()
                future = Future[Any]()
                future.set_exception(RuntimeError("the worker is gone"))
            return future

    before = torch.get_num_threads()
    with ThreadPoolExecutor(2) as pool:
        assert reports(Failing(pool, fail)) == expected
    assert failed == [3, 8, 12]
    assert torch.get_num_threads() == before


@pytest.mark.thorough  # three processes of it; threads lose tasks above, and tasks are data
def test_dask_gives_the_same_bytes_while_a_worker_is_killed(dask: Any, expected: str) -> None:
    killed: list[int] = []

    def kill(number: int) -> None:
        if number == 10:
            pids = dask._client.run(os.getpid)
            killed.append(min(pids.values()))
            os.kill(killed[0], signal.SIGKILL)

    assert reports(Watched(dask, kill)) == expected
    assert killed


def test_an_executor_that_takes_no_task_is_named() -> None:
    class Gone(Executor):
        def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
            raise BrokenExecutor("a process died")

    with pytest.raises(UserError, match="a task failed twice on the workers of Gone: BrokenExecutor: a process died"):
        reports(Gone())


@pytest.mark.thorough  # it starts a process; the error is that of the test before
def test_a_broken_pool_is_named_and_the_journal_goes_on(tmp_path: Path) -> None:
    options: dict[str, Any] = {"replay": LEARNED, "tokens_per_frame": FRAME, "target_replay": 0.3}
    journal = tmp_path / "journal.json"

    def kill(number: int) -> None:
        if number == 7:
            os.kill(next(iter(pool._processes)), signal.SIGKILL)

    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        text = "a task failed twice on the workers of Watched: BrokenProcessPool"
        with pytest.raises(UserError, match=text):
            fc.calibrate(llama(), videos(), **options, journal=journal, executor=Watched(pool, kill))
    kept, lines = len(json.loads(journal.read_text())["measurements"]), list[str]()
    whole = fc.calibrate(llama(), videos(), **options)
    assert fc.calibrate(llama(), videos(), **options, journal=journal, progress=lines.append) == whole
    assert kept >= 1
    assert lines[0].startswith(f"all videos: {kept + 1} measured")


@pytest.mark.thorough  # an executor like others
def test_loky_gives_the_same_bytes(loky: Executor, expected: str) -> None:
    assert reports(loky) == expected


@pytest.mark.thorough
def test_executors_of_the_command_line(tmp_path: Path) -> None:
    factory = tmp_path / "own.py"
    factory.write_text(
        "from concurrent.futures import ThreadPoolExecutor\ndef threads(): return ThreadPoolExecutor(3)\nwrong = dict\n"
    )
    with executor_of(None) as none:
        assert none is None
    with executor_of(f"{factory}:threads") as threads:
        assert isinstance(threads, ThreadPoolExecutor)
    with executor_of("processes:3") as processes:
        assert isinstance(processes, ProcessPoolExecutor)
    for text, said in (
        ("processes:none", "'none' is not a number of processes"),
        (f"{factory}:wrong", "makes a dict, and no concurrent.futures.Executor"),
        ("dask:post://office", "no scheduler answers"),
        ("ray", "names no function"),
    ):
        with pytest.raises(UserError, match=said), executor_of(text):
            pass


@pytest.mark.thorough  # its data passes are tasks as those of a calibration are
def test_a_gate_is_trained_by_workers_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of four videos in two slices: the same gate without an executor, with one, and after an interruption."""
    monkeypatch.setattr(train, "SLICE_TOKENS", 2 * 33)

    def trained(**options: Any) -> fc.TrainedGate:
        return fc.train_gate(llama(), videos(), target_replay=0.5, units=4, steps=4, tokens_per_frame=FRAME, **options)

    def stop(line: str) -> None:
        if line.startswith("step 2"):
            raise KeyboardInterrupt

    expected, path = trained(), tmp_path / "checkpoint"
    with ThreadPoolExecutor(2) as pool:
        found = trained(executor=pool, scratch=tmp_path)
        with pytest.raises(KeyboardInterrupt):
            trained(executor=pool, scratch=tmp_path, checkpoint=path, progress=stop)
        resumed = trained(executor=pool, scratch=tmp_path, checkpoint=path)
        started, alone = trained(start=expected, executor=pool, scratch=tmp_path), trained(start=expected)
    for one, other in ((found, expected), (resumed, expected), (started, alone)):
        assert one.facts() == other.facts()
        for mine, its in zip(one.layers, other.layers, strict=True):
            assert all(torch.equal(mine[name], its[name]) for name in its)
    assert started.facts() != found.facts()
