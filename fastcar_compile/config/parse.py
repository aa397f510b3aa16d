"""Parsers of thresholds, query heads and gate weights, as a caller may write them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from numbers import Real
from pathlib import Path
from typing import Annotated, Any, cast

from pydantic import BeforeValidator, PlainSerializer

from fastcar_compile.errors import InputError
from fastcar_compile.gates import GateWeights
from fastcar_compile.gates.weights import DIGEST
from fastcar_compile.support.values import number, shown

Heads = tuple[tuple[int, float], ...]
"""(query head, weight) pairs."""


def parse_threshold(value: object) -> float:
    """Return a threshold; JSON writes infinity as "inf" and "-inf".

    Raises:
        ValueError: the value is a boolean, a different string, or NaN.
    """
    if isinstance(value, str) and value.strip().lower() in ("inf", "+inf", "-inf"):
        return float(value)
    try:
        return number("a threshold", value)
    except InputError as error:
        what = "a threshold cannot be NaN" if error.what.endswith("NaN") else None
        raise ValueError(what or f"a threshold is a number, 'inf' or '-inf', not {shown(value)}") from error


def _dump_threshold(value: float) -> float | str:
    """Return a threshold for JSON, which has no infinity."""
    return value if math.isfinite(value) else str(value)


def parse_heads(value: object) -> Heads | None:
    """Return one layer's heads from None, {head: weight}, [head, …] (equal weights) or [(head, weight), …].

    Raises:
        ValueError: the value has a different form, names a head twice, or has a weight that is not finite.
    """
    if value is None:
        return None
    pairs = [_pair(item) for item in _head_items(value)]
    if not pairs or len({head for head, _ in pairs}) != len(pairs):
        raise ValueError(f"heads are one or more query heads, each named once, not {value!r}")
    return tuple(pairs)


def _head_items(value: object) -> list[object]:
    if isinstance(value, Mapping):
        return list[object](sorted(cast("Mapping[Any, Any]", value).items()))
    if not isinstance(value, (list, tuple)):
        raise ValueError(f"heads are a list of query heads or a mapping head -> weight, not {value!r}")
    items = cast("Sequence[object]", value)
    return [(item, 1 / len(items)) if isinstance(item, int) else item for item in items]


def _pair(item: object) -> tuple[int, float]:
    match item:
        case (int() as head, Real() as weight) if not isinstance(head, bool) and _is_finite(weight):
            return head, float(weight)
        case _:
            raise ValueError(f"{item!r} is not a query head with a finite weight")


def _is_finite(value: Real) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number that no float can be
        return False


def parse_layers_of_heads(value: object) -> tuple[Heads | None, ...] | None:
    """Return one entry for all layers, or one per layer; None: all heads everywhere.

    Raises:
        ValueError: an entry is not valid.
    """
    if value is None:
        return None
    if isinstance(value, Mapping):
        return (parse_heads(cast("Mapping[Any, Any]", value)),)
    if not isinstance(value, (list, tuple)):
        raise ValueError(f"heads are a list of query heads or a mapping head -> weight, not {value!r}")
    items = cast("Sequence[object]", value)
    return (parse_heads(items),) if all(type(item) is int for item in items) else tuple(map(parse_heads, items))


def parse_thresholds(value: object) -> float | tuple[float | None, ...] | None:
    """Return one threshold, or one per layer. It parses here, so that an error speaks of thresholds, not of a union.

    Raises:
        ValueError: a threshold is not valid.
    """
    if value is None:
        return None
    if isinstance(value, (list, tuple)) or len(getattr(value, "shape", ())) == 1:
        items = cast("Sequence[object]", value)
        return tuple(None if item is None else parse_threshold(item) for item in items)
    return parse_threshold(value)


def _parse_weights(value: object) -> GateWeights | None:
    """Return weights from themselves, from their file, or from the digest that stands for them in JSON."""
    if value is None or isinstance(value, GateWeights):
        return value
    if isinstance(value, str) and DIGEST.fullmatch(value):
        return GateWeights(value.removeprefix("sha256:"))
    if not isinstance(value, str | Path):
        raise ValueError(f"gate weights are a safetensors file, not {value!r}")
    return GateWeights.load(value)


def _dump_weights(value: GateWeights | None) -> str | None:
    return None if value is None else value.name


Threshold = Annotated[float, BeforeValidator(parse_threshold), PlainSerializer(_dump_threshold, when_used="json")]
Weights = Annotated[Any, BeforeValidator(_parse_weights), PlainSerializer(_dump_weights, when_used="json")]
"""A GateWeights or None; pydantic knows it as Any, because a GateWeights is not a model."""
