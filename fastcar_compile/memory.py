"""Memory that this process may still take: of the machine, and of its control groups."""

from __future__ import annotations

import gc
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from fastcar_compile.errors import UserError
from fastcar_compile.parallel import control_groups

_UNLIMITED = 1 << 60
"""Version 1 writes the largest multiple of a page instead of "max"."""


def require_memory(needed: int, what: str, hint: str = "") -> None:
    """Raise unless this process may take so many bytes more.

    Args:
        what: the subject of the error, for example "code generation".

    Raises:
        UserError: it may not.
    """
    free = available_memory()
    if free is not None and free < needed:
        text = hint or "end other programs, or raise the limit of the container"
        raise UserError(f"{what} needs at least {needed:,} bytes of memory, and {free:,} are available", hint=text)


def available_memory(root: Path = Path("/")) -> int | None:
    """Return the bytes that this process may still take; None where the system does not say.

    Args:
        root: folder that holds `proc` and `sys`.
    """
    found = [free for group in control_groups("memory", root) if (free := _group_free(group)) is not None]
    try:
        fields = dict(line.split(":", 1) for line in (root / "proc/meminfo").read_text("ascii").splitlines())
        found.append(int(fields["MemAvailable"].split()[0]) * 1024)
    except (OSError, ValueError, KeyError):
        pass
    return min(found, default=None)


def _group_free(group: Path) -> int | None:
    """Return what a group's limit leaves, page cache that can be given back included; None: it has no limit."""
    version2 = (group / "memory.max").is_file()
    limit_name, used_name, prefix = (
        ("memory.max", "memory.current", "")
        if version2
        else ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
    )
    try:
        limit = (group / limit_name).read_text("ascii").strip()
        if limit == "max" or int(limit) >= _UNLIMITED:
            return None
        used = int((group / used_name).read_text("ascii"))
        counts = dict(line.split() for line in (group / "memory.stat").read_text("ascii").splitlines())
        cache = sum(int(counts.get(f"{prefix}{kind}_file", 0)) for kind in ("active", "inactive"))
        return max(0, int(limit) - used + cache)
    except (OSError, ValueError):
        return None


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
