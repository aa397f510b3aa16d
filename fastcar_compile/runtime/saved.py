"""A session in a file: every state that its tokens have written, and where it stands."""

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, NonNegativeInt, ValidationError

from fastcar_compile.artifact.claim import put
from fastcar_compile.errors import ArtifactError, describe_validation, os_errors
from fastcar_compile.runtime.backends.base import Array
from fastcar_compile.support import limits
from fastcar_compile.support.values import read_arrays

_ABOUT = "about"
_HINT = "give a file that `Session.save` wrote"


class SavedSession(BaseModel):
    """What a session file says beside its arrays.

    Args:
        digest: of the artifact. position: of the next token. first: position of the first decode forward.
        forwards, eligible: of the statistics. context: the context of cross-attention is among the states.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    version: Literal[1] = 1
    digest: str
    position: NonNegativeInt
    first: NonNegativeInt | None
    forwards: NonNegativeInt
    eligible: NonNegativeInt
    context: bool


def write_session(file: Path, about: SavedSession, arrays: Mapping[str, Array]) -> None:
    """Write a .npz file, whatever its name; it replaces an old one once it is whole.

    Raises:
        UserError: it cannot be written.
    """
    # numpy has no bfloat16 of its own: its bits are stored.
    plain: dict[str, Any] = {n: a if a.dtype.isbuiltin == 1 else a.view(np.uint16) for n, a in arrays.items()}
    plain[_ABOUT] = np.frombuffer(about.model_dump_json().encode(), np.uint8)
    # Beside the file, so that the last step is a rename.
    with (
        os_errors("the session cannot be saved", file),
        tempfile.TemporaryDirectory(dir=file.parent, prefix=f".{file.name}-") as folder,
    ):
        new = Path(folder, file.name)
        with new.open("wb") as stream:
            np.savez(stream, **plain)
        put(new, file, 0o644)


def read_session(file: Path, digest: str, most: int) -> tuple[SavedSession, dict[str, Array]]:
    """Return a saved session of the artifact with this digest, and its arrays; bfloat16 as uint16.

    Args:
        most: bytes of the session's states. What stands beside them may take as much as any file of arrays.

    Raises:
        InputError: the file cannot be read. ArtifactError: it is no session, or one of another artifact.
    """
    arrays = read_arrays(file, "session", _HINT, most + limits.ARRAYS_BYTES)
    if _ABOUT not in arrays:
        raise ArtifactError("this file is no session", where=str(file), hint=_HINT)
    try:
        about = SavedSession.model_validate_json(arrays[_ABOUT].tobytes())
    except ValidationError as error:
        what = f"the session is malformed: {describe_validation(error)}"
        raise ArtifactError(what, where=str(file), hint=_HINT) from error
    if about.digest != digest:
        what = f"the session is of the artifact {about.digest}, this one is {digest}"
        raise ArtifactError(what, where=str(file), hint="open the artifact that it was saved with")
    return about, arrays
