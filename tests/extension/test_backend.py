"""A backend that another package registers: compile side and device side, through entry points."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from decoders import llama

import fastcar_compile as fc
from fastcar_compile.codegen.emit import EMITTERS
from fastcar_compile.runtime.backends import BACKENDS

SITE = Path(__file__).parent / "site"
RUN = """
import sys
import numpy as np
import fastcar_compile as fc
session = fc.load(sys.argv[1]).session("recorder")
print(session.generate(np.array([[1, 2, 3]]), 20).tolist())
assert "torch" not in sys.modules
"""


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> fc.Artifact:
    folder = tmp_path_factory.mktemp("extension") / "artifact"
    replay = fc.ReplayConfig(threshold=-100.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(SITE)
        return fc.compile(llama(), target="cpu", tokens_per_frame=8, replay=replay, prefill_chunk=1, output=folder)


def test_it_decodes_like_the_backend_that_it_wraps(artifact: fc.Artifact, tmp_path: Path) -> None:
    """In a fresh process, which finds the package by its installed metadata and loads no compiler."""
    record = tmp_path / "record.txt"
    environment = os.environ | {"PYTHONPATH": f"{SITE}:{Path(fc.__file__).parents[1]}", "FASTCAR_RECORD": str(record)}
    command = [sys.executable, "-c", RUN, str(artifact.path)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    session = artifact.session("cpu", record=True)
    assert done.stdout.strip() == str(session.generate(np.array([[1, 2, 3]]), 20).tolist())
    columns, *lines = record.read_text().splitlines()
    assert columns.split() == (artifact.path / "recorder" / "columns.txt").read_text().split()
    expected = session.stats.decisions.all(2).astype(int)
    assert [line.split() for line in lines] == [[str(n) for n in row] for row in expected]
    assert expected.any()


def test_the_manifest_keeps_its_section(artifact: fc.Artifact) -> None:
    assert artifact.manifest.extensions.keys() == {"recorder"}
    assert "recorder/columns.txt" in artifact.manifest.files


def test_names_come_with_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "recorder" not in BACKENDS.names()
    with pytest.raises(fc.BackendError, match="unknown backend 'recorder'"):
        BACKENDS.load("recorder")
    monkeypatch.syspath_prepend(SITE)
    assert BACKENDS.names()[-1] == EMITTERS.names()[-1] == "recorder"


@pytest.mark.parametrize(
    ("point", "text"),
    [
        ("cpu = fastcar_recorder.backend:open_stepper", "backend 'cpu' is registered twice"),
        ("gone = fastcar_recorder.gone:open_stepper", "backend 'gone' cannot be imported: No module named"),
    ],
)
def test_registrations_that_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, point: str, text: str) -> None:
    info = tmp_path / "other-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[fastcar_compile.backends]\n{point}\n")
    monkeypatch.syspath_prepend(SITE)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(fc.BackendError, match=text):
        BACKENDS.load(point.partition(" ")[0] if "gone" in point else "other")
