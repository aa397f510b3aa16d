"""Arguments of callers, where scalars of numpy and torch are numbers; and arrays and JSON from files, within limits."""

import logging
import math
import os
import re
import warnings
import zipfile
from collections.abc import Callable, Mapping, Set
from contextvars import ContextVar
from functools import wraps
from inspect import signature
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError
from pydantic_core import from_json

from fastcar_compile.errors import LISTED, InputError, UserError, describe_validation, shown
from fastcar_compile.support import limits
from fastcar_compile.support.files import open_plain

LOGGER = logging.getLogger("fastcar_compile")
"""Stages at INFO, what the machine lacks at WARNING. The command line shows both; a script configures `logging`."""


NOTED: ContextVar[list[tuple[str, bool]] | None] = ContextVar("NOTED", default=None)
"""Warnings of the running build, with `log`, for a build that is answered with its result; None: none is running."""


def warn(text: str, stacklevel: int = 1, *, log: bool = False) -> None:
    """Warn of what a build does in another way than its caller may expect.

    Args:
        stacklevel: as of `warnings.warn`. log: tell the logger instead.
    """
    if (noted := NOTED.get()) is not None:
        noted.append((text, log))
    if log:
        LOGGER.warning("%s", text)
    else:
        warnings.warn(text, UserWarning, stacklevel=stacklevel + 1)


def plain(value: Any) -> Any:
    """Return a scalar of numpy or torch, or an array of no dimensions, as Python's number; anything else as it is.

    Raises:
        InputError: the scalar has no value, for example on the meta device.
    """
    if getattr(value, "shape", None) != () or not callable(getattr(value, "item", None)):
        return value
    try:
        return value.item()
    except (RuntimeError, TypeError, ValueError, NotImplementedError) as error:
        raise InputError(f"a {type(value).__name__} has no value to read", hint="give a number") from error


def whole(what: str, value: Any, least: int, most: int = limits.SIZE) -> int:
    """Return a whole number from `least` to `most`.

    Args:
        what: name of the value in an error, for example "num_tokens".

    Raises:
        InputError: the value is not a whole number, or is out of range.
    """
    found = plain(value)
    if isinstance(found, bool) or not isinstance(found, int) or not least <= found <= most:
        raise InputError(f"{what} is {shown(found)}", hint=f"give a whole number from {least} to {most}")
    return found


def number(what: str, value: Any, hint: str = "give a number") -> float:
    """Return a number, which may be infinite.

    Raises:
        InputError: the value is not a number, or is NaN.
    """
    found = plain(value)
    if isinstance(found, bool) or not isinstance(found, int | float):
        raise InputError(f"{what} is {shown(found)}", hint=hint)
    try:
        result = float(found)
    except OverflowError:
        result = math.nan
    if math.isnan(result):
        raise InputError(f"{what} is {'NaN' if isinstance(found, float) else shown(found)}", hint=hint)
    return result


def path_of(what: str, value: Any) -> Path:
    """Return a path.

    Raises:
        InputError: the value is not a path, no file can have this path, it begins with the `~` of a shell, or it is
            relative to a folder that was deleted.
    """
    text = str(cast("Any", os.fspath(value))) if isinstance(value, str | os.PathLike) else ""
    if not text or "\0" in text:
        raise InputError(f"{what} is {shown(text or value)}", hint="give a path, as a text or a pathlib.Path")
    if text.startswith("~"):
        hint = f"give {os.path.expanduser(text)}, or ./{text} for a file of this name"
        raise InputError(f"{what} is {shown(text)}, and only a shell replaces the ~", hint=hint)
    if not os.path.isabs(text):
        check_current_folder()
    return Path(text)


def check_current_folder() -> None:
    """Raise InputError where the current folder was deleted: relative paths have no meaning, and torch needs it."""
    try:
        os.getcwd()
    except FileNotFoundError as error:
        raise InputError("the current folder was deleted", hint="change to a folder that exists") from error


def model_hint(path: Path) -> str:
    """Return a hint for the path of a model folder that does not exist; the path may be a name on the Hub."""
    if path.suffix == ".pt2":
        return "give the file that torch.export.save wrote"
    hint = "give a Hugging Face folder (config.json and *.safetensors)"
    if not re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", str(path)):
        return hint
    return f"{hint}. A model of the Hugging Face Hub is downloaded first: hf download {path} --local-dir {path.name}"


def refuse_pipe(path: Path) -> None:
    """Raise OSError for what is not a plain file: a pipe may be waited for, and a device read, without end."""
    open_plain(path).close()


