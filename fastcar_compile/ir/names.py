"""Names in a graph that come from a file. torch.fx writes them into Python source, which it compiles and runs."""

from __future__ import annotations

import keyword
import re
from typing import Any

import torch
from torch._ops import OpOverload

_PATH = re.compile(r"[\w.\-+:/@ \[\]]{1,1000}")
"""Of a tensor: fx writes the parts of the path as attributes, or between double quotes."""


def is_identifier(name: object) -> bool:
    """Return whether fx may write the name as that of a value or of an argument."""
    return isinstance(name, str) and name.isascii() and name.isidentifier() and not keyword.iskeyword(name)


def is_path(name: object) -> bool:
    """Return whether fx may write the name as the path of a tensor."""
    return isinstance(name, str) and _PATH.fullmatch(name) is not None


def operator_named(namespace: str, packet: str, overload: str) -> Any:
    """Return a registered operator that computes and does nothing else; None: there is none of the name."""
    found: Any = getattr(getattr(getattr(torch.ops, namespace), packet, None), overload, None)
    # Packets, Python functions and higher-order operators are of other types, and refused.
    kind: type = OpOverload
    if not isinstance(found, kind):
        return None
    return None if "filename" in _arguments(found) else found  # it would read or write that file


def _arguments(operator: Any) -> set[str]:
    return {argument.name for argument in operator._schema.arguments}
