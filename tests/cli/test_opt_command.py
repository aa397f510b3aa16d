"""`fastcar opt`: passes over saved graphs."""

import json
from pathlib import Path

import pytest
from passes.tiny import after, captured

from fastcar_compile.artifact.programs import graph_file_text
from fastcar_compile.ir.pass_manager import pipeline_to_string
from fastcar_compile.passes.pipeline import PASSES, analysis_pipeline

from .conftest import Fastcar

REPLAY = 'quantize-w4a8,insert-replay{"thresholds": [0.5]},skip-rows'


@pytest.fixture(scope="module")
def analysed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny decoder after analysis, as a graph file."""
    path = tmp_path_factory.mktemp("graphs") / "before.json"
    path.write_text(graph_file_text(after(*analysis_pipeline())))
    return path


@pytest.fixture
def artifact(tmp_path: Path, analysed: Path) -> Path:
    """The folders of an artifact that `opt` reads."""
    (tmp_path / "graph").mkdir()
    (tmp_path / "graph" / "before.json").write_text(analysed.read_text())
    return tmp_path


def test_the_listing_of_a_rewritten_graph(fastcar: Fastcar, analysed: Path) -> None:
    result = fastcar("opt", analysed, "-p", REPLAY)
    assert result.exit_code == 0, result.output
    assert "fastcar.gate.default(tas_default, " in result.stdout
    assert "# layer 0 gate, made by insert-replay, blocks.0.mlp.down" in result.stdout
    assert result.stdout.count("made by skip-rows") == 3
    assert "\nprefill:\n" in result.stdout


def test_a_graph_file_goes_on_where_another_call_stopped(fastcar: Fastcar, artifact: Path, tmp_path: Path) -> None:
    first, *rest = REPLAY.split(",", 1)
    assert fastcar("opt", artifact, "--graph", "before", "-p", first, "-o", tmp_path / "half.json").exit_code == 0
    by_halves = fastcar("opt", tmp_path / "half.json", "-p", *rest, "--json")
    at_once = fastcar("opt", artifact / "graph" / "before.json", "-p", REPLAY, "--json")
    assert json.loads(by_halves.stdout) == json.loads(at_once.stdout)
    assert fastcar("opt", artifact, "-o", tmp_path / "same.json").exit_code == 0
    assert (tmp_path / "same.json").read_text() == (artifact / "graph" / "before.json").read_text()


def test_a_captured_graph_goes_through_the_whole_pipeline(fastcar: Fastcar, tmp_path: Path) -> None:
    path = tmp_path / "captured.json"
    path.write_text(graph_file_text(captured()))
    result = fastcar("opt", path, "-p", pipeline_to_string(analysis_pipeline()), "--no-verify-each")
    assert result.exit_code == 0, result.output
    assert "# layer 0 exit, blocks.0" in result.stdout


def test_print_after_all(fastcar: Fastcar, analysed: Path) -> None:
    result = fastcar("opt", analysed, "-p", "canonicalize,bfloat16-weights", "--print-after-all")
    assert [line for line in result.stderr.splitlines() if line.startswith("====")] == [
        "==== after canonicalize ====",
        "==== after bfloat16-weights ====",
    ]
    assert "linear_half" in result.stderr.partition("==== after bfloat16-weights ====")[2]


def test_the_passes_with_their_options(fastcar: Fastcar) -> None:
    listed = {p["name"]: p for p in json.loads(fastcar("opt", "--list-passes", "--json").stdout)["passes"]}
    assert set(listed) == set(PASSES)
    assert listed["insert-replay"]["options"]["max_chain"] == "int | None"
    text = fastcar("opt", "--list-passes").stdout
    assert "sinks: int, window: int, positions: Literal" in text
    assert "Remove operators that change nothing, in all graphs." in text


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ([], "no graph is given"),
        (["nowhere.json"], "the graph file cannot be read: No such file or directory\n  where: nowhere.json"),
        (["{graph}", "-p", "skip-rows{"], "malformed pipeline text at character 9: '{'"),
        (
            ["{graph}", "-p", 'skip-rows{"couple_cfg": "perhaps"}'],
            "option couple_cfg of pass 'skip-rows' is 'perhaps': Input should be a valid boolean, unable to interpret "
            "input\n  hint:  its type is bool",
        ),
        (["{graph}", "-p", "insert-replay"], "0 thresholds for 1 layer"),
        (["{graph}", "-p", "bfloat16-embedding"], "bfloat16-embedding needs the values of embed.weight"),
        (["{graph}", "-o", "{graph}/x.json"], "the result cannot be written: Not a directory"),
    ],
)
def test_errors(fastcar: Fastcar, analysed: Path, words: list[str], text: str) -> None:
    result = fastcar("opt", *(word.replace("{graph}", str(analysed)) for word in words))
    assert (result.exit_code, result.stdout) == (2, "")
    assert text in result.stderr.removeprefix("error: ")