def file_bytes(path: Path, most: int) -> bytes:
    """Return the bytes of a plain file.

    Raises:
        OSError: as of `open_plain`. ValueError: it has more than `most` bytes, or the path has a NUL in it.
    """
    with open_plain(path) as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise ValueError(f"it has more than {most} bytes")
    return data


def check_function(what: str, value: Any) -> None:
    """Raise InputError unless `value` is None or can be called."""
    if value is not None and not callable(value):
        raise InputError(f"{what} is {shown(value)}", hint="give a function, or leave it out")


def reporter(progress: Any) -> Callable[[str], None]:
    """Return a function that reports a phase to the logger, and to the caller's function where one is given.

    Raises:
        InputError: `progress` cannot be called.
    """
    check_function("progress", progress)

    def say(phase: str) -> None:
        LOGGER.info("%s", phase)
        if progress is not None:
            progress(phase)

    return say


def check_kind(what: str, value: Any, kinds: type | tuple[type, ...], expected: str) -> None:
    """Raise InputError unless `value` is of one of these types.

    Args:
        expected: description of the types, for example "a ReplayConfig".
    """
    if not isinstance(value, kinds):
        raise InputError(f"{what} is {shown(value)}", hint=f"give {expected}")


def sequence(what: str, value: Any, hint: str = "give one number, or a list with one per layer") -> list[Any]:
    """Return the items of a list, a tuple or an array of one dimension; each scalar as Python's number.

    Raises:
        InputError: the sequence is a string, a dict or a set, or has more than one dimension.
    """
    if isinstance(value, str | bytes | Mapping | Set) or not hasattr(value, "__len__"):
        raise InputError(f"{what} is {shown(value)}", hint=hint)
    if len(getattr(value, "shape", (0,))) != 1:
        raise InputError(f"{what} has shape {list(value.shape)}", hint=hint)
    try:
        return [plain(item) for item in value]
    except (RuntimeError, TypeError, NotImplementedError) as error:
        raise InputError(f"{what} is {shown(value)}", hint=hint) from error


def token_range(what: str, value: Any) -> tuple[int, int] | None:
    """Return the first token id and one past the last, of a pair of whole numbers; None for None.

    Raises:
        InputError: the value is not a pair of whole numbers, or the range holds no id.
    """
    if value is None:
        return None
    hint = "give the first token id and one past the last, for example (0, 1000)"
    found = sequence(what, value, hint)
    if len(found) != 2:
        raise InputError(f"{what} is {shown(value)}", hint=hint)
    first = whole(f"the first id of {what}", found[0], 0)
    return first, whole(f"the last id of {what}, and one,", found[1], first + 1)


def token_table(what: str, value: Any) -> NDArray[np.int64]:
    """Return token ids int64 [N, T] of a list, a numpy array or a torch tensor.

    Raises:
        InputError: the table holds other numbers than integers, or has another shape.
    """
    hint = "give token ids as integers [N, T], one video per row"
    try:
        table = np.asarray(value.detach().cpu().numpy() if hasattr(value, "detach") else value)
    except (RuntimeError, TypeError, ValueError, NotImplementedError) as error:
        raise InputError(f"{what} cannot be read as an array: {error}", hint=hint) from error
    if not np.issubdtype(table.dtype, np.integer) or table.ndim != 2 or not table.size:
        raise InputError(f"{what} are {table.dtype} {list(table.shape)}", hint=hint)
    if table.dtype == np.uint64 and table.max() > np.iinfo(np.int64).max:
        raise InputError(f"{what} hold a token beyond int64", hint=hint)
    return np.ascontiguousarray(table, np.int64)


T = TypeVar("T")

_ONE = "correct the field named"


def checked(error: type[UserError] = InputError, hint: str = "") -> Callable[[type[T]], type[T]]:
    """Return a decorator for a pydantic model or dataclass: constructing it, or a subclass, raises `error`.

    The error names every field at fault. Scalars of numpy and torch are taken as numbers. Validation of a model inside
    another model, and `model_validate`, still raise pydantic's error, so that a reader of files collects all fields.
    """

    def decorate(cls: type[T]) -> type[T]:
        construct: Callable[..., None] = cls.__init__
        takes = signature(construct)

        # `wraps` also copies the mark by which pydantic knows its own __init__: validation of subclasses does not call
        # this one.
        @wraps(construct)
        def construct_or_refuse(self: Any, /, *values: Any, **fields: Any) -> None:
            kind: type[Any] = self.__class__
            name = kind.__name__
            try:
                takes.bind(self, *values, **fields)
            except TypeError as refused:
                raise error(f"{name} is not valid: {refused}", where=name, hint=hint or _ONE) from refused
            try:
                construct(self, *map(plain, values), **{field: plain(value) for field, value in fields.items()})
            except ValidationError as refused:
                raise _refusal(kind, refused, error, hint) from refused
            except InputError as refused:
                raise error(f"{name} is not valid: {refused.what}", where=name, hint=refused.hint) from refused

        type.__setattr__(cls, "__init__", construct_or_refuse)
        return cls

    return decorate


