"""Error types. A user error can be fixed by the caller; an internal error is a defect of this package."""

from __future__ import annotations

from collections.abc import Sequence


class FastcarError(Exception):
    """Base of every error that fastcar_compile raises on purpose."""


class UserError(FastcarError):
    """Something in the call, the model or the files is wrong; the text says what, where and how to fix it.

    Args:
        what: one sentence: what is wrong.
        where: module path, source line, graph node or file, if known.
        hint: what the user can do about it.
    """

    def __init__(self, what: str, *, where: str = "", hint: str = "") -> None:
        self.what, self.where, self.hint = what, where, hint
        lines = [what]
        if where:
            lines.append(f"  where: {where}")
        if hint:
            lines.append(f"  hint:  {hint}")
        super().__init__("\n".join(lines))


class CompileError(UserError):
    """The model cannot be compiled as asked."""

    @classmethod
    def collect(cls, problems: Sequence[UserError]) -> CompileError:
        """One error that lists every problem found, so that a user can fix them in one round."""
        if len(problems) == 1:
            return cls(problems[0].what, where=problems[0].where, hint=problems[0].hint)
        body = "\n".join(f"[{i}] {p}" for i, p in enumerate(problems, 1))
        return cls(f"{len(problems)} problems were found:\n{body}")


class InputError(UserError):
    """A tensor, a token or an option given at run time is not acceptable."""


class TargetError(UserError):
    """The target is unknown or its file is malformed."""


class ArtifactError(UserError):
    """The artifact is missing, damaged, or of another schema version."""


class BackendError(UserError):
    """The backend cannot run here (missing tool, device or package)."""


class InternalError(FastcarError):
    """A defect of fastcar_compile: an invariant of the compiler does not hold."""
