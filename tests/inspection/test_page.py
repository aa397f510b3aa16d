"""The inspection page's data: reasons of all passes and operators, heat maps, what changed."""

import json
import re
import subprocess
from collections.abc import Sequence
from importlib.resources import files
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import check_tool
from manifests import sections
from passes.tiny import Rotated, TinyBlock, after

import fastcar_compile.ir.ops  # noqa: F401  (registers the operators, each with its reason)
from fastcar_compile.artifact.manifest import Manifest
from fastcar_compile.artifact.programs import graph_file_text
from fastcar_compile.config.targets import load_target
from fastcar_compile.errors import size_text
from fastcar_compile.ir.ops.operator import REASONS
from fastcar_compile.ir.pass_manager import Pass
from fastcar_compile.passes.insert_replay import InsertReplay
from fastcar_compile.passes.pipeline import PASSES, analysis_pipeline
from fastcar_compile.passes.quantize import QuantizeW8A8
from fastcar_compile.report.page.graphs import PageGraph, page_graphs
from fastcar_compile.report.page.tables import heat_map, speed_page


def pages(*passes: Pass, blocks: Sequence[type[TinyBlock]] = ()) -> tuple[PageGraph, PageGraph]:
    """The tiny decoder before these passes and after them."""
    programs = (after(*analysis_pipeline(), *more, blocks=blocks) for more in ((), passes))
    before, later = (json.loads(graph_file_text(program)) for program in programs)
    return page_graphs(before, later)


def test_what_changed_between_the_graphs() -> None:
    old, new = pages(QuantizeW8A8(), InsertReplay((0.5,)))
    changes = {n.id: (n.change, n.twin) for n in old.nodes}
    assert changes["linear"] == ("replaced", "linear_w8a8_default")
    assert changes["linear_2"] == ("replaced", "compute_branch_0/linear_w8a8_default_2")
    assert changes["layer_norm"] == ("kept", "layer_norm")
    assert changes["silu"] == changes["head_weight"] == ("removed", "")
    added = {n.id for n in new.nodes if n.change == "added"}
    assert added > {"mlp_cache_0", "head_weight_int8", "tas_default", "cond", "replay_branch_0/clone_default"}
    assert {n.id: n.twin for n in new.nodes if n.change == "replaced"} == {
        twin: name for name, (change, twin) in changes.items() if change == "replaced"
    }
    assert [(g.layer, g.nodes[-1]) for g in old.groups] == [(None, "embedding"), (0, "add_1"), (None, "linear_5")]
    assert new.outputs["logits"] == "linear_w8a8_default_5"
    nodes = {n.id: n for n in new.nodes}
    assert nodes["compute_branch_0/layer_norm_1"].inputs == ("add",), "what the branch was given"
    assert nodes["cond"].branches == ("replay_branch_0", "compute_branch_0")
    assert nodes["linear_w8a8_default"].weights == ("blocks_0_qkv_weight_int8", "blocks_0_qkv_weight_scale")
    assert nodes["mlp_cache_0"].kind == "state"
    norm = nodes["layer_norm"]
    assert (norm.args, norm.type) == ("·, [8], ·, None, 1e-05, False", "float32 [2, 1, 8]")


def test_layers_of_equal_structure_share_a_key() -> None:
    (old, _) = pages(blocks=(TinyBlock, TinyBlock, Rotated))
    first, second, other = (g.key for g in old.groups if g.layer is not None)
    assert first == second != other


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
