"""Usable cores, and a parallel map over them."""

import ctypes
import gc
import os
import re
import shutil
import signal
import subprocess
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import TypeVar

from fastcar_compile.errors import UserError

T = TypeVar("T")
R = TypeVar("R")

QUOTA, LIMIT = Path("/sys/fs/cgroup/cpu.max"), Path("/sys/fs/cgroup/memory.max")
"""Of the container, where it has version 2 of the control groups."""


def at_once(function: Callable[[T], R], values: Iterable[T], threads: int | None = None) -> list[R]:
    """Return `function` of every value, in order.

    Args:
        threads: number of computing threads; None: one per usable core.
    """
    with ThreadPoolExecutor(threads or usable_cores()) as pool:
        return list(pool.map(function, values))


def streamed(function: Callable[[T], R], values: Iterable[T], threads: int | None = None) -> Iterator[R]:
    """Yield `function` of every value, in order, as it is computed; two results per thread wait at most.

    Args:
        threads: number of computing threads; None: one per usable core.
    """
    threads = threads or usable_cores()
    waiting = deque[Future[R]]()
    with ThreadPoolExecutor(threads) as pool:
        for value in values:
            waiting.append(pool.submit(function, value))
            if len(waiting) == 2 * threads:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


def usable_cores() -> int:
    """Return the number of cores of this process: its affinity, limited to whole cores of `QUOTA`; at least 1."""
    cores = len(os.sched_getaffinity(0))
    try:
        quota, period = map(int, QUOTA.read_text("ascii").split())
    except (OSError, ValueError):  # the file is missing, or holds "max"
        return cores
    return max(1, min(cores, quota // period))


def require_memory(needed: int, what: str) -> None:
    """Raise UserError unless this process may take `needed` more bytes of memory.

    Args:
        what: the subject of the error, for example "code generation".

    Raises:
        UserError: less memory is available.
    """
    free = available_memory()
    if free < needed:
        hint = "end other programs, or raise the limit of the container"
        raise UserError(f"{what} needs at least {needed:,} bytes of memory, and {free:,} are available", hint=hint)


def available_memory() -> int:
    """Return the bytes that this process may still take; other processes of its container are not counted."""
    import psutil  # here: most commands ask for no memory

    free, used = psutil.virtual_memory().available, psutil.Process().memory_info()
    try:
        limit = int(LIMIT.read_text("ascii"))
    except (OSError, ValueError):  # the file is missing, or holds "max"
        return free
    return max(0, min(free, limit - (used.rss - used.shared)))  # pages of files can be given back


@contextmanager
def collector_paused() -> Generator[None]:
    """Pause Python's collector of reference cycles, which searches graphs again and again, though all stay in use.

    A collector that was off before stays off, so pauses may nest.
    """
    running = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if running:
            gc.enable()


CPUINFO = Path("/proc/cpuinfo")


_TILES = "amx_tile"


def cpu_flags(cpuinfo: Path = CPUINFO) -> frozenset[str]:
    """Return what this process may use of the first `flags` (x86) or `Features` (Arm) line.

    Empty where the file or the line is missing.
    """
    with suppress(OSError):
        if found := re.search(r"^(?:flags|Features)\s*:(.*)", cpuinfo.read_text("utf-8"), re.MULTILINE):
            flags = frozenset(found[1].split())
            return flags - {_TILES} if _TILES in flags and not _tiles_granted() else flags
    return frozenset()


@cache
def _tiles_granted() -> bool:
    # Linux lets all threads of a process use AMX once it has asked (Documentation/arch/x86/xstate.rst): x86-64's
    # arch_prctl is system call 158, ARCH_REQ_XCOMP_PERM is 0x1023, and tiles are state component 18.
    return ctypes.CDLL(None).syscall(158, 0x1023, 18) == 0


_LINKING = ("COMPILER_PATH", "GCC_EXEC_PREFIX", "LD_RUN_PATH", "LIBRARY_PATH", "SOURCE_DATE_EPOCH")
"""Environment variables that g++ and its linker read."""


def linker_text(compiler: str) -> list[str]:
    """Return what the bytes of a library depend on where `compiler` links it: versions, C library, environment."""
    path = shutil.which(compiler)
    if path is None:
        return [compiler]
    options = ("version",) if Path(path).name == "zig" else ("--version", "-Wl,--version")
    texts = [_stated(path, option) for option in options]
    libc = os.confstr("CS_GNU_LIBC_VERSION") if "CS_GNU_LIBC_VERSION" in os.confstr_names else None
    return [compiler, *texts, str(libc), *(f"{name}={os.environ.get(name)}" for name in _LINKING)]


@cache
def _stated(program: str, option: str) -> str:
    return run([program, option]).stdout


def run(command: Sequence[str], env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run a command to its end and return its output. Messages are in English.

    The command and its own children are a process group. If this call ends early, so does the group.

    Args:
        env: variables besides the variables of this process.

    Raises:
        OSError: the command cannot be started.
    """
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
        errors="replace",
        env={**os.environ, "LC_ALL": "C", **(env or {})},
        process_group=0,
    ) as child:
        try:
            out, err = child.communicate()
        except BaseException:  # such as Ctrl-C: g++ alone would leave its linker running
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            raise
    return subprocess.CompletedProcess(list(command), child.returncode, out, err)
