"""Faults in builds of a small decoder, as a user would meet them. Not tests: each takes minutes, and prints a table.

    python tests/faults/real_builds.py kills --count 100
    unshare --mount python tests/faults/real_builds.py disks --count 20
    python tests/faults/real_builds.py signals
    python tests/faults/real_builds.py identical

`kills` and `disks` build once; every other build is a fork of that process. It takes the captured program and the code
from LLVM from there, and does the rest: so most of its time is spent where files are written.
"""

from __future__ import annotations

import argparse
import collections
import copy
import itertools
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

HERE = Path(__file__).resolve()
ROOT = HERE.parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

BUILDS = {
    "cpu": ("cpu", "none"),
    "zcu102": ("zcu102", "w8a8"),
    "w8a8": ("cpu", "w8a8"),
    "w4a8": ("cpu", "w4a8"),
    "bf16": ("cpu", "bf16"),
}
"""Name -> target and quantisation."""

MIB = 1 << 20
T = TypeVar("T")
EVENTS = 14
"""More than the renames and removals of putting one artifact in place, half of them without an exchange."""
PLACING = ("os.rename", "os.remove", "os.rmdir", "shutil.rmtree")


def compile_decoder(output: Path, name: str = "cpu", progress: Callable[[str], None] | None = None) -> None:
    """Compile a one-layer Llama of random weights."""
    from decoders import llama

    import fastcar_compile as fc

    target, quant = BUILDS[name]
    options: dict[str, Any] = {"quant": quant, "offload": "mlp", "tokens_per_frame": 8}
    fc.compile(llama(num_hidden_layers=1), target, **options, output=output, progress=progress)


def build_once(output: Path) -> float:
    """Build, and keep what does not depend on the output for the forks of this process; return their seconds."""
    from fastcar_compile import compiler
    from fastcar_compile.codegen.tvm import build

    compiler.capture = first_result(compiler.capture, copy.deepcopy)  # passes change a program in place
    build.lower = first_result(build.lower, lambda module: module)
    compile_decoder(output)
    begin = time.perf_counter()
    os.waitpid(fork(lambda: compile_decoder(output)), 0)
    return time.perf_counter() - begin


def first_result(function: Callable[..., T], keep: Callable[[T], T]) -> Callable[..., T]:
    """Return a function that computes once, and gives what `keep` made of the result from then on."""
    kept: list[T] = []

    def call(*arguments: object, **options: object) -> T:
        if kept:
            return kept[0]
        result = function(*arguments, **options)
        kept.append(keep(result))
        return result

    return call


def print_table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print a table in Markdown."""
    print(f"| {' | '.join(columns)} |", "|" + "---|" * len(columns), sep="\n")
    for row in rows:
        print(f"| {' | '.join(map(str, row))} |", flush=True)


def fork(work: Callable[[], None]) -> int:
    """Run `work` in a child of this process; return its id."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    return child


def state(path: Path) -> str:
    """Return the text of the artifact at `path`, "decoder" for a compiled one, or why it cannot be opened."""
    from faults.crash_points import content

    text, refused = content(path)
    return refused.splitlines()[0] if refused else text if len(text) < 20 else "decoder"


@dataclass(frozen=True)
class Kill:
    """One kill: what the build was doing, and what was found then and after the next build."""

    when: str
    found: str
    leftovers: int
    after: str
    left: tuple[str, ...]


