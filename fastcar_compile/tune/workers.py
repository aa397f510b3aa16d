"""Measurements by other processes. A task is data, and any `concurrent.futures.Executor` runs it."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import tempfile
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache, partial, wraps
from pathlib import Path
from threading import Lock
from typing import Any, TypeVar, cast
from uuid import uuid4

import numpy as np
import torch

from fastcar_compile.artifact.programs import graph_file_text, read_graph_file
from fastcar_compile.config import ReplayConfig
from fastcar_compile.errors import FastcarError, InputError, UserError, shown
from fastcar_compile.gates import Gate, gate_named
from fastcar_compile.gates.draft import Draft
from fastcar_compile.gates.weights import GateWeights
from fastcar_compile.ir.program import DecoderProgram
from fastcar_compile.ir.tensor_files import tensors_of, write_pieces
from fastcar_compile.ir.weights import to_torch
from fastcar_compile.runtime.compiled import Artifact, load
from fastcar_compile.support.machine import follow_parent
from fastcar_compile.support.values import LOGGER, check_kind
from fastcar_compile.tune.evaluator import Evaluator, of_prefill, with_rows
from fastcar_compile.tune.rule import Rules, SinkWindow
from fastcar_compile.tune.slices import WORKERS_HINT, Sums, Thresholds, Tokens, What

A = TypeVar("A")


@dataclass(frozen=True)
class Setting:
    """How videos are read: tokens before decoding starts, `counted` and `search_videos` as `calibrate` takes them."""

    prompt: int = 1
    counted: tuple[int, int] | None = None
    search_videos: int | None = None

    def facts(self) -> dict[str, Any]:
        """Return JSON-safe values for a key: what changes a measurement."""
        return {"prompt": self.prompt} | ({} if self.counted is None else {"counted": self.counted})


@dataclass(frozen=True)
class Subject:
    """What is measured.

    Attributes:
        program: dense, with a prefill graph. replay: the gate and its options. videos: int64 [N, T].
        rows: of a slice, where these are more than the program's own. attention: None: to all earlier positions.
    """

    program: DecoderProgram
    replay: ReplayConfig
    videos: np.ndarray
    setting: Setting
    rows: int = 1
    attention: SinkWindow | None = None

    def evaluator(self, workers: Workers | None = None) -> Evaluator:
        """Return an evaluator, whose slices are computed by `workers`; None: by threads of this process.

        Raises:
            InputError: the videos do not fit the program.
        """
        program, setting = with_rows(self.program, self.rows), self.setting
        rules, ask = rules_of(self.replay, program.config.num_layers), None if workers is None else workers.asked(self)
        options: dict[str, Any] = {"attend": self.attention, "counted": setting.counted, "ask": ask}
        return Evaluator(program, self.videos, rules, setting.prompt, **options)


def rules_of(replay: ReplayConfig, layers: int) -> Rules:
    """Return everything but the thresholds that decides a replay."""
    heads = replay.heads_of(layers) or (None,) * layers
    gates = tuple(_gate(replay, layer, chosen, layers) for layer, chosen in enumerate(heads))
    return Rules(gates, replay.max_chain, replay.couple_cfg, replay.refresh_every, replay.draft)


def _gate(replay: ReplayConfig, layer: int, heads: tuple[tuple[int, float], ...] | None, layers: int) -> Gate:
    """Return one layer's gate. An artifact holds no gate weights for a layer that never replays."""
    weights = replay.gate_weights
    if weights is None:
        return gate_named(replay.gate, heads, rotary=replay.rotary)
    if weights.layers and layer not in weights.layers and replay.thresholds(layers)[layer] is None:
        return gate_named("never")
    return gate_named(replay.gate, heads, weights.layer(layer))


@dataclass(frozen=True)
class File:
    """A file, or the folder of an artifact.

    Attributes:
        uri: a path that every worker has, or a URL that fsspec opens. sha256: of its bytes; or the artifact's digest.
    """

    uri: str
    sha256: str

    def path(self) -> Path:
        """Return a path of this machine with these bytes.

        Raises:
            InputError: the file is not there, or has other bytes.
        """
        found = Path(self.uri)
        if "://" in self.uri:
            import fsspec

            found = Path(_local(), self.sha256 + Path(self.uri).suffix)
            files, place = fsspec.core.url_to_fs(self.uri)
            files.get_file(place, str(found))
        if not found.is_file():
            hint = "give a `scratch` folder, or a URL, that all workers see"
            raise InputError("a worker does not find a file of this calibration", where=self.uri, hint=hint)
        if _sha256(found) != self.sha256:
            raise InputError("a file of this calibration has changed", where=self.uri, hint="start again")
        return found


@lru_cache(1)
def _local() -> str:
    folder = Path(tempfile.gettempdir(), f"fastcar-{uuid4().hex}")
    _make_own(folder)
    weakref.finalize(_local, shutil.rmtree, folder)
    return str(folder)


