"""A graph file from anywhere: it is data, and what torch.fx would compile of it are names."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from passes.tiny import after

from fastcar_compile.artifact.programs import graph_file_text, read_graph_file
from fastcar_compile.errors import ArtifactError
from fastcar_compile.passes.pipeline import analysis_pipeline

from . import evil


@pytest.fixture(scope="module")
def graph() -> dict[str, Any]:
    return json.loads(graph_file_text(after(*analysis_pipeline())))


def read(path: Path, data: Any) -> Any:
    path.write_text(data if isinstance(data, str) else json.dumps(data))
    return read_graph_file(path, {}, missing_on_meta=True)


def node(data: dict[str, Any], op: str) -> dict[str, Any]:
    """The last node of this kind that takes something, or the last one."""
    found = [n for n in data["decode"]["nodes"] if n["op"] == op]
    return next((n for n in reversed(found) if n.get("args")), found[-1])


EVIL: dict[str, tuple[str, str]] = {
    "an argument with a default": ("placeholder", "target"),
    "the path of a tensor": ("get_attr", "target"),
    "a keyword argument": ("call_function", "kwargs"),
    "a method": ("call_function", "op"),
}


@pytest.mark.parametrize("name", EVIL)
def test_a_name_is_no_code(graph: dict[str, Any], name: str, tmp_path: Path) -> None:
    place, data = tmp_path / "ran", copy.deepcopy(graph)
    (op, field), code = EVIL[name], evil.source(tmp_path / "ran")
    entry = node(data, op)
    new = {"target": f"x={code}", "kwargs": {f"x={code}, y": 1}, "op": "call_method"}
    entry[field] = new[field] if op != "get_attr" else f'x")\n{code}\n#'
    if field == "op":
        entry["target"] = f"x\n{code}\n#"
    with pytest.raises(ArtifactError, match="malformed") as caught:
        _ = read(tmp_path / "g.json", data).graph_module.code
    assert not place.exists()
    assert (caught.value.where, bool(caught.value.hint)) == (str(tmp_path / "g.json"), True)


@pytest.mark.parametrize(
    "target", ["aten.from_file.default", "aten.save.default", "torch.os.system", "aten", "", "cond."]
)
def test_an_operator_that_no_file_may_ask_for(graph: dict[str, Any], target: str, tmp_path: Path) -> None:
    data = copy.deepcopy(graph)
    node(data, "call_function")["target"] = target
    with pytest.raises(ArtifactError, match="asks for operator"):
        read(tmp_path / "g.json", data)


BROKEN: dict[str, tuple[Any, ...]] = {
    "no decode step": ("decode", None),
    "an operand that is not there": ("decode", "nodes", -1, "args", [[{"node": "x"}]]),
    "a negative size": ("decode", "nodes", 0, "type", ["torch.int64", [-1]]),
    "a value of an unknown kind": ("decode", "nodes", -1, "args", [[{"os": "system"}]]),
    "a module as an element type": ("decode", "nodes", -1, "args", [[{"dtype": "torch.os"}]]),
    "a state that is a text": ("state", ["x"]),
    "a state of an unknown role": ("state", 0, "role", "x"),
    "a config without sizes": ("config", {}),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_graph_is_refused_by_name(graph: dict[str, Any], name: str, tmp_path: Path) -> None:
    *path, value = BROKEN[name]
    data: Any = copy.deepcopy(graph)
    if path[-1] == "args":
        evil.put(*path[:-1], "op", value="output")(data)
    evil.put(*path, value=value)(data)
    with pytest.raises(ArtifactError) as caught:
        read(tmp_path / "g.json", data)
    assert (bool(caught.value.where), bool(caught.value.hint)) == (True, True)
