"""Sessions and child processes: fork before and after opening, and spawn; and what a thousand sessions leave."""

import json
from pathlib import Path
from typing import Any

import pytest
from conftest import fresh_process
from decoders import llama

import fastcar_compile as fc


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("processes") / "artifact"
    return fc.compile(llama(num_hidden_layers=1), target="cpu", tokens_per_frame=8, prefill_chunk=1, output=folder).path


FORKS = """
import json, multiprocessing, os, sys, threading
import numpy as np
import fastcar_compile as fc
from fastcar_compile.runtime.tvm_runtime import global_function

path, backend = sys.argv[1:]


def decoded(session):
    return session.generate(np.array([[1, 2, 3]]), 6).tolist()


def opened(threads=2):
    return decoded(fc.load(path).session(backend, threads=threads))


def in_a_thread():
    found = []
    worker = threading.Thread(target=lambda: found.append(opened()))
    worker.start()
    worker.join()
    return found[0]


def report(pipe, work):
    try:
        pipe.send(work())
    except fc.UserError as error:
        pipe.send([type(error).__name__, str(error)])


def child(method, work):
    context = multiprocessing.get_context(method)
    here, there = context.Pipe()
    process = context.Process(target=report, args=(there, work))
    process.start()
    assert here.poll(100), "the child hangs"
    found = here.recv()
    process.join(100)
    assert process.exitcode == 0, process.exitcode
    return found


if __name__ == "__main__":
    global_function("runtime.config_threadpool")  # the library is loaded
    before = child("fork", opened)
    session = fc.load(path).session(backend, threads=2)
    expected = decoded(session)
    found = {"before": before == expected, "spawned": child("spawn", opened) == expected}
    found |= {"same": child("fork", lambda: session.step(np.array([1])))}
    found |= {"closed": child("fork", session.close), "other": child("fork", opened)}
    found |= {"one": child("fork", lambda: opened(1)), "thread": child("fork", in_a_thread) == expected}
    found |= {"parent": decoded(session) == expected, "equal": expected[0]}
    with session:
        ended = os.fork()
        if not ended:
            sys.exit(0) if backend == "onnxruntime" else os._exit(0)  # docs/reference/threads.md
        found["exit"] = os.waitpid(ended, 0)[1]
    print(json.dumps(found))
"""


def outcome(script: str, folder: Path, *words: object) -> Any:
    """What a script prints last, from JSON."""
    file = folder / "script.py"
    file.write_text(script)
    return json.loads(fresh_process(file, *words, without=("TVM_",)).splitlines()[-1])


@pytest.mark.parametrize("backend", ["cpu", "onnxruntime"])
def test_children_decode_or_say_why_not(backend: str, artifact: Path, tmp_path: Path) -> None:
    found = outcome(FORKS, tmp_path, artifact, backend)
    same, other, one = (found.pop(name) for name in ("same", "other", "one"))
    assert isinstance(same, list)
    assert "opened before a fork" in same[1]
    assert "open the session in the child process" in same[1]
    if backend == "cpu":
        for refused in (other, one):
            assert "asked for in a thread that had TVM's threads before a fork" in refused[1]
            assert "in another thread of this process" in refused[1]
    else:
        assert other == one == [found["equal"]]
    assert found == {
        **dict.fromkeys(("before", "spawned", "thread", "parent"), True),
        "closed": None,
        "exit": 0,
        "equal": found["equal"],
    }


SESSIONS = """
import gc, json, os, sys
import numpy as np
import fastcar_compile as fc

path, backend = sys.argv[1:]
artifact = fc.load(path)


def use(count):
    for _ in range(count):
        with artifact.session(backend, threads=2) as session:
            session.generate(np.array([[1, 2, 3]]), 3)
    gc.collect()
    lines = open("/proc/self/smaps_rollup").read().splitlines()
    anonymous = next(int(line.split()[1]) for line in lines if line.startswith("Anonymous:"))
    names = [os.listdir(f"/proc/self/{kind}") for kind in ("fd", "task")]
    return [anonymous, *map(len, names), len(open("/proc/self/maps").readlines())]


print(json.dumps([use(20), use(60)]))
"""


def test_closed_sessions_leave_nothing(artifact: Path, tmp_path: Path) -> None:
    """TVM's loader keeps what it loads for ever: 58 KiB for each session, were a library loaded for each."""
    before, after = outcome(SESSIONS, tmp_path, artifact, "cpu")
    assert after[0] - before[0] < 60 * 12
    assert after[1:3] == before[1:3]
    assert after[3] - before[3] < 10
