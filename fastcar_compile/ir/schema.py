"""Arguments of a graph's calls by the names of their operators' schemas."""

from __future__ import annotations

from torch import fx
from torch._ops import OpOverload
from torch.fx.node import Argument

from fastcar_compile.errors import InternalError


def schema_of(node: fx.Node) -> OpOverload:
    """Return the operator that the node calls.

    Raises:
        InternalError: the node calls something that has no schema.
    """
    if not isinstance(node.target, OpOverload):
        raise InternalError(f"{node.name} calls {node.target}, which has no schema")
    return node.target


def bound(node: fx.Node) -> dict[str, Argument]:
    """Return the arguments of a call by name. An argument that the call leaves out has the schema's default."""
    declared = schema_of(node)._schema.arguments
    defaults = {a.name: a.default_value for a in declared if a.has_default_value()}
    given = zip((a.name for a in declared), node.args, strict=False)
    return {**defaults, **dict(given), **node.kwargs}


def index_of(operator: OpOverload, name: str) -> int:
    """Return the position of an argument in the operator's schema."""
    return [a.name for a in operator._schema.arguments].index(name)
