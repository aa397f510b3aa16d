"""`fastcar inspect`."""

import json
from typing import cast

import pytest
from manifests import layer_part, sections, stored_thresholds

import fastcar_compile as fc
from fastcar_compile.artifact.explain import explain
from fastcar_compile.artifact.manifest import SCHEMA_VERSION, Manifest
from fastcar_compile.artifact.sections import LayersSection
from fastcar_compile.cli.inspect import _show_summary
from fastcar_compile.ir.types import ReplayFacts

from .conftest import FakeArtifact, Fastcar


@pytest.mark.usefixtures("fake")
def test_summary(fastcar: Fastcar) -> None:
    result = fastcar("inspect", "x")
    assert result.exit_code == 0
    title, *lines = result.stdout.splitlines()
    assert title.endswith("artifact: 3 layers, 1 file, 2.0 MB")
    assert lines[1:4] == [
        "target      zcu102",
        "decoder     3 layers of 128, 4 tokens per frame, 32 positions, 2 rows",
        "numbers     weights none, KV cache float32, numerics native",
    ]
    assert "gate        none: the dense decoder" in lines
    assert f"digest  sha256:{'0' * 64}" in lines
    assert lines[-2:] == ["folder  files    size  kinds", "graph/      1  2.0 MB  1 .txt"]


def test_summary_as_json(fastcar: Fastcar, fake: FakeArtifact) -> None:
    data = json.loads(fastcar("inspect", "x", "--json").stdout)
    assert data["path"] == str(fake.path)
    assert (data["num_layers"], data["bytes"], data["schema_version"]) == (3, 2_000_000, SCHEMA_VERSION)


@pytest.mark.usefixtures("fake")
@pytest.mark.parametrize(
    ("words", "key", "text"),
    [
        (["--before"], "graph", "graph before: mlp"),
        (["--after"], "graph", "graph after: cond"),
        (["--explain"], "explain", "explained layer=None node=None"),
        (["--explain", "--layer", "2"], "explain", "explained layer=2 node=None"),
        (["--explain", "--node", "tas"], "explain", "explained layer=None node=tas"),
    ],
)
def test_texts(fastcar: Fastcar, words: list[str], key: str, text: str) -> None:
    assert fastcar("inspect", "x", *words).stdout == text + "\n"
    assert json.loads(fastcar("inspect", "x", *words, "--json").stdout) == {key: text}


def test_the_thresholds_are_those_in_use(fake: FakeArtifact, capsys: pytest.CaptureFixture[str]) -> None:
    """Of a calibration that the artifact keeps, not those that it was compiled with."""
    layers = tuple(layer_part(layer, ReplayFacts(2.0, "tas")) for layer in range(3))
    compiled = sections(layers=LayersSection(layers=layers))
    found = compiled.model_copy(update={"thresholds": stored_thresholds(5.0, None, 7.0)})
    rules = [line.partition("; ")[2] for line in explain(found).splitlines() if "inserted gate" in line]
    assert len(rules) == 3
    for rule, text in zip(rules, (">= 5 as calibrated, compiled with 2", "never replaying as", ">= 7 as"), strict=True):
        assert text in rule
    assert "calibrated" not in explain(compiled)
    kept = Manifest(producer={}, files={}, **dict(found))
    artifact = type("Kept", (), {"manifest": kept, "path": fake.path, "digest": fake.digest})()
    _show_summary(cast("fc.Artifact", artifact), 0)
    assert "tas in 2 of 3 layers, threshold 5 to 7" in capsys.readouterr().out
