"""Memory that a process may still take, and what is said where it does not suffice."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
from runtime.test_threads import root

from fastcar_compile import memory
from fastcar_compile.artifact.sections import State, StateRole
from fastcar_compile.cli.common import ExitCode, report_error
from fastcar_compile.errors import BackendError, UserError
from fastcar_compile.memory import available_memory, collector_paused, require_memory
from fastcar_compile.runtime import state as state_module
from fastcar_compile.runtime.state import StateArena

MACHINE = {"proc/meminfo": "MemTotal:  9000 kB\nMemAvailable:  1000 kB\n"}
TOP = "sys/fs/cgroup"


def test_the_machine(tmp_path: Path) -> None:
    assert available_memory(root(tmp_path, "", **MACHINE)) == 1_024_000
    (tmp_path / "proc/meminfo").write_text("MemTotal: 1 kB\n")
    assert available_memory(tmp_path) is None


def test_a_group_of_version_2(tmp_path: Path) -> None:
    files = {f"{TOP}/a/memory.max": "500000\n", f"{TOP}/a/memory.current": "400000\n"}
    files |= {
        f"{TOP}/a/memory.stat": "anon 5\nactive_file 1000\ninactive_file 2000\n",
        f"{TOP}/a/b/memory.max": "max\n",
    }
    assert available_memory(root(tmp_path, "0::/a/b\n", **MACHINE, **files)) == 103_000


def test_a_group_of_version_1(tmp_path: Path) -> None:
    group = f"{TOP}/memory/a"
    files = {f"{group}/memory.limit_in_bytes": "500000\n", f"{group}/memory.usage_in_bytes": "600000\n"}
    files |= {f"{group}/memory.stat": "total_inactive_file 50000\n"}
    assert available_memory(root(tmp_path, "4:memory:/a\n", **MACHINE, **files)) == 0
    (tmp_path / group / "memory.limit_in_bytes").write_text("9223372036854771712\n")
    assert available_memory(tmp_path) == 1_024_000


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
