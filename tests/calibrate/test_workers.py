"""Other processes that measure: the same bytes as this process gives, whoever computes, and whoever dies."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import BrokenExecutor, Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
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
from fastcar_compile.tune import journal as journal_file
from fastcar_compile.tune.calibrate import Setting, program_of
from fastcar_compile.tune.evaluate import Case, SinkWindow, Study
from fastcar_compile.tune.training import steps, train
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


class Lying(Executor):
    """Computes here, and changes the answer of each task."""

    def __init__(self, change: Callable[[Any], Any]) -> None:
        self.change = change

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future = Future[Any]()
        future.set_result(self.change(fn(*args, **kwargs)))
        return future


def other_answer() -> Callable[[Any], Any]:
    """Gives the answer of the first task to every task."""
    first: list[Any] = []

    def change(found: Any) -> Any:
        first.append(found)
        return first[0]

    return change


def field(name: str, value: Any) -> Callable[[Any], Any]:
    return lambda found: replace(found, **{name: value(getattr(found, name)) if callable(value) else value})


NO_ANSWERS: dict[str, Callable[[Any], Any]] = {
    "a text": lambda found: "of another task",
    "nothing": lambda found: None,
    "another task's": other_answer(),
}
NO_SUMS: dict[str, Callable[[Any], Any]] = NO_ANSWERS | {
    "NaN": field("loss", float("nan")),
    "a loss of numpy's float32": field("loss", np.float32(1)),
    "another count": field("count", lambda count: count + 1),
    "other forwards": field("forwards", 3),
    "more replays than forwards": field("replays", lambda replays: replays + 1000),
    "replays of another shape": field("replays", lambda replays: replays[:1]),
    "NaN scores": field("scores", lambda scores: tuple(s * np.float32("nan") for s in scores)),
    "scores that are none": field("scores", 7),
}
NO_TOKENS: dict[str, Callable[[Any], Any]] = {
    "NaN": field("losses", lambda losses: losses * np.float32("nan")),
    "tokens beyond the vocabulary": field("predicted", lambda tokens: tokens + 10**6),
    "other decisions": field("replayed", lambda replayed: replayed.astype(np.int8)),
}


def test_what_answers_no_task_is_refused() -> None:
    """Wrong types, shapes and ranges, and the answers of other tasks."""
    subject = Subject(program_of(llama(), (5, 33), FRAME), LEARNED, videos(), Setting(), 2)
    asked = {"sums": NO_SUMS, "details": NO_ANSWERS | NO_TOKENS}
    lying = Lying(lambda found: found)
    evaluator = subject.evaluator(Workers.of(lying, None))
    assert evaluator.measure((0.1, None)).nll == subject.evaluator().measure((0.1, None)).nll
    for what, changes in asked.items():
        for name, lying.change in changes.items():
            with pytest.raises(UserError, match=r"answer of its task|answers no task") as caught:
                evaluator.measure((0.1, None)) if what == "sums" else evaluator.details((0.1, None))
            assert "start again with workers of this version" in caught.value.hint, name


def test_what_is_no_part_of_a_training_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong types, shapes and ranges; a part of another step is known by its key."""
    parts: list[tuple[Any, Any]] = []
    check = steps.Training.check
    monkeypatch.setattr(steps.Training, "check", lambda training, part: parts.append((training, part)))
    options: dict[str, Any] = {"target_replay": 0.5, "units": 2, "steps": 1, "batch": 2, "tokens_per_frame": FRAME}
    fc.train_gate(llama(), videos(), **options, executor=Lying(lambda found: found))
    ((training, part),) = parts
    check(training, part)
    nan, gradients = float("nan"), part.gradients
    for change in (
        lambda _: None,
        field("short", nan),
        field("found", replace(part.found, nll=nan)),
        field("found", replace(part.found, shares=part.found.shares[1:])),
        field("gradients", (gradients[0] * np.float32(nan), *gradients[1:])),
        field("gradients", (gradients[0][None], *gradients[1:])),
    ):
        with pytest.raises(UserError, match="answers no task"):
            check(training, change(part))
    with pytest.raises(UserError, match="not the answer of its task"):
        fc.train_gate(llama(), videos(), seed=1, **options, executor=Lying(lambda _: part))


def test_a_wrong_answer_is_not_journalled(tmp_path: Path, expected: str) -> None:
    """The next honest run goes on from the journal, and gives the same thresholds."""
    options: dict[str, Any] = {"replay": LEARNED, "tokens_per_frame": FRAME, "target_replay": 0.3, "search_videos": 2}
    journal, answered = tmp_path / "journal.json", list[int]()

    def late(found: Any) -> Any:
        answered.append(1)
        return found if len(answered) < 9 else replace(found, loss=float("nan"))

    with pytest.raises(UserError, match="answers no task: loss"):
        fc.calibrate(llama(), videos(), **options, journal=journal, executor=Lying(late))
    kept = json.loads(journal.read_text())["measurements"]
    assert kept
    assert "NaN" not in journal.read_text()
    found = fc.calibrate(llama(), videos(), **options, journal=journal)
    assert found.to_json() == json.loads(expected)[0]
    assert json.loads(journal.read_text())["measurements"].items() >= kept.items()


DAMAGED = ("null", "[NaN, 0.5, 0.5, 0.5]", "[1, 2, 0, 0]", f"[{10**400}, 0, 0, 0]")


