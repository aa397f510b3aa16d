"""Arrays in and out of a session: numpy inside, the caller's kind outside. Torch is used only where it is loaded."""

from __future__ import annotations

import sys
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from fastcar_compile import limits
from fastcar_compile.errors import InputError


def _is_torch(value: Any) -> bool:
    torch = sys.modules.get("torch")
    # A process without torch has no torch tensors, so torch is never imported for the question.
    return torch is not None and isinstance(value, torch.Tensor)


def to_numpy(value: Any) -> NDArray[Any]:
    """Return an array: of a torch tensor, of anything that speaks DLPack, or of a sequence.

    Raises:
        InputError: numpy has no such array: bfloat16, sparse, without values, ragged.
    """
    try:
        if _is_torch(value):
            # `force` detaches the tensor from autograd and copies it from a device to the host.
            return value.numpy(force=True)
        if isinstance(value, np.ndarray) or not hasattr(value, "__dlpack__"):
            return np.asarray(cast(Any, value))
        return np.from_dlpack(value)
    except (TypeError, ValueError, RuntimeError, BufferError, NotImplementedError) as error:
        text = str(error).partition("\n")[0][: limits.TEXT_ERROR]
        what = f"a {type(cast(Any, value)).__name__} cannot be read as an array: {text}"
        raise InputError(what, hint="give a dense numpy array, or a torch tensor of a type that numpy has") from error


def like(example: Any, array: NDArray[Any]) -> Any:
    """Return the array, as a torch tensor where the example is one."""
    return sys.modules["torch"].from_numpy(array) if _is_torch(example) else array