def _make_own(folder: Path) -> int:
    """Make a folder and return its lock, which ends with this process. Folders of processes that were killed go."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    for other in folder.parent.glob("fastcar-" + "[0-9a-f]" * 32):
        with suppress(OSError):  # somebody has the lock, or another user the folder
            lock = _locked(other)
            shutil.rmtree(other, ignore_errors=True)
            os.close(lock)
    new = folder.with_suffix(".new")  # under its own name the folder is locked from the first moment on
    new.mkdir()
    lock = _locked(new)
    new.rename(folder)
    return lock


def _locked(folder: Path) -> int:
    descriptor = os.open(folder, os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@dataclass(frozen=True)
class Job:
    """A `Subject` as data.

    Attributes:
        decoder: the folder of an artifact, or a graph file and its weights. videos: a .npy file, int64 [N, T].
        replay: JSON of the ReplayConfig. weights, draft: the files that it names.
        window: window and sinks of sparse attention; None: attention to all earlier positions.
    """

    decoder: tuple[File, ...]
    videos: File
    replay: str
    weights: File | None
    draft: File | None
    prompt: int
    counted: tuple[int, int] | None
    rows: int
    window: tuple[int, int] | None

    def subject(self) -> Subject:
        """Return what the files hold."""
        data = json.loads(self.replay)
        data |= {} if self.weights is None else {"gate_weights": GateWeights.load(self.weights.path())}
        data |= {} if self.draft is None else {"draft": Draft.load(self.draft.path())}
        videos, setting = np.load(self.videos.path(), allow_pickle=False), Setting(self.prompt, self.counted)
        attention = None if self.window is None else SinkWindow(*self.window)
        replay = ReplayConfig.from_json(data)
        return Subject(program_of_files(self.decoder), replay, videos, setting, self.rows, attention)


@lru_cache(2)
def program_of_files(decoder: tuple[File, ...]) -> DecoderProgram:
    """Return the program of an artifact's folder, or of a graph file and its weights."""
    if len(decoder) == 1:
        return of_prefill(load(decoder[0].uri, digest=decoder[0].sha256).program)
    graph, weights = (file.path() for file in decoder)
    # A map, so that the workers of a machine share the weights.
    arrays = tensors_of(np.memmap(weights, np.uint8, "c"), str(weights))
    return read_graph_file(graph, {name: to_torch(array) for name, array in arrays.items()})


@dataclass(frozen=True)
class Task:
    """One slice of a job's videos under one threshold per layer, computed by this number of PyTorch's threads."""

    job: Job
    index: int
    thresholds: Thresholds
    what: What
    threads: int


_OPENING = Lock()


@lru_cache(2)
def _evaluator(job: Job) -> Evaluator:
    """Return the evaluator of a job. A calibration has two: of some of the videos, and of all."""
    return job.subject().evaluator()


def use_threads(count: int) -> None:
    """Let PyTorch use this number of threads."""
    if torch.get_num_threads() != count:
        torch.set_num_threads(count)


def key_of(task: Any) -> str:
    """Return what tells a task from others, wherever it is computed."""
    return hashlib.sha256(repr(task).encode()).hexdigest()


def worker(function: Callable[[Any], A]) -> Callable[[Any], A]:
    """Return a function as workers call it: the answer, a frozen dataclass, has the key of its task.

    The process ends with its parent. An error of others is told by its text, because many cannot be pickled.
    """

    @wraps(function)
    def answered(task: Any) -> A:
        follow_parent()
        try:
            return replace(cast("Any", function(task)), key=key_of(task))
        except FastcarError:
            raise
        except Exception as error:
            raise RuntimeError(f"{type(error).__name__}: {error}") from None

    return answered


@worker
def answer(task: Task) -> Sums | Tokens:
    """Return what a slice adds to a measurement. The worker keeps decoders, and what thresholds have in common."""
    with _OPENING:
        evaluator = _evaluator(task.job)
    use_threads(task.threads)
    return evaluator.answer(task.index, task.thresholds, task.what)


Write = Callable[[Path, Any], object]
"""Writes a value to a path."""


PROGRAM: dict[str, Write] = {
    ".json": lambda path, program: path.write_text(graph_file_text(program), "utf-8"),
    ".safetensors": lambda path, program: write_pieces(
        path.parent, path.name, program.params.specs(), program.params.pieces(program.params)
    ),
}
VIDEOS: dict[str, Write] = {".npy": np.save}
NETWORKS: dict[str, Write] = {".safetensors": lambda path, networks: networks.save(path)}


