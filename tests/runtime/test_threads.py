"""How many cores are used: affinity, control groups, TVM's pool."""

import os
import threading
from pathlib import Path

import pytest
from conftest import fresh_process

from fastcar_compile.errors import BackendError
from fastcar_compile.runtime.guard import use_threads
from fastcar_compile.support import machine as parallel
from fastcar_compile.support.machine import at_once, streamed, usable_cores


@pytest.mark.parametrize(
    ("quota", "cores"),
    [(None, 4), ("max 100000\n", 4), ("270000 100000\n", 2), ("40000 100000\n", 1), ("6400000 100000\n", 4)],
)
def test_whole_cores_within_the_affinity(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quota: str | None, cores: int
) -> None:
    monkeypatch.setattr(parallel, "QUOTA", tmp_path / "cpu.max")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {0, 2, 5, 7})
    if quota is not None:
        parallel.QUOTA.write_text(quota)
    assert usable_cores() == cores


POOL = """
import os, threading, time
import numpy as np
import tvm
from fastcar_compile.runtime.guard import use_threads

active = tvm.get_global_func("runtime.NumThreads")
before = os.sched_getaffinity(0)
found = []
for count in (2, 1, 2, 2):
    use_threads(count)
    found.append(active())
other = threading.Thread(target=lambda: (use_threads(2), found.append(active())))
other.start()
other.join()
assert found == [2, 1, 2, 2, 2], found
assert os.sched_getaffinity(0) == before
masks = [open(f"/proc/self/task/{t}/status").read() for t in os.listdir("/proc/self/task")]
assert len({m.split("Cpus_allowed_list:")[1].split()[0] for m in masks}) == 1, "a thread is bound to one core"

from tvm.script import tirx as T

@T.prim_func(s_tir=True)
def touch(a: T.Buffer((64,), "float32")):
    for i in T.parallel(64):
        a[i] = a[i] + T.float32(1)

function = tvm.compile(tvm.IRModule({"touch": touch.with_attr("global_symbol", "touch")}), target="llvm")["touch"]
values = tvm.runtime.tensor(np.zeros(64, np.float32))
function(values)
start = time.process_time()
time.sleep(0.6)
print(time.process_time() - start)
"""


def test_the_pool_has_the_threads_asked_for_binds_none_and_sleeps(tmp_path: Path) -> None:
    """TVM's defaults: half of the cores, each thread bound to one, and 0.16 s of spinning after the last step."""
    script = tmp_path / "pool.py"
    script.write_text(POOL)
    assert float(fresh_process(script, without=("TVM_", "OMP_"))) < 0.05


def test_a_pool_that_cannot_grow_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    many = 4 * len(os.sched_getaffinity(0))
    use_threads(1)  # the pool of this thread is made here, or was made before
    with pytest.raises(BackendError, match=rf"{many} were asked for; it was made for \d+ and cannot grow"):
        use_threads(many)
    use_threads(1)


def test_results_are_in_order_and_errors_are_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel, "usable_cores", lambda: 3)
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
