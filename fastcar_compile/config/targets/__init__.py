"""The boards and CPUs that artifacts are compiled for: one TOML file each, data only, and its typed reader."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from fastcar_compile.config import CompileConfig
from fastcar_compile.config.formats import quant_format
from fastcar_compile.config.targets.model import Fabric, Host, Memory, Power, Target, Utilisation
from fastcar_compile.errors import CompileError, TargetError, count_text, describe_validation
from fastcar_compile.support import limits

__all__ = [
    "Fabric",
    "Host",
    "Memory",
    "Power",
    "Target",
    "Utilisation",
    "available_targets",
    "has_accelerator",
    "load_target",
    "require_buildable",
    "whole_step",
]

_HINT = "compare with the files in fastcar_compile/config/targets/"
_FOLDER = Path(__file__).parent


def available_targets() -> tuple[str, ...]:
    """Return the names of the targets that ship with the package, sorted."""
    return tuple(sorted(path.stem for path in _FOLDER.glob("*.toml")))


def load_target(target: str | Path | Target) -> Target:
    """Return the target of a name or of a .toml file. A `Target` is returned unchanged.

    Raises:
        TargetError: the name or the file is unknown, or the file is malformed (every bad field is listed).
    """
    match target:
        case Target():
            return target
        case Path():
            return _read_file(target)
        case str() if target.endswith(".toml") or "/" in target:
            return _read_file(Path(target))
        case str() if target in available_targets():
            return _read_file(_FOLDER / f"{target}.toml")
        case str():
            raise _unknown(target)
        case _:
            kinds = "a name, a path to a .toml file or a fastcar_compile.Target"
            hint = f"use one of: {', '.join(available_targets())}"
            raise TargetError(f"a target is {kinds}, not {type(target).__name__}", hint=hint)


def require_buildable(target: Target) -> None:
    """Raise TargetError for a target that serves estimates only."""
    if target.estimate_only is None:
        return
    builds = [name for name in available_targets() if load_target(name).estimate_only is None]
    what = f"no artifact can be built for {target.name}, which serves estimates only: {target.estimate_only}"
    raise TargetError(what, hint=f"use `fastcar estimate`, or compile for one of: {', '.join(builds)}")


def has_accelerator(config: CompileConfig, board: Target) -> bool:
    """Return whether kernels are emitted: the target has a fabric, and the arithmetic is int8."""
    return board.kind == "fpga" and quant_format(config.quant).accelerated


def whole_step(board: Target, options: Mapping[str, Any]) -> CompileConfig | None:
    """Return the options with offload "all"; None: the target has no such accelerator, or the options exclude it.

    `compile` tries these options, and `estimate` predicts them, where the caller gives no `offload`.
    """
    try:
        config = CompileConfig(target=board.name, **options, offload="all")
    except CompileError:
        return None
    return config if has_accelerator(config, board) else None


def _unknown(name: str) -> TargetError:
    names = available_targets()
    near = difflib.get_close_matches(name.lower(), names, n=1, cutoff=0.5)
    hint = (f"did you mean {near[0]!r}? " if near else "") + f"available: {', '.join(names)}"
    own = "your own board is a path to a .toml file like the shipped files"
    return TargetError(f"unknown target {name!r}", hint=f"{hint}; {own}")


def _read_file(path: Path) -> Target:
    try:
        with path.open("rb") as file:
            content = file.read(limits.TOML_BYTES + 1)
        if len(content) > limits.TOML_BYTES:
            raise TargetError(f"the target file has more than {limits.TOML_BYTES} bytes", where=str(path), hint=_HINT)
        data = tomllib.loads(content.decode("utf-8"))
    except FileNotFoundError:
        raise TargetError("the target file does not exist", where=str(path), hint="correct the path") from None
    except OSError as error:
        what = f"the target file cannot be read: {error.strerror or error}"
        raise TargetError(what, where=str(path), hint="correct the path") from error
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise TargetError(f"the target file is not valid TOML: {error}", where=str(path), hint=_HINT) from error
    except ValueError as error:  # no UTF-8, a path with a NUL, or a number of too many digits
        raise TargetError(f"the target file cannot be read: {error}", where=repr(str(path)), hint=_HINT) from error
    try:
        return Target.model_validate(data)
    except ValidationError as error:
        lines = describe_validation(error)
        what = f"the target file has {count_text(len(lines), 'bad field')}: {'; '.join(lines)}"
        raise TargetError(what, where=str(path), hint=_HINT) from error
