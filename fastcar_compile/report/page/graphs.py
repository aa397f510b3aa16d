"""The data of the inspection page: lines of tables as dicts, and the two graphs of an artifact, group by group."""

import hashlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal, cast

from pydantic import BaseModel, ConfigDict

Change = Literal["kept", "added", "removed", "replaced"]
Json = dict[str, Any]


def given(**fields: Any) -> Json:
    """Return the fields that say something: the page takes what is missing for empty."""
    return {name: value for name, value in fields.items() if value is not None and value != ""}


def facts_of(lines: Mapping[str, object], group: str = "") -> list[Json]:
    """Return the lines of a table of two columns: label -> value. group: heading that they belong to."""
    return [given(label=label, value=str(value), group=group) for label, value in lines.items()]


class PagePart(BaseModel):
    """The base of the parts of a graph."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class PageNode(PagePart):
    """One node of a graph.

    Args:
        id: name of the node; inside of a branch, `branch/name`.
        op: operator, or the value that a placeholder stands for.
        type: dtype and shape. args: arguments that are not nodes.
        inputs: ids of the nodes that the node reads. weights: ids of the parameters that the node reads.
        branches: names of the branches of a `cond`.
        source: file and line in the model. made_by: the pass that made the node; "": the model has it.
        reason: key of the page's reasons.
        change: difference from the other graph. twin: id of the other graph's node that this node equals, replaces or
            is replaced by.
        layer: number of the layer; None outside of the layers. branch: name; "" outside of branches.
    """

    id: str
    kind: Literal["input", "state", "weight", "op", "cond"]
    op: str
    type: str
    args: str = ""
    inputs: tuple[str, ...] = ()
    weights: tuple[str, ...] = ()
    branches: tuple[str, ...] = ()
    source: str = ""
    module: str = ""
    made_by: str = ""
    reason: str = ""
    role: str = ""
    change: Change = "kept"
    twin: str = ""
    layer: int | None = None
    branch: str = ""


class PageGroup(PagePart):
    """Nodes that unfold together, in the order of the graph.

    Args:
        layer: number of the layer; None in front of the layers and behind them. key: text that layers of equal
            structure share, in both graphs.
    """

    title: str
    layer: int | None
    key: str
    nodes: tuple[str, ...]


class PageGraph(PagePart):
    """A decode step, or a chunk of a prompt. outputs: name of each result -> id of its node."""

    nodes: tuple[PageNode, ...]
    groups: tuple[PageGroup, ...]
    outputs: dict[str, str]


def page_graphs(before: Json, after: Json) -> tuple[PageGraph, PageGraph]:
    """Return the decode steps of two graph files (`graph/before.json`, `graph/after.json`)."""
    return _pages(before, after, "decode", "outputs")


def prefill_graphs(before: Json, after: Json) -> tuple[PageGraph, PageGraph] | None:
    """Return the graphs of a chunk of the prompt; None: the prompt is read token by token."""
    if before.get("prefill") is None or after.get("prefill") is None:
        return None
    return _pages(before, after, "prefill", "prefill_outputs")


def _pages(before: Json, after: Json, part: str, results: str) -> tuple[PageGraph, PageGraph]:
    pages = _compare(*(_GraphReader(data, part).nodes() for data in (before, after)))
    keys = _layer_keys(*pages)
    first, second = (
        PageGraph(nodes=tuple(nodes), groups=_groups(nodes, keys), outputs=_outputs(data[part], data[results]))
        for data, nodes in zip((before, after), pages, strict=True)
    )
    return first, second


class _GraphReader:
    """Reads the nodes of a graph; branches stand behind their `cond`, and read the nodes that it was given."""

    def __init__(self, data: Json, part: str) -> None:
        self.graph = cast("Json", data[part])
        self.states = {str(state["name"]) for state in data["state"]}
        self.found: list[PageNode] = []
        self.weights: set[str] = set()

    def nodes(self) -> list[PageNode]:
        """Return every node but the output and the graphs of branches."""
        self._graph(self.graph, "", {})
        return self.found

    def _graph(self, graph: Json, branch: str, outer: Mapping[str, str]) -> None:
        """Read one graph. outer: name of a branch's placeholder -> id of the node that it stands for."""
        ids = dict(outer)
        for entry in graph["nodes"]:
            name, op = str(entry["name"]), str(entry["op"])
            if op == "output" or name in outer or (op == "get_attr" and entry["target"] in graph["branches"]):
                continue
            ids[name] = f"{branch}/{name}" if branch else name
            node = self._node(entry, ids, branch)
            self.found.append(node)
            if node.kind == "weight":
                self.weights.add(node.id)
            elif node.kind == "cond":
                self._branches(graph, entry, ids)

    def _branches(self, graph: Json, entry: Json, ids: Mapping[str, str]) -> None:
        operands = [ids[name] for name in _named(entry["args"][3])]
        for branch in _named(entry["args"][1:3]):
            inner = graph["branches"][branch]
            places = [str(n["name"]) for n in inner["nodes"] if n["op"] == "placeholder"]
            self._graph(inner, branch, dict(zip(places, operands, strict=True)))

    def _node(self, entry: Json, ids: Mapping[str, str], branch: str) -> PageNode:
        kind = self._kind(entry)
        arguments = [entry.get("args", []), entry.get("kwargs", {})]
        read = [ids[name] for name in _named(arguments) if name in ids]
        target = str(entry["target"])
        return PageNode(
            id=ids[str(entry["name"])],
            kind=kind,
            op=target,
            type=type_text(entry.get("type")),
            args="" if kind == "cond" else _literals(entry),
            inputs=tuple(dict.fromkeys(n for n in read if n not in self.weights)),
            weights=tuple(dict.fromkeys(n for n in read if n in self.weights)),
            branches=tuple(_named(entry["args"][1:3])) if kind == "cond" else (),
            reason=reason_key(str(entry.get("made_by", "")), target, kind),
            branch=branch,
            **{name: entry[name] for name in ("source", "module", "made_by", "role", "layer") if name in entry},
        )

    def _kind(self, entry: Json) -> Any:
        if entry["op"] == "placeholder":
            return "state" if entry["name"] in self.states else "input"
        if entry["op"] == "get_attr":
            return "weight"
        return "cond" if entry["target"] == "cond" else "op"


