"""What every part of a manifest is: frozen, typed, without unknown fields."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, cast

from pydantic import BaseModel, BeforeValidator, ConfigDict, PlainSerializer, model_validator


def _parse_float(value: Any) -> Any:
    return float(value) if value in ("inf", "-inf") else value


def _dump_float(value: float) -> float | str:
    return str(value) if value in (float("inf"), -float("inf")) else value


Float = Annotated[float, BeforeValidator(_parse_float), PlainSerializer(_dump_float, when_used="json")]
"""A float that JSON holds also where it is infinite, as "inf" or "-inf"."""


class Part(BaseModel):
    """Something inside a section."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Section(Part):
    """A part of the manifest with a version of its own. A change of a section's fields raises `VERSION`."""

    VERSION: ClassVar[int] = 1
    version: int = 0

    @model_validator(mode="before")
    @classmethod
    def _has_this_version(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        fields = cast("dict[str, Any]", data)
        found = fields.get("version", cls.VERSION)
        if found != cls.VERSION:
            raise ValueError(f"version {found}; this fastcar_compile reads version {cls.VERSION}")
        return {**fields, "version": found}
