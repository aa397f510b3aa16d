"""Graphs are matched by structure: names do not count, operands do."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from fastcar_compile.comparison.graphs import compare_graphs

SCALE = 0.125


def graph(layers: int = 2) -> dict[str, Any]:
    """x -> for each layer: linear, scaled, added to the stream, with a branch under a name."""
    nodes = [{"name": "x", "op": "placeholder", "target": "x", "type": ["torch.float32", [1, 4]]}]
    stream, branches = "x", {}
    for layer in range(layers):
        place = {"layer": layer, "module": f"layers.{layer}.proj", "source": "model.py:3", "made_by": "pass"}
        weight, branch = f"layers.{layer}.proj.weight", f"branch_{layer}"
        nodes += [
            place | {"name": f"w{layer}", "op": "get_attr", "target": weight, "type": ["torch.float32", [4, 4]]},
            place | called(f"linear_{layer}", "aten.linear.default", stream, f"w{layer}"),
            place | called(f"mul_{layer}", "aten.mul.Tensor", f"linear_{layer}", {"float": SCALE.hex()}),
            place | {"name": f"arm_{layer}", "op": "get_attr", "target": branch},
            place | called(f"add_{layer}", "aten.add.Tensor", stream, f"mul_{layer}"),
        ]
        branches[branch] = {"nodes": [place | called("inner", "aten.relu.default")], "branches": {}}
        stream = f"add_{layer}"
    return {"nodes": [*nodes, {"name": "output", "op": "output", "target": "output", "args": [[{"node": stream}]]}]} | {
        "branches": branches
    }


def called(name: str, target: str, *operands: str | dict[str, str]) -> dict[str, Any]:
    args = [{"node": o} if isinstance(o, str) else o for o in operands]
    return {"name": name, "op": "call_function", "target": target, "type": ["torch.float32", [1, 4]], "args": args}


def entry(data: dict[str, Any], name: str) -> dict[str, Any]:
    return next(node for node in data["nodes"] if node["name"] == name)


def test_names_do_not_count() -> None:
    renamed = copy.deepcopy(graph())
    entry(renamed, "linear_0")["name"] = "product"
    entry(renamed, "mul_0")["args"][0] = {"node": "product"}
    assert compare_graphs("decode", graph(), renamed) is None


def test_equal_changes_of_all_layers_are_one() -> None:
    other = copy.deepcopy(graph())
    for layer in range(2):
        mul = entry(other, f"mul_{layer}")
        index = other["nodes"].index(mul)
        inserted = mul | {"name": f"relu_{layer}", "target": "aten.relu.default", "args": [{"node": mul["name"]}]}
        other["nodes"].insert(index + 1, inserted)
        entry(other, f"add_{layer}")["args"][1] = {"node": f"relu_{layer}"}
    found = compare_graphs("decode", graph(), other)
    assert found is not None
    assert found.nodes == (14, 16)
    inserted, *rewired = found.changes
    assert (inserted.kind, inserted.target, inserted.layers) == ("inserted", "aten.relu.default", (0, 1))
    assert (inserted.names, inserted.module) == (("relu_0", "relu_1"), "layers.*.proj")
    assert (inserted.source, inserted.made_by) == ("model.py:3", "pass")
    assert [(c.kind, c.target, c.layers, c.detail) for c in rewired] == [
        ("rewired", "aten.add.Tensor", (0,), "(x, mul_*) -> (x, relu_*)"),
        ("rewired", "aten.add.Tensor", (1,), "(add_*, mul_*) -> (add_*, relu_*)"),
    ]


@pytest.mark.parametrize(
    ("name", "change", "kind", "detail"),
    [
        ("mul_1", {"args": [{"node": "linear_1"}, {"float": (0.25).hex()}]}, "changed", "[_, 0.125] -> [_, 0.25]"),
        ("add_1", {"args": [{"node": "mul_1"}, {"node": "add_0"}]}, "rewired", "(add_*, mul_*) -> (mul_*, add_*)"),
        ("w1", {"type": ["torch.float32", [4, 5]]}, "changed", "float32[4, 4] -> float32[4, 5]"),
    ],
)
def test_a_pair_that_differs(name: str, change: dict[str, Any], kind: str, detail: str) -> None:
    other = copy.deepcopy(graph())
    entry(other, name).update(change)
    found = compare_graphs("decode", graph(), other)
    assert found is not None
    assert [(c.kind, c.detail, c.layers) for c in found.changes] == [(kind, detail, (1,))]
    assert found.matched == 13


def test_branches_count() -> None:
    other = copy.deepcopy(graph())
    other["branches"]["branch_1"]["nodes"][0]["target"] = "aten.gelu.default"
    found = compare_graphs("decode", graph(), other)
    assert found is not None
    assert [(c.kind, c.target, c.names) for c in found.changes] == [
        ("removed", "aten.relu.default", ("branch_1/inner",)),
        ("inserted", "aten.gelu.default", ("branch_1/inner",)),
    ]


def test_more_layers_are_inserted() -> None:
    found = compare_graphs("decode", graph(1), graph(2))
    assert found is not None
    assert {c.kind for c in found.changes if c.layers} == {"inserted"}
    assert {layer for c in found.changes for layer in c.layers} == {1}
    assert compare_graphs("prefill", None, None) is None
