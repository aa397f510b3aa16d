"""`fastcar inspect`."""

import json

import pytest

from fastcar_compile.artifact.manifest import SCHEMA_VERSION

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
