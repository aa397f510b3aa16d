"""Where a node comes from: source line, module path, and the text of both for messages."""

import keyword
import re
import sys
from pathlib import PurePath
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload

from fastcar_compile.errors import CompileError

# Names in a graph that come from a file. torch.fx writes them into Python source, which it compiles and runs.


_PATH = re.compile(r"[\w.\-+:/@ \[\]]{1,1000}")
"""Path of a tensor: fx writes the parts of the path as attributes, or between double quotes."""


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
    # An operator with such an argument would read or write that file.
    return None if any(argument.name == "filename" for argument in found._schema.arguments) else found


ORIGIN_KEYS = ("nn_module_stack", "stack_trace", "source", "module")
"""Metadata that says where a node comes from: torch.export writes the first two, a graph file the last two."""


def source_of(node: fx.Node) -> str:
    """Return `file:line` of the innermost frame outside torch, without machine-specific folders; "" if unknown."""
    if node.meta.get("source"):
        return _text(node.meta["source"])
    # The innermost frame comes last in a stack trace.
    for line in reversed(str(node.meta.get("stack_trace") or "").splitlines()):
        text = line.strip()
        if text.startswith('File "'):
            path, _, rest = text[6:].partition('", line ')
            if "/torch/" in path:
                continue
            return _text(f"{importable_path(path)}:{rest.split(',')[0]}")
    return ""


def _text(found: object) -> str:
    """Return a text that UTF-8 can write: the name of a file, or of a module, may have halves of pairs in it."""
    return str(found).encode("utf-8", "backslashreplace").decode("utf-8")


def importable_path(path: str) -> str:
    """Return the path as `import` sees it, below the longest entry of sys.path; else its last two parts."""
    roots = [entry for entry in sys.path if entry and path.startswith(entry.rstrip("/") + "/")]
    if roots:
        return path[len(max(roots, key=len).rstrip("/")) + 1 :]
    return "/".join(PurePath(path).parts[-2:])


def module_path_of(node: fx.Node) -> str:
    """Return the dotted path of the innermost nn.Module that made this node; "" if unknown."""
    if node.meta.get("module"):
        return _text(node.meta["module"])
    # torch.export lists the modules around a node from the outside in.
    stack: dict[str, tuple[str, Any]] = node.meta.get("nn_module_stack") or {}
    return _text(list(stack.values())[-1][0]) if stack else ""


def where(node: fx.Node) -> str:
    """Return module path, source line and node name, for error texts."""
    parts = [p for p in (module_path_of(node), source_of(node), f"node {node.name}") if p]
    return ", ".join(parts)


def error_at(node: fx.Node, what: str, hint: str) -> CompileError:
    """Return the error of a node, with its place in the model."""
    return CompileError(what, where=where(node), hint=hint)
