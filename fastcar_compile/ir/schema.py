"""Arguments of a graph's calls by the names of their operators' schemas."""

from __future__ import annotations

from typing import Any

from torch import fx

from fastcar_compile.errors import InternalError


def _declared(operator: object) -> list[Any]:
    """Return the arguments that an operator declares, or raise InternalError where it declares none."""
    schema = getattr(operator, "_schema", None)
    if schema is None:
        raise InternalError(f"{operator} has no schema")
    return list(schema.arguments)


def bound(node: fx.Node) -> dict[str, Any]:
    """Return the arguments of a call by name. An argument that the call leaves out has the schema's default.

    Raises:
        InternalError: the node calls something that has no schema.
    """
    declared = _declared(node.target)
    defaults = {str(a.name): a.default_value for a in declared if a.has_default_value()}
    given = zip((str(a.name) for a in declared), node.args, strict=False)
    return {**defaults, **dict(given), **node.kwargs}


def index_of(operator: object, name: str) -> int:
    """Return the position of an argument in the operator's schema."""
    return [str(a.name) for a in _declared(operator)].index(name)