def reason_key(made_by: str, operator: str, kind: str) -> str:
    """Return `pass` or `pass:operator`, the key of a node's reason on the page; "" for a node of the model itself."""
    named = kind == "cond" or operator.startswith("fastcar.")
    return f"{made_by}:{operator.removesuffix('.default')}" if made_by and named and kind in ("op", "cond") else made_by


def type_text(value: Any) -> str:
    """Return a graph file's type as a person reads it: `float32 [2, 1, 64]`, and `32 × float32 [1]` of a list."""
    if value is None:
        return ""
    kind, content = value
    if kind in ("list", "tuple"):
        parts = [type_text(part) for part in content]
        return f"{len(parts)} × {parts[0]}" if len(parts) > 2 and len(set(parts)) == 1 else ", ".join(parts)
    return f"{str(kind).removeprefix('torch.')} {content}"


def _named(value: Any) -> Iterator[str]:
    """Return the names of the nodes inside an argument, in order."""
    if isinstance(value, list):
        for part in cast("list[Any]", value):
            yield from _named(part)
    elif isinstance(value, dict):
        fields = cast("Json", value)
        if set(fields) == {"node"} and isinstance(fields["node"], str):
            yield fields["node"]
            return
        for part in fields.values():
            yield from _named(part)


def _literals(entry: Json) -> str:
    """Return the arguments as text, `·` for a node."""
    parts = [_argument(a) for a in entry.get("args", [])]
    parts += [f"{name}={_argument(a)}" for name, a in entry.get("kwargs", {}).items()]
    return "" if all(part == "·" for part in parts) else ", ".join(parts)


def _argument(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(_argument(v) for v in cast('list[Any]', value))}]"
    if isinstance(value, dict):
        ((kind, text),) = cast("Json", value).items()
        if kind == "float":
            return f"{float.fromhex(text):.6g}"
        return "·" if kind == "node" else str(text)
    return str(value)


def _outputs(graph: Json, names: list[str]) -> dict[str, str]:
    (output,) = (n for n in graph["nodes"] if n["op"] == "output")
    return dict(zip(names, _named(output["args"]), strict=True))


