"""What differs between two artifacts or graph files: nodes by module and operator, entries of lists by name."""

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import fastcar_compile as fc
from fastcar_compile.report.comparison import Change, changes, tensors

SCALE = 0.125


def graph(layers: int = 2) -> dict[str, Any]:
    """x -> for each layer: linear, scaled, added to the stream, with a branch under a name."""
    nodes = [{"name": "x", "op": "placeholder", "target": "x", "type": ["torch.float32", [1, 4]]}]
    stream, branches = "x", {}
    for layer in range(layers):
        place = {"layer": layer, "module": f"layers.{layer}.proj"}
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
    output = {"name": "output", "op": "output", "target": "output", "args": [[{"node": stream}]]}
    return {"nodes": [*nodes, output], "branches": branches}


def called(name: str, target: str, *operands: str | dict[str, str]) -> dict[str, Any]:
    args = [{"node": o} if isinstance(o, str) else o for o in operands]
    return {"name": name, "op": "call_function", "target": target, "type": ["torch.float32", [1, 4]], "args": args}


def entry(data: dict[str, Any], name: str) -> dict[str, Any]:
    return next(node for node in data["nodes"] if node["name"] == name)


def diff(folder: Path, a: object, b: object) -> dict[str, tuple[Change, ...]]:
    """Compare two graphs that are written to files."""
    paths = [folder / "a.json", folder / "b.json"]
    for path, data in zip(paths, (a, b), strict=True):
        path.write_text(json.dumps({"decode": data, "outputs": ["logits"]}))
    return fc.diff(*paths)


def test_one_insertion_is_one_row_and_its_reader(tmp_path: Path) -> None:
    """All later nodes of the operator get other numbers, as torch.fx gives them; none of them is listed."""
    other, shifted = json.dumps(graph(12)), json.dumps(graph(12))
    for layer in reversed(range(12)):
        shifted = shifted.replace(f'"mul_{layer}"', f'"mul_{layer + 1}"')
    data = json.loads(shifted)
    inserted = called("mul_0", "aten.mul.Tensor", "x", "x") | {"layer": 0, "module": "embed"}
    data["nodes"].insert(1, inserted)
    entry(data, "linear_0")["args"][0] = {"node": "mul_0"}
    found = diff(tmp_path, json.loads(other), data)
    assert [(c.path, c.places) for c in found.pop("graphs")] == [
        ("decode.embed aten.mul.Tensor", 1),
        ("decode.layers.0.proj aten.linear.default", 1),
    ]
    assert found == {}


@pytest.mark.parametrize(
    ("name", "change", "text"),
    [
        ("mul_1", {"args": [{"node": "linear_1"}, {"float": (0.25).hex()}]}, (0.25).hex()),
        ("add_1", {"args": [{"node": "mul_1"}, {"node": "add_0"}]}, "aten.mul.Tensor, layers.0.proj aten.add.Tensor"),
        ("w1", {"type": ["torch.float32", [4, 5]]}, "float32[4, 5]"),
    ],
)
def test_a_node_that_differs(name: str, change: dict[str, Any], text: str, tmp_path: Path) -> None:
    other = copy.deepcopy(graph())
    entry(other, name).update(change)
    (found,) = diff(tmp_path, graph(), other)["graphs"]
    assert text in found.b
    assert text not in found.a


def test_branches_count(tmp_path: Path) -> None:
    other = copy.deepcopy(graph())
    other["branches"]["branch_1"]["nodes"][0]["target"] = "aten.gelu.default"
    found = diff(tmp_path, graph(), other)["graphs"]
    assert [(c.path, c.a is None, c.b is None) for c in found] == [
        ("decode.branch_1/layers.1.proj aten.gelu.default", True, False),
        ("decode.branch_1/layers.1.proj aten.relu.default", False, True),
    ]


def test_leaves_that_differ_with_their_path() -> None:
    a = {"quant": "w8a8", "replay": {"threshold": [1, 2]}, "same": None, "kind": 1}
    b = {"quant": "w4a8", "replay": {"threshold": [1, 3]}, "same": None, "kind": True, "new": 4}
    assert [(c.path, c.a, c.b) for c in changes(a, b)] == [
        ("kind", 1, True),
        ("new", None, 4),
        ("quant", "w8a8", "w4a8"),
        ("replay.threshold", [1, 2], [1, 3]),
    ]
    assert changes(a, a) == ()


def test_entries_of_lists_are_aligned_by_name() -> None:
    """Names in a list, and objects that have one: what is inserted in the middle shifts nothing."""
    state = [{"name": f"key_cache_{layer}", "layer": layer, "dtype": "float32"} for layer in range(12)]
    a = {"outputs": ["logits", *(s["name"] for s in state)], "state": state}
    more = [{"name": f"mlp_cache_{layer}", "layer": layer, "dtype": "float32"} for layer in range(12)]
    b = {"outputs": ["logits", "scores", *(s["name"] for s in state)], "state": [*state[:1], *more, *state[1:]]}
    assert changes(a, b) == (("outputs[scores]", None, "scores", 1), ("state[mlp_cache_*]", None, more[0], 12))
    swapped = {"outputs": a["outputs"][::-1]}
    assert changes({"outputs": a["outputs"]}, swapped), "order counts"


def test_tensors_by_name_type_and_value() -> None:
    a: dict[str, NDArray[Any]] = {f"layers.{n}.w": np.zeros((2, 2), np.float32) for n in range(2)}
    a |= {"same": np.ones(3, np.int8), "moved": np.array([3.0, 4.0], np.float32)}
    b = {name: value.astype(np.float16) if name.startswith("layers") else value for name, value in a.items()}
    b["moved"] = np.array([3.0, 4.5], np.float32)
    b["new"] = np.zeros((), np.int8)
    assert changes(*tensors(a, b)) == (
        ("layers.*.w", "float32[2, 2]", "float16[2, 2]", 2),
        ("moved", "float32[2]", "1 of 2 elements differ, by at most 0.5", 1),
        ("new", None, "int8[]", 1),
    )


@pytest.mark.parametrize(("other", "text"), [(-0.0, "by at most 0"), (np.nan, "by at most inf"), (np.inf, "inf")])
def test_values_are_compared_by_their_bits(other: float, text: str) -> None:
    zero, moved = np.array([0.0], np.float32), np.array([other], np.float32)
    assert changes(*tensors({"w": moved}, {"w": moved})) == ()
    (found,) = changes(*tensors({"w": zero}, {"w": moved}))
    assert text in found.b
