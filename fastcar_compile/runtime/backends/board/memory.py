"""Contiguous memory (CMA), which XRT allocates buffers from on a board whose memory is also Linux's.

hls_templates/host/fastcar_memory.hpp is the same in C++.
"""

from __future__ import annotations

import os
from pathlib import Path

from fastcar_compile.artifact.manifest import Manifest
from fastcar_compile.artifact.sections import AcceleratorSection
from fastcar_compile.errors import BackendError

MEMINFO = "FASTCAR_MEMINFO"
"""Environment variable: the file that is read instead of /proc/meminfo; "none": nothing is checked."""

PAGE = 4096
MB = 1e6


def buffer_bytes(section: AcceleratorSection) -> int:
    """Return the bytes of every buffer on the device: all weight streams, and the kernels' other memory arguments.

    The weight arguments of a step kernel hold all streams.
    """
    design, streams, weights = section.design, list[int](), set[str]()
    if section.step is None:
        streams = [design.stream_bytes] * design.spec.layers + list(design.linear_stream_bytes.values())
        weights = {name for kernel in section.kernels for name in kernel.weights()}
    arguments = [a.bytes for k in section.kernels for a in k.arguments if a.kind != "scalar" and a.name not in weights]
    # CMA hands out whole pages, so every buffer is rounded up to one.
    return sum(-(-size // PAGE) * PAGE for size in streams + arguments)


def require_contiguous(manifest: Manifest, section: AcceleratorSection) -> None:
    """Raise BackendError where the board shares its memory with Linux and too little contiguous memory is free."""
    path = os.environ.get(MEMINFO, "/proc/meminfo")
    if path == "none" or not manifest.target.shares_memory:
        return
    fields = _meminfo(Path(path))
    needed, free, total = buffer_bytes(section), fields.get("CmaFree", 0), fields.get("CmaTotal", 0)
    if needed > free:
        raise BackendError(
            f"the buffers need {needed / MB:.1f} MB of contiguous memory (CMA), of which {free / MB:.1f} MB are free "
            f"and {total / MB:.1f} MB reserved",
            where=path,
            hint="end other programs that use the board, or reserve more when Linux starts: docs/tutorial/board.md, "
            f'"Memory under Linux"; {MEMINFO}=none skips this check',
        )


def _meminfo(path: Path) -> dict[str, int]:
    """Return the fields of a file such as /proc/meminfo, bytes.

    Raises:
        BackendError: it cannot be read.
    """
    try:
        lines = path.read_text().splitlines()
    except OSError as error:
        what = f"the memory of the board cannot be read: {error.strerror}"
        raise BackendError(what, where=str(path), hint=f"set {MEMINFO}=none where there is no such file") from error
    words = [line.replace(":", " ").split() for line in lines]
    return {w[0]: 1024 * int(w[1]) for w in words if len(w) > 1 and w[1].isdecimal()}
