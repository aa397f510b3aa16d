"""The inspection page's data: reasons of all passes and operators, heat maps, what changed."""

import json
import re
import subprocess
from importlib.resources import files
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from conftest import check_tool
from manifests import sections

import fastcar_compile.ir.ops  # noqa: F401  (registers the operators, each with its reason)
from fastcar_compile.artifact.manifest import Manifest
from fastcar_compile.config.targets import load_target
from fastcar_compile.errors import size_text
from fastcar_compile.ir.ops.operator import REASONS
from fastcar_compile.passes.pipeline import PASSES
from fastcar_compile.report.page.graphs import page_graphs
from fastcar_compile.report.page.tables import heat_map, speed_page


def entry(name: str, op: str = "call_function", target: str = "aten.add.Tensor", **more: Any) -> dict[str, Any]:
    kind = "torch.float32"
    return {"name": name, "op": op, "target": target, "type": [kind, [2, 4]], "layer": None} | more


def ref(name: str) -> dict[str, str]:
    return {"node": name}


def graph(*nodes: dict[str, Any], result: str, branches: dict[str, Any] | None = None) -> dict[str, Any]:
    output = {"name": "output", "op": "output", "target": "output", "args": [[ref(result)]]}
    decode = {"nodes": [*nodes, output], "branches": branches or {}}
    return {"decode": decode, "outputs": ["logits"], "state": [{"name": "mlp_cache_0"}]}


def before() -> dict[str, Any]:
    place = {"layer": 0, "module": "layers.0.mlp", "source": "m.py:3"}
    return graph(
        entry("tokens", "placeholder", "tokens"),
        entry("weight", "get_attr", "layers.0.mlp.weight", layer=0),
        entry("linear", target="aten.linear.default", args=[ref("tokens"), ref("weight")], **place),
        entry("silu", target="aten.silu.default", args=[ref("linear")], **place),
        entry("add", args=[ref("silu"), {"float": (0.5).hex()}], layer=0),
        entry("head", target="aten.mul.Tensor", args=[ref("add"), ref("add")]),
        result="head",
    )


def after() -> dict[str, Any]:
    place = {"layer": 0, "module": "layers.0.mlp", "source": "m.py:3"}
    made = {"made_by": "insert-replay", **place}
    inner = {
        "nodes": [
            entry("hidden", "placeholder", "hidden"),
            entry("where", target="aten.where.self", args=[ref("hidden")], **made),
            {"name": "output", "op": "output", "target": "output", "args": [[ref("where")]]},
        ],
        "branches": {},
    }
    return graph(
        entry("tokens", "placeholder", "tokens"),
        entry("mlp_cache_0", "placeholder", "mlp_cache_0", role="mlp_cache", **made),
        entry("weight_int8", "get_attr", "layers.0.mlp.weight_int8", made_by="quantize-w8a8", layer=0),
        entry(
            "q",
            target="fastcar.linear_w8a8.default",
            args=[ref("tokens"), ref("weight_int8")],
            made_by="quantize-w8a8",
            **place,
        ),
        entry("yes", "get_attr", "yes"),
        entry("no", "get_attr", "no"),
        entry("cond", target="cond", args=[ref("q"), ref("yes"), ref("no"), [ref("q")]], **made),
        entry("add", args=[ref("cond"), {"float": (0.5).hex()}], layer=0),
        entry("head", target="aten.mul.Tensor", args=[ref("add"), ref("add")]),
        result="head",
        branches={"yes": inner, "no": inner},
    )


def test_what_changed_between_the_graphs() -> None:
    old, new = page_graphs(before(), after())
    assert {n.id: (n.change, n.twin) for n in old.nodes} == {
        "tokens": ("kept", "tokens"),
        "weight": ("removed", ""),
        "linear": ("replaced", "q"),
        "silu": ("removed", ""),
        "add": ("kept", "add"),
        "head": ("kept", "head"),
    }
    assert {n.id: n.change for n in new.nodes if n.change != "kept"} == {
        "mlp_cache_0": "added",
        "weight_int8": "added",
        "q": "replaced",
        "cond": "added",
        "yes/where": "added",
        "no/where": "added",
    }


