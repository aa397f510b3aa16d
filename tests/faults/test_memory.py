"""Memory and cores that a process may still take, and what is said where they do not suffice."""

import gc
import os
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from fastcar_compile.artifact.sections import State
from fastcar_compile.cli.common import ExitCode, report_error
from fastcar_compile.errors import BackendError, UserError
from fastcar_compile.ir.types import StateRole
from fastcar_compile.runtime import state as state_module
from fastcar_compile.runtime.guard import use_threads
from fastcar_compile.runtime.state import StateArena
from fastcar_compile.support import machine as memory
from fastcar_compile.support.machine import (
    at_once,
    available_memory,
    collector_paused,
    require_memory,
    streamed,
    usable_cores,
)


@pytest.mark.parametrize(
    ("limit", "free"),
    [(None, 1 << 30), ("max\n", 1 << 30), (f"{1 << 40}\n", 1 << 30), ("5000000\n", 4_000_000), ("9\n", 0)],
)
def test_the_least_of_machine_and_container(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, limit: str | None, free: int
) -> None:
    usage = SimpleNamespace(rss=3_000_000, shared=2_000_000)
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=1 << 30))
    monkeypatch.setattr("psutil.Process", lambda: SimpleNamespace(memory_info=lambda: usage))
    monkeypatch.setattr(memory, "LIMIT", tmp_path / "memory.max")
    if limit is not None:
        memory.LIMIT.write_text(limit)
    assert available_memory() == free


def test_what_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available_memory", lambda: 1000)
    require_memory(1000, "the work")
    with pytest.raises(UserError, match="the work needs at least 1,001 bytes of memory, and 1,000 are available"):
        require_memory(1001, "the work")


def test_no_memory_in_a_command_is_no_defect(capsys: pytest.CaptureFixture[str]) -> None:
    assert report_error(MemoryError(), as_json=False) == ExitCode.USER_ERROR
    assert capsys.readouterr().err.startswith("error: the memory does not suffice\n  hint: ")


def test_the_state_of_a_session(monkeypatch: pytest.MonkeyPatch) -> None:
    def state(rows: int) -> State:
        return State(name="keys", shape=(rows, 1 << 10), dtype="float32", role=StateRole.KEY_CACHE, layer=0)

    with pytest.raises(BackendError, match=r"the state of a session takes [0-9,]+ bytes: .*memory"):
        StateArena([state(1 << 40)])
    monkeypatch.setattr(state_module, "available_memory", lambda: 1 << 20)
    with pytest.warns(UserWarning, match="takes 2,097,152 bytes when its caches are full, and 1,048,576 are avail"):
        StateArena([state(512)])
    StateArena([state(256)])


def test_the_collector_is_as_it_was_after_a_build_that_fails() -> None:
    @collector_paused()
    def build() -> None:
        with collector_paused():
            assert not gc.isenabled()
        assert not gc.isenabled()
        raise UserError("a build that fails")

    assert gc.isenabled()
    with pytest.raises(UserError, match="that fails"):
        build()
    assert gc.isenabled()


# How many cores are used: affinity, control groups, TVM's pool.


@pytest.mark.parametrize(
    ("quota", "cores"),
    [(None, 4), ("max 100000\n", 4), ("270000 100000\n", 2), ("40000 100000\n", 1), ("6400000 100000\n", 4)],
)
def test_whole_cores_within_the_affinity(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quota: str | None, cores: int
) -> None:
    monkeypatch.setattr(memory, "QUOTA", tmp_path / "cpu.max")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {0, 2, 5, 7})
    if quota is not None:
        memory.QUOTA.write_text(quota)
    assert usable_cores() == cores


def test_a_pool_that_cannot_grow_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    many = 4 * len(os.sched_getaffinity(0))
    use_threads(1)  # the pool of this thread is made here, or was made before
    with pytest.raises(BackendError, match=rf"{many} were asked for; it was made for \d+ and cannot grow"):
        use_threads(many)
    use_threads(1)


def test_results_are_in_order_and_errors_are_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "usable_cores", lambda: 3)
    meeting = threading.Barrier(3, timeout=10)
    assert at_once(lambda i: (meeting.wait(), i)[1], range(6)) == [*range(6)]

    def fail(_value: int) -> None:
        raise OSError("nothing")

    with pytest.raises(OSError, match="nothing"):
        at_once(fail, [1])
    with pytest.raises(OSError, match="nothing"):
        next(streamed(fail, [1]))


def test_streamed_results_are_in_order_and_few_wait() -> None:
    begun = list[int]()

    def double(value: int) -> int:
        begun.append(value)
        return 2 * value

    found = streamed(double, range(50), threads=3)
    assert [next(found), next(found)] == [0, 2]
    assert max(begun) <= 6
    assert list(found) == [2 * i for i in range(2, 50)]
    assert sorted(begun) == [*range(50)]
