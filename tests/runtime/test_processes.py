"""Sessions and their process: what they import, children by fork and spawn, threads, and what closed sessions leave."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import fresh_process
from decoders import llama

import fastcar_compile as fc

HEAVY = "torch transformers onnx onnxruntime onnxscript jinja2 tvm "
HEAVY += "fastcar_compile.ir.ops fastcar_compile.ir.program fastcar_compile.codegen"


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> fc.Artifact:
    folder = tmp_path_factory.mktemp("processes") / "artifact"
    return fc.compile(llama(num_hidden_layers=1), target="cpu", tokens_per_frame=8, prefill_chunk=1, output=folder)


def test_importing_the_package_loads_no_other_module_of_it() -> None:
    names = "[m for m in sys.modules if m.startswith('fastcar_compile.') or m in ('numpy', 'pydantic')]"
    assert fresh_process("-c", f"import sys, fastcar_compile; print({names})") == "[]\n"


def test_every_public_name_is_there() -> None:
    assert set(dir(fc)) == {*fc.__all__, "__version__"}
    for name in fc.__all__:
        assert getattr(fc, name).__name__ == name
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        fc.nothing  # noqa: B018  (the point of the test)


DECODE = f"""
import sys
import numpy as np
import fastcar_compile as fc
artifact = fc.load(sys.argv[1])
print(artifact.session("cpu").generate(np.array([[1, 2, 3]]), 12).tolist())
artifact.explain()
loaded = [m for m in "{HEAVY}".split() if m in sys.modules]
assert not loaded, loaded
"""

AFTER = """
import torch
import tvm
from tvm import relax
session = artifact.session("cpu")
tokens = session.generate(torch.tensor([[1, 2, 3]]), 12)
assert isinstance(tokens, torch.Tensor)
print(tokens.tolist())
"""


def test_decoding_loads_no_compiler_and_lives_with_it(artifact: fc.Artifact) -> None:
    lines = fresh_process("-c", DECODE + AFTER, artifact.path).splitlines()
    expected = artifact.session("cpu").generate(np.array([[1, 2, 3]]), 12).tolist()
    assert lines == [str(expected)] * 2


class Spoken:
    """An array of another library: all that is known of it is DLPack."""

    def __init__(self, values: np.ndarray) -> None:
        self._values = values

    def __dlpack__(self, **options: Any) -> object:
        return self._values.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._values.__dlpack_device__()


def test_a_session_gives_the_kind_that_it_gets(artifact: fc.Artifact) -> None:
    session, token = artifact.session("cpu"), np.array([3])
    kinds = {np.ndarray: token, torch.Tensor: torch.from_numpy(token), Spoken: Spoken(token), list: [3]}
    results = []
    for kind, value in kinds.items():
        session.reset()
        results.append(session.step(value))
        assert isinstance(results[-1], torch.Tensor if kind is torch.Tensor else np.ndarray)
        np.testing.assert_array_equal(np.asarray(results[-1]), np.asarray(results[0]))


def test_a_sampler_gets_the_kind_of_the_prompt(artifact: fc.Artifact) -> None:
    session, seen = artifact.session("cpu"), list[type]()

    def sample(logits: torch.Tensor) -> torch.Tensor:
        seen.append(type(logits))
        return logits.argmax(-1)

    tokens = session.generate(torch.tensor([[1, 2, 3]]), 4, sample)
    assert (set(seen), tokens.dtype) == ({torch.Tensor}, torch.int64)
    assert session.generate(np.array([[1, 2, 3]]), 4).tolist() == tokens.tolist()


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
    return json.loads(fresh_process(file, *words, without=("TVM_", "OMP_")).splitlines()[-1])


@pytest.mark.parametrize("backend", ["cpu", "onnxruntime"])
def test_children_decode_or_say_why_not(backend: str, artifact: fc.Artifact, tmp_path: Path) -> None:
    found = outcome(FORKS, tmp_path, artifact.path, backend)
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
import gc, json, os, sys, threading, time
import numpy as np
import fastcar_compile as fc
from fastcar_compile.runtime.guard import use_threads
from fastcar_compile.runtime.tvm_runtime import global_function

artifact = fc.load(sys.argv[1])


def use(count):
    for _ in range(count):
        with artifact.session("cpu", threads=2) as session:
            session.generate(np.array([[1, 2, 3]]), 3)
    gc.collect()
    lines = open("/proc/self/smaps_rollup").read().splitlines()
    anonymous = next(int(line.split()[1]) for line in lines if line.startswith("Anonymous:"))
    names = [os.listdir(f"/proc/self/{kind}") for kind in ("fd", "task")]
    return [anonymous, *map(len, names), len(open("/proc/self/maps").readlines())]


cores, used = os.sched_getaffinity(0), [use(20), use(60)]
with artifact.session("cpu", threads=2) as session:
    session.generate(np.array([[1, 2, 3]]), 3)
    start = time.process_time()
    time.sleep(0.6)
    seconds = time.process_time() - start
active, counts = global_function("runtime.NumThreads"), []
for count in (2, 1, 2, 2):
    use_threads(count)
    counts.append(active())
other = threading.Thread(target=lambda: (use_threads(2), counts.append(active())))
other.start()
other.join()
tasks = [open(f"/proc/self/task/{task}/status").read() for task in os.listdir("/proc/self/task")]
bound = len({task.split("Cpus_allowed_list:")[1].split()[0] for task in tasks}) > 1
moved = os.sched_getaffinity(0) != cores
print(json.dumps({"used": used, "seconds": seconds, "counts": counts, "bound": bound or moved, "tasks": len(tasks)}))
"""


@pytest.fixture(scope="module")
def sessions(artifact: fc.Artifact, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a process of many sessions finds of itself."""
    return outcome(SESSIONS, tmp_path_factory.mktemp("sessions"), artifact.path)


def test_closed_sessions_leave_nothing(sessions: dict[str, Any]) -> None:
    """TVM's loader keeps what it loads for ever: 58 KiB for each session, were a library loaded for each."""
    before, after = sessions["used"]
    assert after[0] - before[0] < 60 * 12
    assert after[1:3] == before[1:3]
    assert after[3] - before[3] < 10


def test_the_pool_has_the_threads_asked_for_binds_none_and_sleeps(sessions: dict[str, Any]) -> None:
    """TVM's defaults: half of the cores, each thread bound to one, and 0.16 s of spinning after the last step."""
    assert sessions["counts"] == [2, 1, 2, 2, 2]
    assert sessions["tasks"] > 1
    assert not sessions["bound"]
    assert sessions["seconds"] < 0.05