@pytest.mark.parametrize("entry", DAMAGED)
def test_a_damaged_entry_of_a_journal_is_named(tmp_path: Path, entry: str) -> None:
    """With its file and line; a file of other inputs is begun anew, and one that ends early is named too."""
    path = tmp_path / "journal.json"
    right = partial(journal_file.is_measurement, layers=2)
    journal_file.Journal(path, "key", right=right).add("first", [1.5, 0.25, 0.5, 1])
    text = path.read_text().replace('"first"', f'"damaged": {entry},\n"first"')
    path.write_text(text)
    with pytest.raises(InputError, match="an entry of the journal is damaged: damaged") as caught:
        journal_file.Journal(path, "key", right=right)
    line = text.splitlines().index(f'"damaged": {entry},') + 1
    assert caught.value.where == f"{path}, line {line}"
    assert not journal_file.Journal(path, "of other videos", right=right).entries
    path.write_text(text[:-9])
    with pytest.raises(InputError, match=r"the journal cannot be read: EOF while parsing .* at line \d+"):
        journal_file.Journal(path, "key", right=right)


def test_an_exception_that_cannot_be_pickled_is_told_by_its_text(monkeypatch: pytest.MonkeyPatch) -> None:
    class Local(Exception):
        pass

    def fail(_job: Job) -> None:
        raise Local("of this worker")

    monkeypatch.setattr(workers, "_evaluator", fail)
    with ThreadPoolExecutor(1) as pool, pytest.raises(UserError) as caught:
        reports(pool)
    assert caught.value.what.endswith("ThreadPoolExecutor: RuntimeError: Local: of this worker")


def test_folders_of_processes_that_were_killed_go(tmp_path: Path) -> None:
    """Those of others that run stay, and so does what is none of ours."""
    names = [f"fastcar-{number:032x}" for number in range(2)]
    killed, runs = (workers._make_own(tmp_path / name) for name in names)
    (tmp_path / names[0] / "weights").write_bytes(b"x")
    (tmp_path / "fastcar-notes").mkdir()
    os.close(killed)  # as the kernel does at the end of a process
    with ThreadPoolExecutor(1) as pool:
        asked = Workers(pool, tmp_path)
        own = Path(asked._folder).name
        assert {path.name for path in tmp_path.iterdir()} == {own, names[1], "fastcar-notes"}
        del asked
    assert {path.name for path in tmp_path.iterdir()} == {names[1], "fastcar-notes"}
    os.close(runs)


POOL = """
import os, sys, time
from fastcar_compile.cli.options import executor_of

def busy():
    print("a worker prints", flush=True)
    return os.getpid()

if __name__ == "__main__":
    with executor_of("processes:1") as pool:
        print(pool.submit(busy).result(), flush=True)
        pool.submit(time.sleep, 600).result()
"""


@pytest.mark.parametrize("end", ["Ctrl-C", "SIGKILL"])
def test_no_worker_outlives_its_command(tmp_path: Path, end: str) -> None:
    """A stopped one ends with Ctrl-C; one whose parent was killed ends, so that nobody holds the pipes."""
    script = tmp_path / "pool.py"
    script.write_text(POOL)
    with subprocess.Popen(
        [sys.executable, script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout
        pid = int(process.stdout.readline())
        if end == "Ctrl-C":
            os.kill(pid, signal.SIGSTOP)
        process.send_signal(signal.SIGINT if end == "Ctrl-C" else signal.SIGKILL)
        out, err = process.communicate(timeout=60)  # until nobody has the pipes
    assert out == ""
    assert err.startswith("a worker prints\n")
    with suppress(OSError):  # it has a file as long as nobody has asked for its exit status
        assert Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"


def test_an_executor_that_takes_no_task_is_named() -> None:
    class Gone(Executor):
        def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
            raise BrokenExecutor("a process died")

    with pytest.raises(UserError, match="a task failed twice on the workers of Gone: BrokenExecutor: a process died"):
        reports(Gone())


@pytest.mark.thorough  # an executor like others
def test_loky_gives_the_same_bytes(loky: Executor, expected: str) -> None:
    assert reports(loky) == expected


@pytest.mark.thorough
def test_executors_of_the_command_line(tmp_path: Path) -> None:
    factory = tmp_path / "own.py"
    factory.write_text(
        "from concurrent.futures import ThreadPoolExecutor\ndef threads(): return ThreadPoolExecutor(3)\nwrong = dict\n"
        "def broken(): return 1 / 0\n"
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
        (f"{factory}:broken", "makes no Executor: ZeroDivisionError: division by zero"),
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


def test_rows_of_journals_have_figures_in_their_ranges() -> None:
    row = {"replay_ratio": 0.5, "mlp_weights_spared": 0.5, "nll": 1.5, "nll_dense": 1.5, "token_agreement": 1.0}
    assert journal_file.is_row(row)
    for change in ({"replay_ratio": 2.0}, {"replay_ratio": "inf"}, {"token_agreement": 1.5}, {"nll": -1.0}):
        assert not journal_file.is_row(row | change), change


def test_an_executor_without_futures_is_named() -> None:
    class Eager(ThreadPoolExecutor):
        def submit(self, *_: Any, **__: Any) -> Any:
            return None

    with Eager(1) as pool, pytest.raises(UserError, match="submit gave None, which is no future"):
        reports(pool)