def kill_one(path: Path, delay: float | None, event: int | None) -> Kill | None:
    """Kill a build after a delay, or at the n-th rename or removal below its folder; then build again.

    None: the build had ended before.
    """
    from fastcar_compile.artifact import claim as atomic
    from faults.crash_points import build

    log = path.parent.parent / "stage"
    log.write_text("before the first stage")

    def work() -> None:
        if event is not None:
            if event % 2:
                atomic.exchange = lambda first, second: False
            kill_at_event(path.parent, event // 2, log)
        compile_decoder(path, progress=lambda stage: write(log, stage))

    child = fork(work)
    if delay is not None:
        time.sleep(delay)
        os.kill(child, signal.SIGKILL)
    killed = os.WIFSIGNALED(os.waitpid(child, 0)[1])
    found, leftovers = state(path), len(os.listdir(path.parent)) - path.exists()
    build(path, "next")
    kill = Kill(log.read_text(), found, leftovers, state(path), tuple(sorted(os.listdir(path.parent))))
    print(kill if killed else "not killed", file=sys.stderr, flush=True)
    return kill if killed else None


def write(log: Path, text: str) -> None:
    """Keep a text for the parent process; a kill meanwhile leaves the one before."""
    partial = log.with_suffix(".partial")
    partial.write_text(text)
    partial.replace(log)


def kill_at_event(folder: Path, number: int, log: Path) -> None:
    """Have this process killed at the n-th rename or removal of the artifact, or of what stands beside it."""
    from fastcar_compile.artifact import claim as atomic

    numbers = itertools.count()

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        path = Path(str(arguments[0])) if arguments else folder
        placing = path.parent == folder or path.name == "artifact"
        if event not in PLACING or not placing or not path.is_relative_to(folder):
            return
        if next(numbers) == number:
            way = "" if atomic.exchange.__name__ == "exchange" else ", without exchange"
            log.write_text(f"before {event} of {path.name.partition('-')[0]}{way}")
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def kills(count: int, seed: int) -> None:
    """Kill builds at random moments, and at every rename and removal while an artifact is replaced."""
    from faults.crash_points import build

    numbers = random.Random(seed)
    with tempfile.TemporaryDirectory() as base:
        path = Path(base) / "place" / "out"
        path.parent.mkdir()
        seconds = build_once(path)
        assert state(path) == "decoder"
        build(path, "next")
        found = [kill for number in range(EVENTS) if (kill := kill_one(path, None, number))]
        while len(found) < count:
            found += [kill for kill in [kill_one(path, numbers.uniform(0, seconds), None)] if kill]
    print(f"{len(found)} kills, one build takes {seconds:.1f} s\n")
    rows = collections.Counter((each.when, each.found, each.after, ", ".join(each.left)) for each in found)
    print_table(
        ("killed during", "kills", "artifact then", "after the next build", "in the folder"),
        ((w, n, f, a, left) for (w, f, a, left), n in sorted(rows.items())),
    )


def disks(count: int) -> None:
    """Build on file systems of memory that are too small by more and more; then with a full TMPDIR."""
    from fastcar_compile.errors import UserError
    from faults.crash_points import build
    from faults.full_disk import mount

    def attempt(path: Path, log: Path) -> None:
        stages = ["capture"]
        try:
            compile_decoder(path, progress=stages.append)
            log.write_text("built|")
        except UserError as error:
            log.write_text(f"{stages[-1]}|{error.what}")

    with tempfile.TemporaryDirectory() as base:
        place, full, log = (Path(base) / name for name in ("place", "full", "log"))
        place.mkdir()
        full.mkdir()
        mount(full, "size=4k")
        (full / "ballast").write_bytes(bytes(4096))
        mount(place, "size=64m")
        path = place / "out"
        build_once(path)
        size = sum(f.stat().st_blocks * 512 for f in path.rglob("*"))
        rows = []
        for point in range(count + 1):
            build(path, "small")
            free = os.statvfs(place)
            left = 2 * size * point // count
            (place / "ballast").write_bytes(bytes(max(0, free.f_bavail * free.f_bsize - left)))
            os.environ["TMPDIR"] = tempfile.tempdir = str(full)
            log.write_text("killed|")
            os.waitpid(fork(lambda: attempt(path, log)), 0)
            os.environ.pop("TMPDIR")
            tempfile.tempdir = None
            (place / "ballast").unlink()
            stage, _, error = log.read_text().partition("|")
            print(left, stage, error, file=sys.stderr, flush=True)
            rows.append((f"{left / MIB:.2f}", stage, error, state(path), ", ".join(os.listdir(place))))
            subprocess.run(["rm", "-rf", str(path)], check=True)
        for mounted in (place, full):
            subprocess.run(["umount", str(mounted)], check=True)
    print(f"an artifact of {size / MIB:.2f} MiB; TMPDIR is full in all builds\n")
    print_table(("MiB free", "stage", "error", "artifact then", "in the folder"), rows)


def signals() -> None:
    """Send SIGINT or SIGTERM to `fastcar compile` at many moments, to it alone or to its process group."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background ignores it, and so would the builds
    rows: collections.Counter[tuple[str, ...]] = collections.Counter()
    slowest = 0.0
    with tempfile.TemporaryDirectory() as base:
        model = Path(base) / "model"
        os.waitpid(fork(lambda: save_model(model)), 0)
        (Path(base) / "place").mkdir()
        command = [sys.executable, "-m", "fastcar_compile", "compile", str(model), "--target", "cpu"]
        command += ["--tokens-per-frame", "8", "-o", str(Path(base) / "place" / "out")]
        begin = time.perf_counter()
        subprocess.run(command, check=True, capture_output=True, env=os.environ | {"PYTHONPATH": str(ROOT)})
        rest = time.perf_counter() - begin - 2
        moments = [*(0.1 * n for n in range(1, 21)), *(2 + rest * n / 16 for n in range(1, 16))]
        for moment, number in zip(moments, itertools.cycle((signal.SIGINT, signal.SIGTERM)), strict=False):
            row, seconds = signal_one(command, moment, number)
            print(f"{moment:.1f}", row, file=sys.stderr, flush=True)
            rows[row] += 1
            slowest = max(slowest, seconds)
            subprocess.run(["rm", "-rf", str(Path(base) / "place" / "out")], check=True)
    print(f"from the signal to the end {slowest:.1f} s at most\n")
    print_table(
        ("signal", "exit code", "stderr", "in the folder", "children", "moments"),
        ((*row, n) for row, n in sorted(rows.items())),
    )


def save_model(folder: Path) -> None:
    """Save the decoder as a folder."""
    from decoders import llama

    llama(num_hidden_layers=1).save_pretrained(folder)


def signal_one(command: list[str], moment: float, number: signal.Signals) -> tuple[tuple[str, ...], float]:
    """Return what a signal after `moment` seconds did, and how long that took."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, stdout=pipe, stderr=pipe, env=environment, start_new_session=True)
    time.sleep(moment)
    children = descendants(process.pid)
    begin = time.perf_counter()
    process.send_signal(number)
    _, err = process.communicate()
    seconds = time.perf_counter() - begin
    alive = [str(pid) for pid in children if Path(f"/proc/{pid}").exists()]
    folder = Path(command[-1]).parent
    text = err.decode().strip().splitlines()
    row = (number.name, str(process.returncode), " / ".join(text[-2:]), ", ".join(os.listdir(folder)) or "nothing")
    return (*row, ", ".join(alive) or "none"), seconds


def descendants(process: int) -> list[int]:
    """Return the processes below one."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except (OSError, ValueError):
                continue
    found = [process]
    for each in found:
        found += [child for child, parent in parents.items() if parent == each]
    return found[1:]


def identical(names: Sequence[str]) -> None:
    """Build each artifact twice, in surroundings that differ in everything that a build should not depend on."""
    first = {"PYTHONHASHSEED": "1", "LC_ALL": "C", "TZ": "UTC", "OMP_NUM_THREADS": "1", "umask": "022"}
    second = {"PYTHONHASHSEED": "4242", "LC_ALL": "C.UTF-8", "TZ": "Asia/Tokyo", "OMP_NUM_THREADS": "2", "umask": "077"}
    columns = ("build", "target", "quant", "files", "bytes", "names of files", "files that differ")
    print_table(columns, (identical_row(name, (first, second)) for name in names))


def identical_row(name: str, surroundings: Sequence[dict[str, str]]) -> tuple[object, ...]:
    """Build one artifact in each of two surroundings and compare them."""
    with tempfile.TemporaryDirectory() as base:
        outputs = [Path(base) / "one" / "out", Path(base) / "a longer path" / "with more folders" / "result"]
        for output, each in zip(outputs, surroundings, strict=True):
            build_in(output, name, each)
        files = [sorted(f.relative_to(o) for f in o.rglob("*") if f.is_file()) for o in outputs]
        different = [str(f) for f in files[0] if (outputs[0] / f).read_bytes() != (outputs[1] / f).read_bytes()]
        size = sum((outputs[0] / f).stat().st_size for f in files[0])
    names_of = "equal" if files[0] == files[1] else "different"
    return (name, *BUILDS[name], len(files[0]), f"{size:,}", names_of, ", ".join(different) or "none")


def build_in(output: Path, name: str, surroundings: dict[str, str]) -> None:
    """Compile in a process of its own, with these variables, umask and an own current folder."""
    variables = {key: value for key, value in surroundings.items() if key != "umask"}
    output.parent.mkdir(parents=True)
    code = f"import sys; sys.path[:0] = {[str(ROOT), str(HERE.parent)]!r}; import real_builds, pathlib\n"
    code += f"real_builds.compile_decoder(pathlib.Path({output.name!r}), {name!r})"
    subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | variables,
        cwd=output.parent,
        umask=int(surroundings["umask"], 8),
        check=True,
    )


def main() -> None:
    """Run one of the studies."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("study", choices=("kills", "disks", "signals", "identical"))
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--builds", default=",".join(BUILDS))
    options = parser.parse_args()
    if options.study == "kills":
        import fastcar_compile.compiler

        kills(options.count, options.seed)
    elif options.study == "disks":
        import fastcar_compile.compiler  # noqa: F401  (once, for all forks)

        disks(options.count)
    elif options.study == "signals":
        signals()
    else:
        identical(options.builds.split(","))


if __name__ == "__main__":
    main()
