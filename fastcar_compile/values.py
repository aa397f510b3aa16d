"""Arguments of callers: scalars of numpy and torch are numbers, and what cannot be meant is an InputError."""

from __future__ import annotations

import logging
import math
import os
import re
from collections.abc import Callable, Mapping, Set
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from fastcar_compile import limits
from fastcar_compile.errors import InputError, UserError, shown

LOGGER = logging.getLogger("fastcar_compile")
"""Stages at INFO, what the machine lacks at WARNING. The command line shows both; a script configures `logging`."""


def plain(value: Any) -> Any:
    """Return a scalar of numpy or torch, or an array of no dimensions, as Python's number; anything else as it is.

    Raises:
        InputError: the scalar has no value, as one on the meta device.
    """
    if getattr(value, "shape", None) != () or not callable(getattr(value, "item", None)):
        return value
    try:
        return value.item()
    except (RuntimeError, TypeError, ValueError, NotImplementedError) as error:
        raise InputError(f"a {type(value).__name__} has no value to read", hint="give a number") from error


def whole(what: str, value: Any, least: int, most: int = limits.SIZE, error: type[UserError] = InputError) -> int:
    """Return a whole number from `least` to `most`.

    Args:
        what: its name in an error, for example "num_tokens".

    Raises:
        UserError: of the given type: it is none.
    """
    found = plain(value)
    if isinstance(found, bool) or not isinstance(found, int) or not least <= found <= most:
        raise error(f"{what} is {shown(found)}", hint=f"give a whole number from {least} to {most}")
    return found


def number(what: str, value: Any, hint: str = "give a number", error: type[UserError] = InputError) -> float:
    """Return a number, which may be infinite.

    Raises:
        UserError: of the given type: it is none, or NaN.
    """
    found = plain(value)
    if isinstance(found, bool) or not isinstance(found, int | float):
        raise error(f"{what} is {shown(found)}", hint=hint)
    try:
        result = float(found)
    except OverflowError:
        result = math.nan
    if math.isnan(result):
        raise error(f"{what} is {'NaN' if isinstance(found, float) else shown(found)}", hint=hint)
    return result


def path_of(what: str, value: Any, error: type[UserError] = InputError) -> Path:
    """Return a path.

    Raises:
        UserError: of the given type: it is none, or one that no file can have.
    """
    if not isinstance(value, str | os.PathLike):
        raise error(f"{what} is {shown(value)}", hint="give a path, as a text or a pathlib.Path")
    text = str(cast("Any", os.fspath(value)))
    if not text or "\0" in text:
        raise error(f"{what} is {shown(text)}", hint="give a path, as a text or a pathlib.Path")
    return Path(text)


def model_hint(path: Path) -> str:
    """Return how to correct the path of a model folder that does not exist, which may be a name on the Hub."""
    hint = "give a Hugging Face folder (config.json and *.safetensors)"
    if not re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", str(path)):
        return hint
    return f"{hint}. A model of the Hugging Face Hub is downloaded first: hf download {path} --local-dir {path.name}"


def refuse_pipe(path: Path) -> None:
    """Raise OSError for a pipe: opening it may wait without end, and these formats are read at any place."""
    if path.is_fifo():
        raise OSError("it is a pipe, not a plain file")


def check_function(what: str, value: Any) -> None:
    """Raise InputError unless `value` is None or can be called."""
    if value is not None and not callable(value):
        raise InputError(f"{what} is {shown(value)}", hint="give a function, or leave it out")


def reporter(progress: Any) -> Callable[[str], None]:
    """Return what reports a stage: to the logger, and to the caller's function if there is one.

    Raises:
        InputError: the caller gave what cannot be called.
    """
    check_function("progress", progress)

    def say(stage: str) -> None:
        LOGGER.info("%s", stage)
        if progress is not None:
            progress(stage)

    return say


def check_kind(what: str, value: Any, kinds: type | tuple[type, ...], expected: str) -> None:
    """Raise InputError unless `value` is of one of these types.

    Args:
        expected: what they are, for example "a ReplayConfig".
    """
    if not isinstance(value, kinds):
        raise InputError(f"{what} is {shown(value)}", hint=f"give {expected}")


def sequence(what: str, value: Any, hint: str = "give one number, or a list with one per layer") -> list[Any]:
    """Return the items of a list, a tuple or an array of one dimension; each scalar as Python's number.

    Raises:
        InputError: it is none: neither a text nor a dict or set has an order that is meant.
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
        InputError: it is no such pair, or holds no id.
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
        InputError: it holds no integers, or is of another shape.
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
