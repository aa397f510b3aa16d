"""A safetensors file by its path, as an artifact reads it from its opened files."""

from pathlib import Path

import numpy as np

from fastcar_compile.errors import ArtifactError
from fastcar_compile.ir.tensor_files import Array, tensors_of
from fastcar_compile.support.values import refuse_pipe


def load_tensors(path: str | Path) -> dict[str, Array]:
    """Return all tensors of a safetensors file, as arrays over one private memory map of it.

    A page is read when it is first touched. Writing to an array changes the array only.

    Raises:
        ArtifactError: missing, or not a valid safetensors file.
    """
    try:
        refuse_pipe(Path(path))
        data = np.memmap(path, np.uint8, "c")
    except (OSError, ValueError) as error:
        raise ArtifactError(
            f"the tensor file cannot be read: {error}", where=str(path), hint="copy the artifact again"
        ) from error
    return tensors_of(data, str(path))
