"""Options that several commands have, parsers of options, and the check that excludes options from each other."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from inspect import Parameter, Signature, signature
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any, TypeVar, cast

import numpy as np
from numpy.typing import NDArray
from typer import Argument, Option

from fastcar_compile.cli.common import Writes, document
from fastcar_compile.config.listing import Needs
from fastcar_compile.config.models import Jacobi
from fastcar_compile.errors import UserError, os_errors
from fastcar_compile.support.values import read_arrays, refuse_pipe

Tokens = NDArray[np.int64]
F = TypeVar("F", bound=Callable[..., Any])


def names_of(where: str) -> Callable[[], list[str]]:
    """Return a function that returns names for shell completion: it calls the function at "module:attribute"."""

    def names() -> list[str]:
        module, _, attribute = where.partition(":")
        return list(attrgetter(attribute)(import_module(module))())

    return names


OUTPUT = Option("--output", "-o")
"""The option that names the file or folder which a command writes."""

TARGETS = names_of("fastcar_compile.config.targets:available_targets")
BACKENDS = names_of("fastcar_compile.runtime.backends:BACKENDS.names")

ArtifactArgument = Annotated[Path, Argument(help="Folder of the artifact.")]
ThresholdOption = Annotated[str | None, Option(help="Overrides the compiled threshold(s).")]

TRAINING = ("gate", "start", "units", "steps", "batch", "seed", "tokens_per_frame", "prompt", "counted", "checkpoint")
"""Options of a training among those of `shared`."""


def shared(
    videos: Annotated[Path, Option()],
    target_replay: Annotated[float, Option()],
    gate: str = "learned",
    start: Path | None = None,
    units: Annotated[int, Needs("gate", "learned")] = 16,
    steps: int = 200,
    batch: int = 4,
    seed: int = 0,
    tokens_per_frame: int | None = None,
    prompt: Annotated[int, Option(min=1)] = 1,
    counted: str | None = None,
    checkpoint: Annotated[Path | None, Writes("checkpoint")] = None,
) -> None:
    """Have the options that commands share; `takes` gives them to a command.

    Args:
        videos: .safetensors, .npz or .npy, int64 [N, T], prompt included.
        target_replay: Share of the forwards t >= F that shall replay.
        gate: learned, or tas (a weight per query head).
        start: A trained gate of the same kind and units to go on from.
        units: Of the hidden layer of gate learned.
        steps: Of the optimiser.
        batch: Videos per step.
        seed: Of first weights, order of videos and noise.
        tokens_per_frame: Tokens of one frame; default: the model's config.
        prompt: Tokens before decoding starts.
        counted: Token ids that the decoder predicts, FIRST:END; others are given. Default: all.
        checkpoint: An interrupted training goes on from this file.
    """


document(shared)


def takes(*names: str, **defaults: object) -> Callable[[F], F]:
    """Return a decorator that gives a command options of `shared` in the place of its `**given`.

    Args:
        defaults: others than those there.
    """
    known = signature(shared).parameters
    chosen = [known[name].replace(kind=Parameter.KEYWORD_ONLY) for name in names]
    chosen = [item.replace(default=defaults.get(item.name, item.default)) for item in chosen]
    return lambda function: with_parameters(function, chosen)


def with_parameters(function: F, parameters: Sequence[Parameter]) -> F:
    """Return the command with these parameters behind its first one, in the place of its `**given`."""
    first, *own, _ = signature(function).parameters.values()
    own = [item.replace(kind=Parameter.KEYWORD_ONLY) for item in own]
    vars(function)["__signature__"] = Signature([first, *parameters, *own])
    function.__annotations__ |= {item.name: item.annotation for item in parameters}
    return function


def parse_jacobi(text: str) -> Jacobi:
    """Return Jacobi decoding of a window: a number of positions, or "auto"."""
    if text != "auto" and not re.fullmatch(r"\d{1,9}", text, re.ASCII):
        raise UserError(f"{text!r} is no window", where="--jacobi", hint="give a number of positions, or auto")
    return Jacobi("auto" if text == "auto" else int(text))


def parse_thresholds(text: str) -> float | list[float | None]:
    """Return a threshold option: one number, or one per layer separated by commas; inf, -inf and none are allowed.

    `none` (never replay) alone is inf; ">-4" is the next float32 above -4.

    Raises:
        UserError: a part is not a number.
    """
    values = [_threshold(part.strip().lower(), text) for part in text.split(",")]
    if len(values) > 1:
        return values
    return math.inf if values[0] is None else values[0]


def _threshold(part: str, whole: str) -> float | None:
    from fastcar_compile.config import parse_threshold

    if part == "none":
        return None
    with suppress(ValueError):
        return parse_threshold(part if part.startswith(">") else float(part))
    hint = "give a number, inf, -inf, '>' and a number, or one per layer, separated by commas ('none': never replay)"
    raise UserError(f"{part!r} is not a threshold", where=f"--threshold {whole}", hint=hint)


LayerHeads = list[int] | dict[int, float] | None
"""Query heads of one layer with equal weights, or each head with its own weight; None: all heads."""


def parse_heads(text: str) -> list[LayerHeads]:
    """Return the heads of one or, separated by "/", of every layer: "0,2", "3:1,1:-1" (with weights) or "all".

    Raises:
        UserError: a part has another form.
    """
    return [None if part.strip() == "all" else _layer_heads(part) for part in text.split("/")]


def _layer_heads(text: str) -> LayerHeads:
    try:
        if ":" not in text:
            return [int(word) for word in text.split(",")]
        return {int(head): float(weight) for head, weight in (word.split(":") for word in text.split(","))}
    except ValueError as error:
        hint = 'give heads as "0,2", heads with weights as "3:1,1:-1", or "all"; layers are separated by "/"'
        raise UserError(f"{text!r} is not a list of heads", where="--heads", hint=hint) from error


def arguments_of(function: Callable[..., Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a command that a function takes under the same names; the videos are read."""
    found = {name: given[name] for name in signature(function).parameters if name in given}
    return found | {"counted": parse_ids(given["counted"]), "videos": read_videos(given["videos"])}


