"""Runs groups of engines: prepares each, opens each in its own process, and alternates their blocks."""

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from speed.engines import OURS
from speed.sizes import Job, Traffic

SECONDS = 600
"""Longest wait for a worker's answer, in seconds."""

SLOW = 10
"""Seconds of a sample that is not repeated in later rounds."""

READS = 4
"""Bandwidth readings per round."""

Say = Callable[[str], None]


class WorkerError(Exception):
    """An engine cannot be prepared, opened or run. The text is the reason that its row gives."""


@dataclass
class Result:
    """Measurements of one engine and variant; `reason` says why there are none.

    Attributes:
        samples: seconds per token, each the mean of `sizes.group` tokens.
        shares: achieved ratio of each round. replay: their mean. skipped: share of layers in which all rows replayed.
        gigabytes: read bandwidth of our engine's process in GB/s. gigamacs: its peak arithmetic in billions per second.
        logits: after a few tokens from an empty cache, or after a prompt.
    """

    job: Job
    variant: str
    samples: list[float] = field(default_factory=list)
    gigabytes: list[float] = field(default_factory=list)
    gigamacs: list[float] = field(default_factory=list)
    shares: list[float] = field(default_factory=list)
    replay: float = 0.0
    skipped: float = 0.0
    logits: list[float] = field(default_factory=list)
    notes: str = ""
    version: str = ""
    traffic: Traffic | None = None
    reason: str = ""

    @property
    def slow(self) -> bool:
        """Whether a sample takes so long that one is enough."""
        return bool(self.samples) and self.samples[-1] * self.job.sizes.group > SLOW


class Worker:
    """One engine's process. It is stopped (SIGSTOP) unless it answers."""

    def __init__(self, job: Job) -> None:
        self._errors = Path(job.folder) / "run.log"
        with self._errors.open("w") as errors:
            self._process = subprocess.Popen(
                _command("run", job),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                bufsize=1,
                cwd=Path(__file__).parent.parent,
                env=environment(job),
            )
        try:
            self.ready: dict[str, Any] = self._answer()["ready"]
        except WorkerError:
            self.close()
            raise
        self._signal(signal.SIGSTOP)

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return the answer to a request. Continue the process before, and stop it afterwards."""
        assert self._process.stdin is not None
        self._signal(signal.SIGCONT)
        try:
            print(json.dumps(request), file=self._process.stdin, flush=True)
        except BrokenPipeError as error:
            raise WorkerError(_reason(self._errors)) from error
        answer = self._answer()
        self._signal(signal.SIGSTOP)
        return answer

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()

    def _signal(self, number: signal.Signals) -> None:
        if self._process.poll() is None:
            self._process.send_signal(number)

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], SECONDS)[0]:
            raise WorkerError(f"no answer within {SECONDS} s")
        line = self._process.stdout.readline()
        if not line:
            raise WorkerError(_reason(self._errors))
        return json.loads(line)


def _command(mode: str, job: Job) -> list[str]:
    return [sys.executable, "-W", "ignore", "-m", "speed.worker", mode, json.dumps(job.to_json())]


def environment(job: Job) -> dict[str, str]:
    """Return the environment of a job's process: libraries read their number of threads when they are imported."""
    threads = {"OMP_NUM_THREADS": str(job.sizes.threads), "MKL_NUM_THREADS": str(job.sizes.threads)}
    root = str(Path(__file__).parent.parent.parent)
    path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    return {**os.environ, **threads, "PYTHONPATH": path, "TOKENIZERS_PARALLELISM": "false"}


def _reason(log: Path) -> str:
    """Return the last line of a worker's stderr: of a traceback, the exception."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return (lines or ["the process ended without a word"])[-1][:300]


def prepare(job: Job) -> None:
    """Write the engine's files, in a process that gives its memory back. Raises WorkerError."""
    folder = Path(job.folder)
    folder.mkdir(parents=True, exist_ok=True)
    done, log = folder / "prepared.json", folder / "prepare.log"
    built = json.dumps(job.built_from(), sort_keys=True)
    if done.exists() and done.read_text() == built:
        return
    with log.open("w") as errors:
        place = Path(__file__).parent.parent
        try:
            code = subprocess.run(
                _command("prepare", job), stdout=errors, stderr=errors, cwd=place, env=environment(job), timeout=SECONDS
            ).returncode
        except subprocess.TimeoutExpired as error:
            raise WorkerError(f"not prepared within {SECONDS} s") from error
    if code:
        raise WorkerError(_reason(log))
    done.write_text(built)


def _open(prepared: Future[None], job: Job, stack: ExitStack) -> Worker:
    prepared.result()
    worker = Worker(job)
    stack.callback(worker.close)
    return worker


@contextmanager
def opened(jobs: list[Job], results: list[Result], say: Say) -> Iterator[dict[int, Worker]]:
    """Yield job number -> worker. Jobs are prepared and opened in parallel. A failed one adds its reason."""
    with ExitStack() as stack:
        pool = stack.enter_context(ThreadPoolExecutor(jobs[0].sizes.threads))
        prepared = [pool.submit(prepare, job) for job in jobs]
        workers: dict[int, Worker] = {}
        for job, future in zip(jobs, prepared, strict=True):
            say(f"preparing {job.engine} {job.precision}")
            wait([future])
        opening = [pool.submit(_open, future, job, stack) for future, job in zip(prepared, jobs, strict=True)]
        for number, job in enumerate(jobs):
            say(f"opening {job.engine} {job.precision}")
            try:
                workers[number] = opening[number].result()
            except WorkerError as error:
                say(f"{job.engine} {job.precision} is missing: {error}")
                results += [Result(job, v, reason=str(error)) for v in job.variants]
        yield workers


def run_group(jobs: list[Job], say: Say, reads: int = READS) -> list[Result]:
    """Return the results of all jobs. Each round has one block of every engine and variant.

    Args:
        reads: bandwidth readings per round and job of our engine.
    """
    results: list[Result] = []
    with opened(jobs, results, say) as workers:
        tasks = []
        for number, worker in workers.items():
            job, ready = jobs[number], worker.ready
            for variant in job.variants:
                traffic = Traffic(**ready["traffic"])
                said = {name: ready[name] for name in ("logits", "notes", "version")}
                result = Result(job, variant, traffic=traffic, **said)
                tasks.append((worker, result))
        rounds = jobs[0].sizes.rounds
        for i in range(rounds):
            say(f"round {i + 1} of {rounds}")
            for worker, result in tasks:
                _measure(worker, result, reads)
        results += [result for _, result in tasks]
    return results


def _measure(worker: Worker, result: Result, reads: int) -> None:
    if result.reason or result.slow:
        return
    try:
        answer = worker.ask({"variant": result.variant})
        if reads and result.job.engine == OURS and result.variant == result.job.variants[0]:
            result.gigabytes += worker.ask({"read": reads})["gigabytes"]
            result.gigamacs += worker.ask({"multiply": reads})["gigamacs"]
    except WorkerError as error:
        result.reason = str(error)
        return
    seconds = answer["seconds"]
    group = result.job.sizes.group
    result.samples += [sum(seconds[i : i + group]) / group for i in range(0, len(seconds), group)]
    result.shares.append(answer["replay"])
    result.replay = sum(result.shares) / len(result.shares)
    result.skipped = answer["skipped"]
