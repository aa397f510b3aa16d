"""Artifacts of a schema version open and decode as they did when they were written; what they need is named."""

import json
import platform
import tarfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

import fastcar_compile as fc
from fastcar_compile.artifact.manifest import SCHEMA_VERSION
from fastcar_compile.runtime.backends import cpu

HERE = Path(__file__).parent
KEPT = sorted(int(path.name.split(".")[0].removeprefix("schema_")) for path in HERE.glob("schema_*.tar.xz"))
MAKE = "python tests/compatibility/make.py"


def unpacked(version: int, folder: Path) -> Path:
    with tarfile.open(HERE / f"schema_{version}.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    return folder / "artifact"


@pytest.fixture
def artifact(tmp_path: Path) -> Path:
    """The one of the present schema."""
    return unpacked(SCHEMA_VERSION, tmp_path)


def test_the_present_schema_has_an_artifact() -> None:
    assert KEPT[-1:] == [SCHEMA_VERSION], f"write it, and keep those before it: {MAKE}"


def test_it_decodes_the_same_tokens(artifact: Path) -> None:
    expected = json.loads((HERE / f"schema_{SCHEMA_VERSION}.json").read_text("utf-8"))
    opened = fc.load(artifact, digest=expected["digest"])
    if platform.machine() != "x86_64":
        with pytest.raises(fc.BackendError, match=r"no library for this CPU \(.*\), only for sse4 "):
            opened.session("cpu")
        return
    session = opened.session("cpu")
    assert session.generate(np.array(expected["prompt"]), len(expected["tokens"][0])).tolist() == expected["tokens"]
    assert session.stats.replay_ratio == expected["replay_ratio"]
    assert 0 < session.stats.replay_ratio < 1


@pytest.mark.parametrize("version", [v for v in KEPT if v != SCHEMA_VERSION] or [SCHEMA_VERSION + 1])
def test_another_schema_is_refused_with_both_versions(version: int, artifact: Path, tmp_path: Path) -> None:
    """Older ones as they were kept; before there are any, one that is newer."""
    if version in KEPT:
        path = unpacked(version, tmp_path / "older")
    else:
        path, manifest = artifact, artifact / "manifest.json"
        manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"schema_version": version}))
    text = f"has schema version {version}, this fastcar_compile reads version {SCHEMA_VERSION}"
    with pytest.raises(fc.ArtifactError, match=text) as refused:
        fc.load(path)
    assert "compile the model again, or open it with the release that its manifest names" in str(refused.value)


@pytest.mark.parametrize("producer", [{"tvm": "0.26.1"}, {"tvm": "1.27.0"}, {"tvm": "none"}, {}])
def test_libraries_of_another_tvm_are_refused(producer: Mapping[str, str]) -> None:
    text = rf"the artifact's libraries need TVM '{producer.get('tvm', 'none')}', installed is 0\.27\..*"
    with pytest.raises(fc.BackendError, match=text) as refused:
        cpu.check_tvm(producer)
    assert "compile the model again with this TVM" in str(refused.value)


def test_a_session_asks_for_its_tvm(artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu.metadata, "version", lambda name: {"apache-tvm": "0.28.0"}[name])
    with pytest.raises(fc.BackendError, match=r"need TVM '0\.27\..*', installed is 0\.28\.0"):
        fc.load(artifact).session("cpu")
