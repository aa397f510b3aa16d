"""The commands on a real model and artifact: compile, inspect, run, verify."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pytest
from conftest import check_module, check_tool
from decoders import llama
from inspection.browser import chromium, opened
from manifests import stored_thresholds
from typer.testing import CliRunner, Result

import fastcar_compile as fc
from fastcar_compile.artifact.reader import StoredArtifact
from fastcar_compile.cli import app
from fastcar_compile.report.page.page import page_data, page_html
from fastcar_compile.runtime.backends.eager import open_perturbed

if TYPE_CHECKING:
    from playwright.sync_api import Browser

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>&\u2028\udcff"


def fastcar(*words: object) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words])


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """The artifact of the small Llama for zcu102, and what `compile --json` printed."""
    check_tool("g++")
    check_module("hls4ml")
    folder = tmp_path_factory.mktemp("cli")
    llama().save_pretrained(folder / "model")
    options = ("--target", "zcu102", "--offload", "mlp", "--tokens-per-frame", 8, "--threshold", "0.0,inf")
    options += ("--batch-size", 2)
    result = fastcar("compile", folder / "model", "-o", folder / "artifact", *options, "--prefill-chunk", 4, "--json")
    assert result.exit_code == 0, result.stderr
    return folder / "artifact", json.loads(result.stdout)


@pytest.fixture(scope="module")
def path(compiled: tuple[Path, dict[str, Any]]) -> Path:
    """The artifact."""
    return compiled[0]


def test_compile(compiled: tuple[Path, dict[str, Any]]) -> None:
    path, report = compiled
    assert report["sites"] == 2
    for name in ("decoder.onnx", "hls/fastcar_step.cpp", "drs/table.bin", "report.json", "manifest.json"):
        assert (path / name).is_file()
    assert report["files"] == sum(1 for f in path.rglob("*") if f.is_file()) - 1


def test_inspect(path: Path) -> None:
    sites = json.loads(fastcar("inspect", path, "--sites", "--json").stdout)["sites"]
    assert [s["module_path"] for s in sites] == ["model.layers.0.mlp", "model.layers.1.mlp"]
    assert "fastcar.tas" not in fastcar("inspect", path, "--before").stdout
    after = fastcar("inspect", path, "--after").stdout
    assert after.count("torch.ops.fastcar.tas.default") == 2
    assert after.count("torch.ops.higher_order.cond") == 2
    node = fastcar("inspect", path, "--explain", "--node", "tas_default").stdout
    assert "insert-replay" in node
    assert "modeling_llama.py:" in node


COMMANDS = (
    *(("inspect", "{path}"), ("inspect", "{path}", "--sites"), ("estimate", "{path}", "--replay", "0.5")),
    *(("targets",), ("targets", "zcu102"), ("verify", "{path}", "--backends", "cpu", "--tokens", "4")),
    ("diff", "{path}/graph/before.json", "{path}/graph/after.json"),
)


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_80_columns_are_enough(words: tuple[str, ...], path: Path) -> None:
    """Nothing is cut off: what stands in a column without a bound stands there with one, folded."""
    given = [word.format(path=path) for word in words]
    natural = fastcar(*given).stdout
    narrow = CliRunner().invoke(app, given, env={"COLUMNS": "80"}).stdout
    lines = narrow.replace(str(path.parent), "").splitlines()
    assert max(map(len, lines)) <= 80
    assert sorted(re.sub(r"\s", "", narrow)) == sorted(re.sub(r"\s", "", natural))


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


@pytest.fixture(scope="module")
def page_file(path: Path) -> Path:
    """The page of the artifact, with the decisions of 40 tokens."""
    trace, html = path.parent / "trace.npy", path.parent / "page.html"
    assert fastcar("run", path, "--prompt", "16 3", "--num-tokens", 40, "--trace", trace).exit_code == 0
    result = fastcar("inspect", path, "--html", html, "--trace", trace, "--json")
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout) == {"html": str(html), "bytes": html.stat().st_size}
    return html


def test_the_page_from_python_is_the_command_s(page_file: Path, path: Path) -> None:
    artifact, page = fc.load(path), page_file.with_name("python.html")
    fc.inspect(artifact, page, np.load(page_file.with_name("trace.npy")))
    assert page.read_bytes() == page_file.read_bytes()
    with pytest.raises(fc.InputError, match=r"decisions are float64 \[4, 2, 2\], the artifact has 2 layers and 2 rows"):
        fc.inspect(artifact, page, cast(Any, np.zeros((4, 2, 2))))
    with pytest.raises(fc.InputError, match=r"the artifact is '.*'\n.*give what `compile` or `load` returns"):
        fc.inspect(cast(Any, str(path)), page)
    with pytest.raises(fc.InputError, match="the page cannot be written: No such file"):
        fc.inspect(artifact, page.parent / "none" / "page.html")


def test_page_shows_node_source_pass_and_reason(browser: Browser, page_file: Path) -> None:
    with opened(page_file, browser=browser) as page:
        page.keyboard.press("/")
        page.keyboard.type("tas layer 1")
        page.locator("#results [role=option]").first.wait_for()
        page.keyboard.press("Enter")
        details = page.locator("#details")
        assert details.locator("h2").inner_text() == "fastcar.tas.default"
        assert details.locator(".pass").inner_text() == "pass insert-replay"
        assert "modeling_llama.py:" in details.locator(".source").inner_text()
        assert "similarity" in details.inner_text()
        assert page.locator('.after [data-name="layer 1"]').get_attribute("class") == "group open"
        box = page.locator('.after [data-id="cond"]').first
        assert box.get_attribute("class") == "node cond added"
        page.locator('.after [data-id="gate_default"]').click()
        assert details.locator("h2").inner_text() == "fastcar.gate.default"
        assert "inserted" in details.inner_text()
        page.locator('.after [data-module="model.layers.1.input_layernorm"]').click()
        page.locator('.after [data-name="layer 1"] [data-id^="rsqrt"]').click()
        assert details.locator(".pass").inner_text() == "the model"
        assert page.locator(".before .twin").count() == 1, "the same node in the other graph"


def test_page_has_every_part(browser: Browser, page_file: Path) -> None:
    with opened(page_file, scheme="dark", browser=browser) as page:
        texts = {}
        for tab in ("overview", "replay", "speed", "memory"):
            page.locator(f"#tab-{tab}").click()
            texts[tab] = page.locator(f"#panel-{tab}").inner_text()
        assert "quantize-w8a8" in texts["overview"]
        assert "model.layers.1.mlp" in texts["replay"]
        assert "score >= inf" in texts["replay"]
        assert "Time line of one decode step" in texts["speed"]
        assert "calls and instructions" in texts["speed"]
        assert "weight port 0" in texts["memory"]
        assert re.search(r"weights_3\tHPC0\thost to kernel", texts["memory"])
        assert "2 layers, 5 columns" in str(page.locator("canvas.heat").get_attribute("aria-label"))
        dark = page.evaluate("getComputedStyle(document.body).backgroundColor")
        page.locator("#theme").click()
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") != dark


def test_time_line_of_the_page_zooms_into_a_call(browser: Browser, page_file: Path) -> None:
    with opened(page_file, browser=browser) as page:
        page.locator("#tab-speed").click()
        canvas, steps = page.locator("canvas.time-line"), page.locator("#panel-speed .sides button")
        assert steps.all_inner_texts()[0] == "dense"
        assert steps.last.get_attribute("aria-pressed") == "true", "recorded decisions are shown first"
        steps.first.click()
        assert str(canvas.get_attribute("aria-label")).startswith("dense: from 0.00 µs")
        page.get_by_label("Part of the step").select_option("MLP, 2 rows")
        box = canvas.bounding_box()
        assert box is not None
        page.mouse.move(box["x"] + 0.5 * box["width"], box["y"] + 1.5 * 22)
        assert re.match(r"MLP, 2 rows, layer 0: [\d,]+ clocks = .+, from", page.locator("#tip").inner_text())
        whole = canvas.get_attribute("aria-label")
        canvas.press("+")
        assert canvas.get_attribute("aria-label") != whole


def test_page_switches_between_decode_and_prefill(browser: Browser, page_file: Path) -> None:
    with opened(page_file, browser=browser) as page:
        page.locator("#tab-graph").click()
        assert page.locator('.after [data-id="cond"]').count() == 1
        page.locator('[data-step="prefill"]').click()
        assert page.locator('.after [data-id="cond"]').count() == 0, "nothing replays in the prompt"
        assert page.locator(".after svg .node.replaced").count() > 3
        page.keyboard.press("/")
        page.keyboard.type("tas layer 0")
        page.locator("#results [role=option]").first.click()
        assert page.locator('[data-step="decode"]').get_attribute("aria-pressed") == "true"
        assert page.locator("#subtitle").inner_text() == "2 layers · w8a8 · zcu102"
        page.locator("#query").fill("gate")
        words = [text.split("\n")[0] for text in page.locator("#results [role=option]").all_inner_texts()]
        assert words[:5] == ["gate", "gate", "tas", "tas", "module"], "operators and their kind before gate_proj"
        page.locator("#query").fill("self_attn.q_proj")
        assert page.locator("#results [role=option]").first.inner_text().startswith("module")


def test_page_runs_no_text_of_the_artifact(browser: Browser, path: Path, tmp_path: Path) -> None:
    """Every name and text of the artifact holds markup; no part of the page runs it or takes it for elements."""
    ids = ("id", "inputs", "weights", "branches", "branch", "nodes", "outputs", "twin")
    fixed = (*ids, "kind", "change", "key", "unit", "group", "label", "direction", "ph", "cat")
    data = _hostile(json.loads(json.dumps(page_data(StoredArtifact(path)))), fixed)
    file = tmp_path / "page.html"
    file.write_text(page_html(data), "utf-8")
    with opened(file, browser=browser) as page:
        for tab in ("overview", "replay", "speed", "memory", "graph"):
            page.locator(f"#tab-{tab}").click()
        assert HOSTILE.partition("\u2028")[0] in page.title()
        page.locator("#query").fill("alert(1) layer 1")
        page.locator("#results [role=option]").first.click()
        assert "<script>alert(1)" in page.locator("#details").inner_text()
        assert page.evaluate("document.scripts.length") == 2
        assert page.locator("[onerror], main img, main script").count() == 0


def _hostile(value: Any, fixed: tuple[str, ...], key: str = "") -> Any:
    """The same data with markup behind every text."""
    if isinstance(value, dict):
        return {name: _hostile(part, fixed, name) for name, part in value.items()}
    if isinstance(value, list):
        return [_hostile(part, fixed, key) for part in value]
    return value + HOSTILE if isinstance(value, str) and key not in fixed else value


def test_page_of_many_layers(browser: Browser, path: Path, tmp_path: Path) -> None:
    """Equal layers are one line, and it fits a phone."""
    data = json.loads(json.dumps(page_data(StoredArtifact(path))))
    for side in ("before", "after"):
        *front, last, behind = data[side]["groups"]
        more = [last | {"layer": n, "title": f"layer {n}"} for n in range(2, 32)]
        data[side]["groups"] = [*front, last, *more, behind]
    file = tmp_path / "page.html"
    file.write_text(page_html(data), "utf-8")
    with opened(file, width=400, browser=browser) as page:
        page.locator("#tab-graph").click()
        run = page.locator(".after .run")
        assert run.get_attribute("class") == "run"
        run.locator(".fold").first.click()
        page.locator('.after [data-group="layer 31"]').click()
        assert page.locator('.after [data-name="layer 31"] svg .node').count() > 50
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_verify_takes_every_backend_of_the_artifact(path: Path) -> None:
    result = fastcar("verify", path, "--json")
    data = json.loads(result.stdout)
    assert result.exit_code == 0
    assert [r["backend"] for r in data["results"]] == ["cpu", "onnxruntime", "hls-csim"]
    assert all(r["decision_mismatches"] == 0 for r in data["results"])


def test_the_perturbed_reference_differs_by_rounding(path: Path) -> None:
    artifact, ids = fc.load(path), np.array([[16], [3]])
    eager, moved = (artifact.session(backend).prefill(ids) for backend in ("eager", open_perturbed))
    assert 0 < np.abs(eager - moved).max() < 0.1


def test_diff_of_an_artifact_and_a_changed_one(path: Path, tmp_path: Path) -> None:
    assert (result := fastcar("diff", path, path)).exit_code == 0
    assert result.stdout == "equal\n"
    other = tmp_path / "other"
    shutil.copytree(path, other)
    fc.load(other).store_thresholds(stored_thresholds(1.0, None))
    result = fastcar("diff", path, other, "--json")
    found = json.loads(result.stdout)
    assert (result.exit_code, found["equal"], found["weights"], found["graphs"]) == (1, False, [], [])
    assert {change["path"].partition(".")[0] for change in found["sections"]} == {"thresholds"}
    assert fastcar("diff", path, other, "--only", "options,graphs,weights,figures,files").exit_code == 0


def test_diff_of_two_graphs(path: Path) -> None:
    graph = path / "graph"
    words = ("diff", graph / "before.json", graph / "after.json")
    result = fastcar(*words, "--rows", 200)
    assert result.exit_code == 1
    assert re.search(r"(?m)^decode.model.layers.\*.mlp.down_proj fastcar.tas.default \(2\) +- ", result.stdout)
    assert re.search(r"… and \d+ more lines; --rows N shows N, --json all", fastcar(*words).stdout)
    result = fastcar("diff", graph / "before.json", path)
    assert "compare two artifacts, or two graph files" in result.stderr
    result = fastcar("diff", graph / "before.json", graph / "before.json", "--only", "colour")
    assert (result.exit_code, "parts: options, versions" in result.stderr) == (2, True)


def test_what_shows_an_artifact_runs_nothing(path: Path, tmp_path: Path) -> None:
    """No program is started, no library mapped, no code of a graph compiled. `doctor` is the control."""
    script = Path(__file__).parents[1] / "inputs" / "watched.py"
    other = tmp_path / "other"
    shutil.copytree(path, other)
    changed = fc.load(path).manifest.model_copy(update={"extensions": {"x": {}}})
    (other / "manifest.json").write_bytes(changed.to_bytes())
    parts = ([], ["--after"], ["--explain"], ["--html", str(tmp_path / "page.html")])
    calls = [["inspect", str(path), *part] for part in parts]
    calls += [["diff", str(path), str(other)], ["estimate", str(path)], ["targets"], ["doctor"]]
    words = [sys.executable, str(script), str(path), json.dumps(calls)]
    found = json.loads(subprocess.run(words, capture_output=True, text=True, check=True).stdout)
    assert any("subprocess" in event for event in found.pop("doctor")["seen"])
    assert len(found) == len(calls) - 1
    assert {name: call["seen"] for name, call in found.items() if call["seen"]} == {}
    assert {name: call["code"] for name, call in found.items()} == dict.fromkeys(found, 0) | {"diff": 1}