class Workers:
    """Processes that measure slices.

    Args:
        executor: of whatever kind. scratch: a folder or fsspec URL that this process and every worker see; None: the
            machine's folder for temporary files.
    """

    def __init__(self, executor: Executor, scratch: str | Path | None) -> None:
        import fsspec

        self._executor = executor
        place = str(scratch or tempfile.gettempdir())
        # A worker may have another working directory.
        place = place if "://" in place else str(Path(place).resolve())
        self._root = f"{place}/fastcar-{uuid4().hex}"
        self._files, self._folder = fsspec.core.url_to_fs(self._root)
        if "://" in place:
            self._files.makedirs(self._folder)
        else:
            weakref.finalize(self, os.close, _make_own(Path(self._folder)))
        weakref.finalize(self, self._files.rm, self._folder, recursive=True)
        self._put = dict[Any, tuple[Any, tuple[File, ...]]]()

    @classmethod
    def of(cls, executor: Executor | None, scratch: str | Path | None) -> Workers | None:
        """Return the workers of an executor; None: there is none.

        Raises:
            InputError: it is no executor.
        """
        check_kind("executor", executor, (Executor, type(None)), "a concurrent.futures.Executor")
        check_kind("scratch", scratch, (str, Path, type(None)), "a folder, or a URL that fsspec opens")
        if executor is None and scratch is not None:
            raise InputError("scratch has no effect without executor", hint="give an executor, or leave scratch out")
        return None if executor is None else cls(executor, scratch)

    def knows(self, program: DecoderProgram, artifact: Artifact) -> None:
        """Let a program travel as its artifact's folder, where the workers see this machine's folders."""
        if "://" not in self._root:
            self._put[id(program)] = program, (File(str(artifact.path.resolve()), artifact.digest),)

    def asked(self, subject: Subject) -> Callable[[int, Thresholds, What, int], list[Any]]:
        """Return the function with which an `Evaluator` asks for the slices of a subject."""
        return partial(self._ask, self.job(subject))

    def job(self, subject: Subject) -> Job:
        """Return a subject as data; its files are written once."""
        replay, setting, videos = subject.replay, subject.setting, subject.videos
        weights, draft, attention = replay.gate_weights, replay.draft, subject.attention
        return Job(
            self.decoder(subject.program),
            self.videos(videos),
            json.dumps(replay.to_json()),
            None if not (weights and weights.layers) else self._files_of(weights.name, weights, NETWORKS)[0],
            None if not (draft and draft.layers) else self._files_of(draft.name, draft, NETWORKS)[0],
            setting.prompt,
            setting.counted,
            subject.rows,
            None if attention is None else (attention.window, attention.sinks),
        )

    def decoder(self, program: DecoderProgram) -> tuple[File, ...]:
        """Return the files of a program."""
        return self._files_of(id(program), program, PROGRAM)

    def videos(self, videos: np.ndarray) -> File:
        """Return the file of videos int64 [N, T]."""
        return self._files_of(hashlib.sha256(videos.tobytes()).digest(), videos, VIDEOS)[0]

    def _files_of(self, key: Any, value: Any, writers: dict[str, Write]) -> tuple[File, ...]:
        """Return the files of a value, written at the first call for its key."""
        if key not in self._put:
            # The value is kept too, because its address may be the key.
            self._put[key] = value, tuple(self._write(suffix, write, value) for suffix, write in writers.items())
        return self._put[key][1]

    def _write(self, suffix: str, write: Write, value: Any) -> File:
        with tempfile.TemporaryDirectory(prefix="fastcar-") as folder:
            path = Path(folder, f"file{suffix}")
            write(path, value)
            digest = _sha256(path)
            name = f"{digest}{suffix}"
            self._files.put_file(str(path), f"{self._folder}/{name}")
        return File(f"{self._root}/{name}", digest)

    def _ask(self, job: Job, count: int, thresholds: Thresholds, what: What, threads: int) -> list[Any]:
        return self.run(answer, [Task(job, index, thresholds, what, threads) for index in range(count)])

    def run(self, function: Callable[[Any], Any], tasks: Sequence[Any]) -> list[Any]:
        """Return what a function of a module gives for each task, in order.

        Raises:
            FastcarError: of a task. UserError: a task failed on two workers.
        """
        before = torch.get_num_threads()  # an executor of threads changes it
        futures = [self.given(function, task) for task in tasks]
        try:
            found = []
            for future, task in zip(futures, tasks, strict=True):
                found.append(self.result(future, function, task))
                if getattr(found[-1], "key", None) != key_of(task):
                    what = f"{type(self._executor).__name__} gave {shown(found[-1])} that is not the answer of its task"
                    raise UserError(what, hint=WORKERS_HINT)
                LOGGER.debug("slice %d of %d", len(found), len(tasks))
            return found
        finally:
            for future in futures:
                future.cancel()
            torch.set_num_threads(before)

    def given(self, function: Callable[[Any], Any], task: Any) -> Future[Any]:
        """Give a task to a worker."""
        try:
            given = self._executor.submit(function, task)
            if not all(callable(getattr(given, name, None)) for name in ("result", "cancel")):
                raise TypeError(f"submit gave {shown(given)}, which is no future")
            return given
        except Exception as error:  # of a pool that is broken by now
            refused = Future[Any]()
            refused.set_exception(error)
            return refused

    def result(self, future: Future[Any], function: Callable[[Any], Any], task: Any) -> Any:
        """Return a task's answer. A task whose worker died is given to another worker once.

        Raises:
            FastcarError: of the task itself. UserError: the second worker died too, or the executor takes no task.
        """
        try:
            try:
                return future.result()
            except FastcarError:
                raise
            except Exception:
                return self.given(function, task).result()
        except FastcarError:
            raise
        except Exception as error:
            name, text = type(self._executor).__name__, f"{type(error).__name__}: {error}"
            raise UserError(f"a task failed twice on the workers of {name}: {text}", hint=WORKERS_HINT) from error