def _refusal(kind: type, refused: ValidationError, error: type[UserError], hint: str) -> UserError:
    name, known = kind.__name__, getattr(kind, "model_fields", ())
    named = refused.errors(include_url=False)[:LISTED]
    fields = {".".join([name, *map(str, item["loc"])]): None for item in named}
    default = _ONE if len(fields) == 1 else "correct the fields named"
    what = f"{name} is not valid: {describe_validation(refused, known)}"
    return error(what, where=", ".join(fields), hint=hint or default)


# Arrays from .npy and .npz files: no pickle, and no more memory than the file accounts for.


Array = NDArray[Any]


def read_arrays(path: Path, what: str, hint: str, most: int | None = None) -> dict[str, Array]:
    """Return the arrays of a .npz file by name, or the array of a .npy file under the name "".

    Args:
        what: name of the file in an error, for example "trace". most: bytes of the file, and of all of its arrays;
            None: any number of a .npy file, and `ARRAYS_BYTES` of the arrays of a .npz file.

    Raises:
        InputError: the file is missing, or does not have the form that numpy writes without pickle.
    """
    try:
        refuse_pipe(path)
        if most is not None and path.stat().st_size > most:
            raise ValueError(f"it has {path.stat().st_size} bytes, and at most {most} are read")
        if zipfile.is_zipfile(path):
            return _members(path, most or limits.ARRAYS_BYTES)
        # A map is refused where the header promises more than the file has; reading would ask for the memory first.
        return {"": np.array(np.load(path, mmap_mode="r", allow_pickle=False))}
    except Exception as error:  # of numpy and zipfile, many kinds; all of them mean that the file is damaged
        text = str(getattr(error, "strerror", None) or error)[: limits.TEXT_ERROR]
        if "allow_pickle" in text:  # numpy's advice for what is no array at all
            text = "it holds no plain arrays"
        raise InputError(f"the {what} cannot be read: {text}", where=str(path), hint=hint) from error


def _members(path: Path, most: int) -> dict[str, Array]:
    with zipfile.ZipFile(path) as archive:
        total = sum(entry.file_size for entry in archive.infolist())
    if total > most:
        raise ValueError(f"its arrays take {total} bytes, and at most {most} are read")
    with np.load(path, allow_pickle=False) as arrays:
        found: dict[str, Any] = dict(arrays.items())
    if bad := [name for name, value in found.items() if not isinstance(value, np.ndarray)]:
        raise ValueError(f"{bad[0]!r:.80} is not an array")
    return found


def parse_json(data: bytes, *, size: int = limits.JSON_BYTES, constants: bool = False) -> Any:
    """Return the value of a JSON text; of a key that is given twice, the last value.

    Args:
        constants: read NaN and Infinity too, which Python writes for floats that are not finite.

    Raises:
        ValueError: the text is too long, more than 200 brackets deep, not UTF-8 or not JSON.
    """
    if len(data) > size:
        raise ValueError(f"it has {len(data)} bytes, and at most {size} are read")
    return from_json(data, allow_inf_nan=constants)


def read_json(
    path: Path,
    what: str,
    error: type[UserError],
    *,
    size: int = limits.JSON_BYTES,
    constants: bool = False,
    hint: str = "",
) -> Any:
    """Return the content of a JSON file.

    Args:
        what: name of the file in an error, for example "thresholds". error: type of the error that is raised.
        size, constants: as for `parse_json`.

    Raises:
        UserError: of the given type: the file is missing, or it holds no JSON within the limits.
    """
    try:
        return parse_json(file_bytes(path, size), size=size, constants=constants)
    except (OSError, ValueError) as caught:  # a path with a NUL raises ValueError too
        text = getattr(caught, "strerror", None) or caught
        raise error(f"the {what} cannot be read: {text}", where=str(path), hint=hint) from caught