def _compare(before: list[PageNode], after: list[PageNode]) -> tuple[list[PageNode], list[PageNode]]:
    """Return the nodes with the change that the passes made.

    A node of both graphs keeps its name, operator and layer. Among the other nodes, an operator replaces the only
    other operator of its module and source line.
    """
    left, right = ({(n.id.rpartition("/")[2], n.op, n.layer): n.id for n in nodes} for nodes in (before, after))
    twins = {left[key]: right[key] for key in left.keys() & right.keys()}
    kept = {*twins.values()}
    swapped = _replaced((n for n in before if n.id not in twins), (n for n in after if n.id not in kept))
    pairs = [("kept", *pair) for pair in twins.items()] + [("replaced", *pair) for pair in swapped.items()]
    old = {one: {"change": change, "twin": other} for change, one, other in pairs}
    new = {other: {"change": change, "twin": one} for change, one, other in pairs}
    return (
        [n.model_copy(update=old.get(n.id, {"change": "removed"})) for n in before],
        [n.model_copy(update=new.get(n.id, {"change": "added"})) for n in after],
    )


def _replaced(gone: Iterable[PageNode], new: Iterable[PageNode]) -> dict[str, str]:
    """Return the old node -> the new one of the same place in the model, whose operator's name holds the old one's."""
    places: dict[tuple[str, str], list[PageNode]] = defaultdict(list)
    for node in new:
        places[node.module, node.source].append(node)
    found: dict[str, str] = {}
    for node in gone:
        near = [n for n in places[node.module, node.source] if _stem(node.op) in _stem(n.op)]
        if node.kind == "op" and node.module and len(near) == 1:
            found[node.id] = near[0].id
    return found


def _stem(operator: str) -> str:
    """Return the operator's own name: `linear` of `aten.linear.default`."""
    return operator.split(".")[1] if operator.count(".") > 1 else operator


def _layer_keys(before: Iterable[PageNode], after: Iterable[PageNode]) -> dict[int, str]:
    """Return a digest per layer of its nodes in both graphs; names and module paths do not count."""
    texts: dict[int, list[str]] = defaultdict(list)
    for nodes in (before, after):
        known = {node.id: node for node in nodes}
        places, counts = dict[str, int](), Counter[int | None]()
        for node in nodes:
            counts[node.layer] += 1
            places[node.id] = counts[node.layer]
            if node.layer is not None:
                texts[node.layer].append(_shape_text(node, known, places))
        for lines in texts.values():
            lines.append("|")
    return {layer: hashlib.sha256("\n".join(lines).encode()).hexdigest()[:12] for layer, lines in texts.items()}


def _shape_text(node: PageNode, known: Mapping[str, PageNode], places: Mapping[str, int]) -> str:
    """Return the kind of a node, without names. A node outside of the layer counts by its type only."""
    read = [known[i] for i in (*node.inputs, *node.weights)]
    inside = [n.layer == node.layer for n in read]
    parts = [str(places[n.id]) if own else n.type for n, own in zip(read, inside, strict=True)]
    picks = node.op == "operator.getitem" and not any(inside)  # the layer's own element: its index is the layer
    work = node.op if node.kind in ("op", "cond") else node.role
    args = "" if picks else node.args
    return " ".join([node.kind, work, node.type, args, node.source, node.made_by, node.change, *parts])


def _groups(nodes: Iterable[PageNode], keys: Mapping[int, str]) -> tuple[PageGroup, ...]:
    """Return the part in front of the layers, every layer, and the part behind them."""
    members: dict[int | str, list[str]] = defaultdict(list)
    behind: set[str] = set()
    for node in nodes:
        if node.layer is not None or behind.intersection(node.inputs):
            behind.add(node.id)
        place = node.layer if node.layer is not None else "behind" if node.id in behind else "front"
        members[place].append(node.id)
    last = members["behind"]
    # A parameter reads nothing; it stands with the operators that read it.
    readers = {w: n.id for n in nodes for w in n.weights if n.layer is None}
    late = [i for i in members["front"] if readers.get(i) in set(last)]
    first = [i for i in members["front"] if i not in set(late)]
    layers = sorted(place for place in members if isinstance(place, int))
    found = [PageGroup(title="inputs and embedding", layer=None, key="front", nodes=tuple(first))]
    found += [PageGroup(title=f"layer {n}", layer=n, key=keys[n], nodes=tuple(members[n])) for n in layers]
    found.append(PageGroup(title="head and outputs", layer=None, key="behind", nodes=(*late, *last)))
    return tuple(group for group in found if group.nodes)
