"""The page of a decoder of many layers, from the graph files of one that has two."""

import json
import re
from typing import Any

from fastcar_compile.report.page.graphs import page_graphs

Json = dict[str, Any]


def with_layers(data: Json, before: Json, after: Json, layers: int) -> Json:
    """The page of `data` with copies of layer 1 in both graphs and in the table of layers."""
    graphs = zip(("before", "after"), page_graphs(grown(before, layers), grown(after, layers)), strict=True)
    lines = [data["replay"]["layers"][min(n, 1)] | {"layer": n} for n in range(layers)]
    changed = {name: graph.model_dump(mode="json", exclude_defaults=True) for name, graph in graphs}
    return data | changed | {"replay": data["replay"] | {"layers": lines}}


def grown(data: Json, layers: int) -> Json:
    """A graph file with `layers` layers: layers 2 and on are copies of layer 1, each reads the one before it."""
    nodes = data["decode"]["nodes"]
    own = [[n["name"] for n in nodes if n.get("layer") == layer] for layer in (0, 1)]
    assert len(own[0]) == len(own[1]), "both layers have one structure"
    found, branches = [], dict(data["decode"]["branches"])
    for node in nodes:
        found.append(node)
    last = max(n for n, node in enumerate(nodes) if node.get("layer") == 1 and node["op"] != "placeholder")
    copies: list[Json] = []
    for layer in range(2, layers):
        names = dict(zip(own[1], (f"{name}_at_{layer}" for name in own[1]), strict=True))
        previous = own[1] if layer == 2 else [f"{name}_at_{layer - 1}" for name in own[1]]
        names |= dict(zip(own[0], previous, strict=True))
        names |= {name: f"{name}_at_{layer}" for name in branches if name.endswith("_1")}
        copies += [_renamed(node, names, layer) for node in nodes if node.get("layer") == 1]
        for name in [n for n in branches if n.endswith("_1")]:
            branches[names[name]] = _renamed(branches[name], {}, layer)
    state = data["state"] + [
        {"name": f"{s['name']}_at_{n}"} for s in data["state"] if s["layer"] == 1 for n in range(2, layers)
    ]
    decode = {"nodes": [*found[: last + 1], *copies, *found[last + 1 :]], "branches": branches}
    return data | {"decode": decode, "state": state}


def _renamed(part: Json, names: dict[str, str], layer: int) -> Json:
    """A copy whose names, references and module paths are those of another layer."""
    text = re.sub(r"layers\.1\.", f"layers.{layer}.", json.dumps(part)).replace('"layer": 1', f'"layer": {layer}')
    copy = json.loads(text)
    _rename(copy, names)
    if copy.get("op") == "get_attr" and part["target"] in names:
        copy["target"] = names[part["target"]]
    return copy


def _rename(value: Any, names: dict[str, str]) -> None:
    if isinstance(value, list):
        for part in value:
            _rename(part, names)
    elif isinstance(value, dict):
        for key in ("node", "name"):
            if isinstance(value.get(key), str):
                value[key] = names.get(value[key], value[key])
        for part in value.values():
            _rename(part, names)
