"""Recorded replay decisions as a file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fastcar_compile.array_files import read_arrays
from fastcar_compile.errors import InputError

_HINT = "write it with `fastcar run --trace`, or np.save(path, session.stats.decisions)"


def save_trace(decisions: NDArray[np.bool_], path: Path) -> None:
    """Write decisions bool [forwards, layers, rows] to a .npy file.

    Raises:
        InputError: the file's name does not end in .npy.
    """
    if path.suffix != ".npy":
        raise InputError(f"the trace {path} is not a .npy file", hint="end its name in .npy")
    np.save(path, decisions, allow_pickle=False)


def load_trace(path: Path) -> NDArray[np.bool_]:
    """Return decisions bool [forwards, layers, rows], True where a row replayed.

    Raises:
        InputError: the file is missing, cannot be read, or holds something else.
    """
    arrays = read_arrays(path, "trace", _HINT)
    decisions = arrays.get("", np.empty(0))
    if decisions.dtype != np.bool_ or decisions.ndim != 3:
        kind = f"{decisions.dtype} {list(decisions.shape)}" if "" in arrays else "an archive"
        what = f"the trace holds {kind}, expected bool [forwards, layers, rows]"
        raise InputError(what, where=str(path), hint=_HINT)
    return decisions
