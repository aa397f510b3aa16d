"""Two graphs, matched by structure: names do not count.

Layers are paired by number, and the nodes of a pair by the longest common runs of operators. A pair of nodes whose
operands are not pairs of each other is rewired.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

from fastcar_compile.comparison.fields import without_numbers
from fastcar_compile.comparison.report import GraphComparison, NodeChange, NodeKind

Json = Mapping[str, Any]


@dataclass(frozen=True)
class _Node:
    """A node of a graph or of a branch. key: branch and name. operands: the nodes among its arguments, as keys."""

    key: tuple[str, str]
    label: str
    type: str
    constants: str
    operands: tuple[tuple[str, str], ...]
    layer: int | None
    entry: Json

    def change(self, kind: NodeKind, detail: str) -> NodeChange:
        """This node as a change."""
        return NodeChange(
            kind=kind,
            target=self.label,
            detail=detail,
            module=without_numbers(self.entry.get("module", "")),
            source=self.entry.get("source", ""),
            made_by=self.entry.get("made_by", ""),
            layers=() if self.layer is None else (self.layer,),
            names=("/".join(filter(None, self.key)),),
        )


def compare_graphs(name: str, a: Json | None, b: Json | None) -> GraphComparison | None:
    """Return how graph b differs from graph a, both of a graph file; None: they are equal."""
    left, right = (list(_nodes(graph)) if graph else [] for graph in (a, b))
    pairs = dict[tuple[str, str], tuple[str, str]]()
    matched: list[tuple[_Node, _Node]] = []
    changes: list[NodeChange] = []
    for layer in dict.fromkeys(node.layer for node in [*left, *right]):
        ours, theirs = ([n for n in nodes if n.layer == layer] for nodes in (left, right))
        matcher = difflib.SequenceMatcher(None, [n.label for n in ours], [n.label for n in theirs], autojunk=False)
        for tag, a0, a1, b0, b1 in matcher.get_opcodes():
            if tag == "equal":
                matched += zip(ours[a0:a1], theirs[b0:b1], strict=True)
                continue
            changes += [node.change("removed", node.type) for node in ours[a0:a1]]
            changes += [node.change("inserted", node.type) for node in theirs[b0:b1]]
    pairs |= {one.key: other.key for one, other in matched}
    found = [change for pair in matched if (change := _pair_change(*pair, pairs))]
    changes = _folded([*changes, *found])
    if not changes:
        return None
    sizes = (len(left), len(right))
    return GraphComparison(name=name, nodes=sizes, matched=len(matched) - len(found), changes=tuple(changes))


def _pair_change(a: _Node, b: _Node, pairs: Mapping[tuple[str, str], tuple[str, str]]) -> NodeChange | None:
    if a.type != b.type:
        return b.change("changed", f"{a.type} -> {b.type}")
    if a.constants != b.constants:
        return b.change("changed", f"{a.constants} -> {b.constants}")
    if [pairs.get(key) for key in a.operands] != list(b.operands):
        return b.change("rewired", f"{_operands(a)} -> {_operands(b)}")
    return None


def _operands(node: _Node) -> str:
    return "(" + ", ".join(without_numbers(name) for _, name in node.operands) + ")"


def _folded(changes: list[NodeChange]) -> list[NodeChange]:
    """Equal changes of several layers as one, in the order of the first."""
    groups: dict[tuple[str, ...], list[NodeChange]] = {}
    for change in changes:
        same = (change.kind, change.target, change.detail, change.module, change.source, change.made_by)
        groups.setdefault(same, []).append(change)
    return [
        found[0].model_copy(
            update={
                "layers": tuple(sorted({layer for change in found for layer in change.layers})),
                "names": tuple(name for change in found for name in change.names),
            }
        )
        for found in groups.values()
    ]


def _nodes(graph: Json, branch: str = "", layer: int | None = None) -> Iterator[_Node]:
    """The nodes of a graph and, where a `cond` names them, of its branches."""
    for entry in graph["nodes"]:
        place = entry.get("layer", layer)
        yield _node(entry, branch, place)
        inner = graph["branches"].get(entry["target"]) if entry["op"] == "get_attr" else None
        if inner is not None:
            yield from _nodes(inner, "/".join(filter(None, (branch, entry["target"]))), place)


def _node(entry: Json, branch: str, layer: int | None) -> _Node:
    operands: list[tuple[str, str]] = []
    arguments = [*entry.get("args", []), *entry.get("kwargs", {}).items()]
    constants = _constants(arguments, operands, branch)
    label = entry["target"] if entry["op"] == "call_function" else f"{entry['op']} {without_numbers(entry['target'])}"
    if entry["op"] == "output":
        label = "output"
    return _Node((branch, entry["name"]), label, _type(entry.get("type")), constants, tuple(operands), layer, entry)


def _constants(value: Any, operands: list[tuple[str, str]], branch: str) -> str:
    """The arguments as text, with "_" for every node; the nodes go to `operands`."""
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_constants(item, operands, branch) for item in cast("list[Any]", value)) + "]"
    if not isinstance(value, dict):
        return str(value)
    ((kind, text),) = cast("dict[str, str]", value).items()
    if kind == "node":
        operands.append((branch, text))
        return "_"
    return f"{float.fromhex(text):.9g}" if kind == "float" else text


def _type(value: Any) -> str:
    """A type of a graph file as text, such as "float32[1, 4, 32]"."""
    if value is None:
        return ""
    kind, content = value
    if kind in ("list", "tuple"):
        return "(" + ", ".join(map(_type, content)) + ")"
    return f"{kind.removeprefix('torch.')}{content}"
