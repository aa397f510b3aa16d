"""What all configurations share: frozen fields, JSON, and errors that name every bad field."""

from __future__ import annotations

from typing import Any, NoReturn, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from fastcar_compile.errors import CompileError, InputError, describe_validation
from fastcar_compile.values import plain


def _raise_compile_error(name: str, error: ValidationError) -> NoReturn:
    lines = describe_validation(error)
    hint = f"correct the field{'s' if len(lines) > 1 else ''} named"
    raise CompileError(f"{name} is not valid: {'; '.join(lines)}", hint=hint) from error


class Config(BaseModel):
    """Frozen, without unknown fields. A refused value raises CompileError, which names every field at fault."""

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=False)

    def __init__(self, **data: Any) -> None:
        try:
            super().__init__(**{name: plain(value) for name, value in data.items()})
        except InputError as error:
            raise CompileError(f"{type(self).__name__} is not valid: {error.what}", hint=error.hint) from error
        except ValidationError as error:
            _raise_compile_error(type(self).__name__, error)

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-safe dict; infinite thresholds are the strings "inf" and "-inf"."""
        return self.model_dump(mode="json")

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Self:
        """Return the configuration that `to_json` wrote.

        Raises:
            CompileError: a field is not valid.
        """
        return cls(**data)