def test_nodes_of_a_branch_read_what_the_branch_was_given() -> None:
    nodes = {n.id: n for n in page_graphs(before(), after())[1].nodes}
    assert nodes["yes/where"].inputs == ("q",)
    assert nodes["cond"].branches == ("yes", "no")
    assert nodes["q"].weights == ("weight_int8",)
    assert nodes["mlp_cache_0"].kind == "state"
    assert nodes["add"].args == "·, 0.5"
    assert nodes["add"].type == "float32 [2, 4]"


def test_groups_are_in_front_of_the_layers_the_layers_and_behind_them() -> None:
    _, new = page_graphs(before(), after())
    assert [(g.layer, g.nodes[-1]) for g in new.groups] == [(None, "tokens"), (0, "add"), (None, "head")]
    assert new.outputs == {"logits": "head"}


def test_layers_of_equal_structure_share_a_key() -> None:
    def layer(number: int, source: str, operator: str = "aten.relu.default") -> dict[str, Any]:
        module = f"layers.{number}.mlp"
        return entry(f"x{number}", target=operator, args=[ref(source)], layer=number, module=module)

    def keys(*nodes: dict[str, Any]) -> list[str]:
        data = graph(entry("tokens", "placeholder", "tokens"), *nodes, result=nodes[-1]["name"])
        return [g.key for g in page_graphs(data, data)[1].groups if g.layer is not None]

    same = keys(layer(0, "tokens"), layer(1, "x0"), layer(2, "x1"))
    assert len(set(same)) == 1
    other = keys(layer(0, "tokens"), layer(1, "x0", "aten.gelu.default"))
    assert len(set(other)) == 2


def test_every_pass_and_every_operator_has_a_reason() -> None:
    reasons = {**REASONS, **{name: kind.reason for name, kind in PASSES.items()}}
    assert [name for name, reason in reasons.items() if not reason.endswith(".")] == []


def test_heat_map() -> None:
    decisions = np.zeros((10, 2, 2), np.bool_)  # frames of 4 tokens: 4, 4 and 2 forwards
    decisions[4:8, 0] = True
    decisions[8, 1, 0] = True
    heat = heat_map(decisions, 4)
    assert heat["frames"] == [[0.0, 1.0, 0.0], [0.0, 0.0, 0.25]]
    assert heat["tokens"] == [[0.5, 0.5, 1.0, 1.0], [0.25, 0.0, 0.0, 0.0]]
    assert heat["total"] == pytest.approx(9 / 24, abs=1e-4)


def test_sizes_are_those_of_the_command_line() -> None:
    core = (files("fastcar_compile.report.page") / "static" / "core.js").read_text("utf-8")
    found = re.search(r"^  page\.bytes = .*?^  };", core, re.MULTILINE | re.DOTALL)
    assert found is not None
    sizes = [0, 1, 999, 1000, 4132, 999_949, 2**20, 3_237_568, 2**31, 71_223_424_000]
    script = f"const page = {{}}; {found[0]} console.log(JSON.stringify({sizes}.map(page.bytes)))"
    shown = subprocess.run([check_tool("node"), "-e", script], capture_output=True, text=True, check=True).stdout
    assert json.loads(shown) == [size_text(size) for size in sizes]
    assert size_text(2**31) == "2.1 GB"


@pytest.mark.parametrize("target", ["cpu", "wasm32"])
def test_of_a_cpu_the_page_says_what_measures_it(target: str) -> None:
    built = Manifest(producer={}, files={}, **dict(sections()))
    manifest = built.model_copy(update={"target": load_target(target), "accelerator": None})
    text = speed_page(SimpleNamespace(manifest=manifest), None)["missing"]  # pyright: ignore[reportArgumentType]
    assert text.startswith(f"The target {target} is a CPU, which is measured: `fastcar run ")
    assert "board" not in text
