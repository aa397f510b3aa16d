"""Public models and dataclasses: a refused value is a user error instead of pydantic's own."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from inspect import signature
from typing import Any, TypeVar

from pydantic import ValidationError

from fastcar_compile.errors import LISTED, InputError, UserError, describe_validation
from fastcar_compile.values import plain

T = TypeVar("T")

_ONE = "correct the field named"


def checked(error: type[UserError] = InputError, hint: str = "") -> Callable[[type[T]], type[T]]:
    """Return a decorator for a pydantic model or dataclass: constructing it, or a subclass, raises `error`.

    The error names every field at fault. Scalars of numpy and torch are taken as numbers. Validation of a model inside
    another one, and `model_validate`, still raise pydantic's error, so that a reader of files collects all fields.
    """

    def decorate(cls: type[T]) -> type[T]:
        construct: Callable[..., None] = cls.__init__
        takes = signature(construct)

        # `wraps` also copies the mark by which pydantic knows its own __init__: validation of subclasses does not call
        # this one.
        @wraps(construct)
        def construct_or_refuse(self: Any, /, *values: Any, **fields: Any) -> None:
            name = type(self).__name__
            try:
                takes.bind(self, *values, **fields)
            except TypeError as refused:
                raise error(f"{name} is not valid: {refused}", where=name, hint=hint or _ONE) from refused
            try:
                construct(self, *map(plain, values), **{field: plain(value) for field, value in fields.items()})
            except ValidationError as refused:
                raise _refusal(name, refused, error, hint) from refused
            except InputError as refused:
                raise error(f"{name} is not valid: {refused.what}", where=name, hint=refused.hint) from refused

        type.__setattr__(cls, "__init__", construct_or_refuse)
        return cls

    return decorate


def _refusal(name: str, refused: ValidationError, error: type[UserError], hint: str) -> UserError:
    named = refused.errors(include_url=False)[:LISTED]
    fields = {".".join([name, *map(str, item["loc"])]): None for item in named}
    text = "; ".join(describe_validation(refused))
    default = _ONE if len(fields) == 1 else "correct the fields named"
    return error(f"{name} is not valid: {text}", where=", ".join(fields), hint=hint or default)
