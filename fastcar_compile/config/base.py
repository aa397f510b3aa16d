"""What all configurations share: frozen fields, JSON, and errors that name every bad field."""

from __future__ import annotations

from typing import Any, Self

from pydantic import BaseModel, ConfigDict

from fastcar_compile.checked import checked
from fastcar_compile.errors import CompileError


@checked(CompileError)
class Config(BaseModel):
    """Frozen, without unknown fields. A refused value raises CompileError, which names every field at fault."""

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=False)

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
