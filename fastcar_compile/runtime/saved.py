"""A session in a file: every state that its tokens have written, and where it stands."""

import tempfile
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

import numpy as np
import safetensors
from pydantic import BaseModel, ConfigDict, NonNegativeInt, ValidationError

from fastcar_compile.artifact.claim import put
from fastcar_compile.errors import ArtifactError, describe_validation, os_errors
from fastcar_compile.runtime.backends.base import Array

_safetensors: Any = import_module("safetensors.numpy")  # its types are incomplete
_safe_open: Any = safetensors.safe_open

_KEY = "fastcar_session"
_HINT = "give a file that `Session.save` wrote"


class SavedSession(BaseModel):
    """What a session file says beside its tensors.

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


def write_session(file: Path, about: SavedSession, tensors: Mapping[str, Array]) -> None:
    """Write a safetensors file; it replaces an old one once it is whole.

    Raises:
        UserError: it cannot be written.
    """
    # numpy has no bfloat16 of its own, nor has safetensors for numpy: its bits are stored.
    plain = {n: np.ascontiguousarray(a if a.dtype.isbuiltin == 1 else a.view(np.uint16)) for n, a in tensors.items()}
    with os_errors("the session cannot be saved", file):
        # Beside the file, so that the last step is a rename.
        with tempfile.NamedTemporaryFile(dir=file.parent, prefix=f".{file.name}-", delete=False) as made:
            new = Path(made.name)
        try:
            _safetensors.save_file(plain, new, {_KEY: about.model_dump_json()})
            put(new, file, 0o644)
        finally:
            new.unlink(missing_ok=True)


def read_session(file: Path, digest: str) -> tuple[SavedSession, dict[str, Array]]:
    """Return a saved session of the artifact with this digest, and its tensors; bfloat16 as uint16.

    Raises:
        ArtifactError: the file is damaged, no session, or of another artifact. UserError: it cannot be read.
    """
    try:
        with os_errors("the session cannot be read", file), _safe_open(file, framework="numpy") as stored:
            found: dict[str, str] = stored.metadata() or {}
            text = found.get(_KEY)
            if text is None:
                raise ArtifactError("this file is no session", where=str(file), hint=_HINT)
            about = SavedSession.model_validate_json(text)
            if about.digest != digest:
                what = f"the session is of the artifact {about.digest}, this one is {digest}"
                raise ArtifactError(what, where=str(file), hint="open the artifact that it was saved with")
            return about, {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118
    except ValidationError as error:
        text = "; ".join(describe_validation(error))
        raise ArtifactError(f"the session is malformed: {text}", where=str(file), hint=_HINT) from error
    except safetensors.SafetensorError as error:
        raise ArtifactError(f"the session is damaged: {error}", where=str(file), hint=_HINT) from error
