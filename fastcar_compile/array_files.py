"""Arrays from .npy and .npz files: no pickle, and no more memory than the file accounts for."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastcar_compile import limits
from fastcar_compile.errors import InputError
from fastcar_compile.values import refuse_pipe

Array = NDArray[Any]


def read_arrays(path: Path, what: str, hint: str) -> dict[str, Array]:
    """Return the arrays of a .npz file by name, or that of a .npy file under the name "".

    Args:
        what: the file in an error, for example "trace".

    Raises:
        InputError: there is no such file, or it is not what numpy writes without pickle.
    """
    try:
        refuse_pipe(path)
        if zipfile.is_zipfile(path):
            return _members(path)
        # A map is refused where the header promises more than the file has; reading would ask for the memory first.
        return {"": np.array(np.load(path, mmap_mode="r", allow_pickle=False))}
    except (
        OSError,
        ValueError,
        EOFError,
        KeyError,
        SyntaxError,
        OverflowError,
        MemoryError,
        zipfile.BadZipFile,
    ) as error:
        text = str(error.strerror if isinstance(error, OSError) and error.strerror else error)[: limits.TEXT_ERROR]
        raise InputError(f"the {what} cannot be read: {text}", where=str(path), hint=hint) from error


def _members(path: Path) -> dict[str, Array]:
    with zipfile.ZipFile(path) as archive:
        total = sum(entry.file_size for entry in archive.infolist())
    if total > limits.ARRAYS_BYTES:
        raise ValueError(f"its arrays take {total} bytes, and at most {limits.ARRAYS_BYTES} are read")
    with np.load(path, allow_pickle=False) as arrays:
        found: dict[str, Any] = dict(arrays.items())
    if bad := [name for name, value in found.items() if not isinstance(value, np.ndarray)]:
        raise ValueError(f"{bad[0]!r:.80} is no array")
    return found
