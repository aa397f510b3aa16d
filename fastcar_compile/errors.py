"""Error types: a caller can fix a user error, an internal error is a defect of this package.

| type | what is wrong | exit code |
|---|---|---|
| UserError | the call, the model or a file; base of the next six | 2 |
| CompileError | the model cannot be compiled as asked | 2 |
| InputError | a tensor, a token or an option given at run time | 2 |
| TargetError | the target is unknown, or its file is malformed | 2 |
| ArtifactError | the artifact is missing, damaged, or of another schema version | 2 |
| SignatureError | an ArtifactError: the signature or the digest is not the required one | 2 |
| BackendError | the backend cannot run here: a tool, device or package is missing | 2 |
| InternalError | an invariant of the compiler does not hold | 3 |
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from pydantic import ValidationError

T = TypeVar("T")


NOT_THE_MODELS = (TimeoutError, MemoryError)
"""What ends a run of the model's code and is no fault of it: a caller's alarm, no more memory."""


class FastcarError(Exception):
    """Base of every error that fastcar_compile raises on purpose."""

    def to_json(self) -> dict[str, object]:
        """Return the error as JSON fields: its type and its message."""
        return {"type": type(self).__name__, "message": str(self)}


class UserError(FastcarError):
    """Something in the call, the model or the files is wrong; the text says what, where and how to fix it.

    Args:
        what: one sentence: what is wrong.
        where: module path, source line, graph node or file, if known.
        hint: what the user can do about it.

    Attributes:
        problems: the single errors of an error that lists several errors; else empty.
    """

    problems: tuple[UserError, ...] = ()

    def __init__(self, what: str, *, where: str = "", hint: str = "") -> None:
        self.what, self.where, self.hint = what, where, hint
        lines = [what]
        if where:
            lines.append("  where: " + where.replace("\n", "\\n"))  # a path may have a newline in it
        if hint:
            lines.append(f"  hint:  {hint}")
        super().__init__("\n".join(lines))

    def to_json(self) -> dict[str, object]:
        """Return the error as JSON fields: type, message, where, hint, and problems where it lists several errors."""
        fields: dict[str, object] = {"type": type(self).__name__, "message": self.what}
        fields |= {"where": self.where, "hint": self.hint}
        if self.problems:
            fields["message"] = f"{len(self.problems)} problems were found"
            fields["problems"] = [problem.to_json() for problem in self.problems]
        return fields


class CompileError(UserError):
    """The model cannot be compiled as asked."""

    @classmethod
    def collect(cls, problems: Sequence[UserError]) -> CompileError:
        """Return one error that lists every problem found, so that a user can fix them in one round."""
        single = tuple(each for problem in problems for each in problem.problems or (problem,))
        if len(single) == 1:
            return cls(single[0].what, where=single[0].where, hint=single[0].hint)
        body = "\n".join(f"[{i}] {p}" for i, p in enumerate(single, 1))
        error = cls(f"{len(single)} problems were found:\n{body}")
        error.problems = single
        return error

    @classmethod
    def raise_all(cls, problems: Sequence[UserError]) -> None:
        """Raise one error that lists every problem; without a problem, do nothing."""
        if problems:
            raise cls.collect(problems)


def attempt(problems: list[CompileError], step: Callable[[], T]) -> T | None:
    """Return the result of `step`; a CompileError joins the problems instead."""
    try:
        return step()
    except CompileError as error:
        problems.append(error)
        return None


class InputError(UserError):
    """A tensor, a token or an option given at run time is not acceptable."""


class TargetError(UserError):
    """The target is unknown or its file is malformed."""


class ArtifactError(UserError):
    """The artifact is missing, damaged, or of another schema version."""


class SignatureError(ArtifactError):
    """The artifact's signature or digest is not the required one."""


class BackendError(UserError):
    """The backend cannot run here (missing tool, device or package)."""


@contextmanager
def os_errors(what: str, path: str | Path, hint: str = "") -> Generator[None]:
    """Raise a UserError that names the path where the operating system refuses an operation of the block.

    Args:
        what: the subject of the error, for example "the trace cannot be written".

    Raises:
        UserError: an OSError, or a path that no file can have.
    """
    hint = hint or "choose another place, or correct its permissions"
    try:
        yield
    except OSError as error:
        raise UserError(f"{what}: {error.strerror or error}", where=str(path), hint=hint) from error
    except ValueError as error:
        is_unwritable = isinstance(error, UnicodeEncodeError) and error.object == str(path)
        if "null" not in str(error) and not is_unwritable:
            raise
        text = "is not UTF-8" if is_unwritable else "has a NUL in it"
        raise UserError(f"{what}: the name {text}", where=ascii(str(path)), hint=hint) from error


class InternalError(FastcarError):
    """A defect of fastcar_compile: an invariant of the compiler does not hold."""


def shown(value: Any) -> str:
    """Return a value as an error repeats it: short, and without the values of an array."""
    if isinstance(value, bool | float | str | bytes | None):
        return f"{value!r:.80}"
    if isinstance(value, int):
        return str(value) if abs(value) < 10**18 else "a number of many digits"
    return f"a {type(value).__name__}"


def names_text(known: Iterable[str], given: object = None) -> str:
    """Return the known names for a hint, and which of them is spelt like the given one."""
    from difflib import get_close_matches

    names = list(known)
    near = get_close_matches(given.lower(), names, 1) if isinstance(given, str) else []
    return ", ".join(names) + (f"; did you mean {near[0]!r}?" if near else "")


def count_text(number: int, what: str) -> str:
    """Return a number with its noun, for example `1 row` or `2 rows`."""
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def size_text(count: int) -> str:
    """Return a number of bytes as a person reads it, for example `5.3 MB`; page.bytes of core.js does so too."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= factor:
            return f"{count / factor:.1f} {unit}"
    return f"{count} B"


LISTED = 50
"""Refused fields that an error names; it counts the further fields. A damaged file may have a fault in every value."""


def describe_validation(error: ValidationError, known: Iterable[str] = ()) -> str:
    """Return what pydantic refused, `field.path: reason` of each field; after `LISTED`, how many more.

    Args:
        known: the fields that there are, for one that there is not.
    """
    lines: list[str] = []
    items = error.errors(include_url=False)
    for item in items[:LISTED]:
        field = f"{'.'.join(str(part) for part in item['loc']) or '(whole)':.160}"
        message = item["msg"].removeprefix("Value error, ")
        given = "" if item["type"] in ("missing", "value_error") else f" (given: {shown(item['input'])})"
        extra = item["type"] == "extra_forbidden"
        names = [*known] if extra else re.findall("'([^']+)'", item.get("ctx", {}).get("expected", ""))
        guess = names_text(names, item["loc"][-1] if extra else item["input"]).removeprefix(", ".join(names))
        lines.append(f"{field}: {message}{given}{guess}")
    return "; ".join(lines + [f"and {len(items) - LISTED} more"] * (len(items) > LISTED))