def require_one(options: Mapping[str, object]) -> None:
    """Raise UserError where more than one of these options is given.

    Args:
        options: name -> value; None and False: the option is not given.

    Raises:
        UserError: two or more options are given.
    """
    given = [name for name, value in options.items() if value is not None and value is not False]
    if len(given) > 1:
        raise UserError(f"{' and '.join(given)} cannot be given together", hint="choose one of them")


def existing(path: Path, what: str) -> Path:
    """Return the path of a file or folder that exists.

    Args:
        what: name of the file or folder in an error.

    Raises:
        UserError: the path does not exist.
    """
    with os_errors(f"the {what} cannot be read", path, "correct the path"):
        if path.exists():
            return path
    raise UserError(f"the {what} does not exist", where=str(path), hint="correct the path")


def parse_prompt(text: str) -> Tokens:
    """Return token ids from "16" or "16, 3 4", int64 [P].

    Raises:
        UserError: the text holds something else than integers, or no integer.
    """
    with suppress(ValueError):
        if ids := [int(part) for part in text.replace(",", " ").split()]:
            return np.array(ids, np.int64)
    hint = 'give integers, for example "16" or "16,3"'
    raise UserError(f"the prompt {text!r} is not a list of token ids", hint=hint)


def parse_ids(text: str | None) -> tuple[int, int] | None:
    """Return the first token id and one past the last of "0:1000"; None for None.

    Raises:
        UserError: the text is not such a pair.
    """
    if text is None:
        return None
    first, _, end = (part.strip() for part in text.partition(":"))
    if not (first.isdecimal() and end.isdecimal() and int(first) < int(end)):
        hint = "give the first id and one past the last, for example 0:1000"
        raise UserError(f"{text!r} is not a range of token ids", where="--counted", hint=hint)
    return int(first), int(end)


def read_videos(path: Path) -> Tokens:
    """Return videos from a file, int64 [N, T]; see `read_tokens`."""
    return read_tokens(path, "video file", dims=(2,))


def read_tokens(path: Path, what: str, *, dims: Sequence[int]) -> Tokens:
    """Return token ids from a .npy, .npz or .safetensors file: its tensor "tokens", or its only tensor, int64.

    Args:
        what: name of the file in an error, for example "prompt file".
        dims: allowed numbers of dimensions: 1 for [P], 2 for [N, T].

    Raises:
        UserError: the file is missing or of another kind, it has several arrays and none is called "tokens", or the
            array does not hold integers of these dimensions.
    """
    arrays = _arrays(path, what)
    name = "tokens" if "tokens" in arrays or len(arrays) != 1 else next(iter(arrays))
    if name not in arrays:
        names = ", ".join(sorted(arrays)) or "no array"
        hint = "keep one array in the file, or name the right one 'tokens'"
        raise UserError(f"the {what} has no array 'tokens', only {names}", where=str(path), hint=hint)
    ids = arrays[name]
    if not np.issubdtype(ids.dtype, np.integer) or ids.ndim not in dims or not ids.size:
        forms = " or ".join({1: "[P]", 2: "[B, P]" if 1 in dims else "[N, T]"}[n] for n in dims)
        what = f"the {what} holds {ids.dtype} {list(ids.shape)}, expected integers {forms}"
        hint = "write token ids, the prompt included"
        raise UserError(what, where=str(path), hint=hint)
    return ids.astype(np.int64)


def read_context(path: Path, *, mask: bool) -> NDArray[Any]:
    """Return a context or its mask from a .npy, .npz or .safetensors file with one array.

    Raises:
        UserError: the file is missing or of another kind, or does not hold exactly one array.
    """
    what = "context mask file" if mask else "context file"
    arrays = list(_arrays(path, what).values())
    if len(arrays) != 1:
        raise UserError(f"the {what} holds {len(arrays)} arrays", where=str(path), hint="keep one array in the file")
    return arrays[0]


def _arrays(path: Path, what: str) -> Mapping[str, NDArray[Any]]:
    existing(path, what)
    if path.suffix in (".npy", ".npz"):
        hint = "write it again with numpy.save"
        return {name or "tokens": value for name, value in read_arrays(path, what, hint).items()}
    if path.suffix == ".safetensors":
        from safetensors import numpy as safetensors

        try:
            refuse_pipe(path)
            return cast("Any", safetensors).load_file(path)  # its members are typed in part
        except Exception as error:  # many kinds; all of them mean that the file is not what it should be
            hint = "write it again with numpy.save or safetensors"
            raise UserError(f"the {what} cannot be read: {error}", where=str(path), hint=hint) from error
    raise UserError(f"the {what} is neither .npy, .npz nor .safetensors", where=str(path), hint="convert the file")
