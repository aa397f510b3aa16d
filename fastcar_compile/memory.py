"""Memory that this process may still take: of the machine, and of its container."""

from __future__ import annotations

import gc
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from fastcar_compile.errors import UserError

LIMIT = Path("/sys/fs/cgroup/memory.max")
"""Of the container, where it has version 2 of the control groups."""


def require_memory(needed: int, what: str, hint: str = "") -> None:
    """Raise unless this process may take so many bytes more.

    Args:
        what: the subject of the error, for example "code generation".

    Raises:
        UserError: it may not.
    """
    free = available_memory()
    if free < needed:
        text = hint or "end other programs, or raise the limit of the container"
        raise UserError(f"{what} needs at least {needed:,} bytes of memory, and {free:,} are available", hint=text)


def available_memory() -> int:
    """Return the bytes that this process may still take; other processes of its container are not counted."""
    import psutil  # here: most commands ask for no memory

    free, used = psutil.virtual_memory().available, psutil.Process().memory_info()
    try:
        limit = int(LIMIT.read_text("ascii"))
    except (OSError, ValueError):  # there is none, or it is "max"
        return free
    return max(0, min(free, limit - (used.rss - used.shared)))  # pages of files can be given back


@contextmanager
def collector_paused() -> Generator[None]:
    """Pause Python's collector of reference cycles, which looks through graphs again and again that all live on.

    One that was off before stays off, so pauses may nest.
    """
    running = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if running:
            gc.enable()
