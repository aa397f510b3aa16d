"""What other packages register as entry points: a backend, compile side and device side, and a gate."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from agreement import decode
from decoders import llama
from torch import Tensor

import fastcar_compile as fc
from fastcar_compile.codegen.emit import EMITTERS
from fastcar_compile.errors import CompileError
from fastcar_compile.gates import GATES, gate_named
from fastcar_compile.runtime.backends import BACKENDS

# A backend that another package registers: compile side and device side, through entry points.


SITE = Path(__file__).parent / "site"
RUN = """
import sys
import numpy as np
import fastcar_compile as fc
session = fc.load(sys.argv[1]).session("recorder")
print(session.generate(np.array([[1, 2, 3]]), 20).tolist())
assert "torch" not in sys.modules
"""


def install(folder: Path, group: str, point: str) -> None:
    """Write what pip would write for a package that registers something."""
    metadata = folder / "other-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(f"[fastcar_compile.{group}]\n{point}\n")


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
    install(tmp_path, "backends", point)
    monkeypatch.syspath_prepend(SITE)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(fc.BackendError, match=text):
        BACKENDS.load(point.partition(" ")[0] if "gone" in point else "other")


# A gate that another package registers as an entry point: it compiles, and every backend decides alike.


FRAME, LENGTH, ROWS, THRESHOLD = 8, 33, 2, 0.4


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder on sys.path in which packages are installed; the registry forgets them after the test."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    monkeypatch.syspath_prepend(str(tmp_path))
    GATES.forget()
    yield tmp_path
    GATES.forget()


def decoded(artifact: fc.Artifact, backend: str) -> tuple[np.ndarray, Tensor]:
    """Decisions bool [T, L, B] and logits float32 [B, T, V] of one teacher-forced video."""
    session = artifact.session(backend, record=True, threads=1)
    tokens = torch.from_numpy(np.random.default_rng(3).integers(0, 3, (ROWS, LENGTH)))
    logits = decode(session, tokens, 1)
    return np.asarray(session.stats.decisions), logits


def test_a_foreign_gate_decodes_equal_on_every_backend(package: Path) -> None:
    install(package, "gates", "euclidean = euclidean_gate:EuclideanGate")
    replay = fc.ReplayConfig(gate="euclidean", threshold=THRESHOLD, max_chain=2)
    artifact = fc.compile(
        llama(), "cpu", tokens_per_frame=FRAME, max_seq_len=LENGTH, batch_size=ROWS, replay=replay,
        prefill_chunk=1, output=package / "artifact",
    )  # fmt: skip
    assert "inserted gate euclidean: Euclidean change of the MLP input" in artifact.explain(layer=0)
    decisions, logits = decoded(artifact, "eager")
    assert not decisions[:FRAME].any()
    assert 0 < decisions[FRAME:].mean() < 1
    for backend in ("cpu", "onnxruntime"):
        same, close = decoded(artifact, backend)
        np.testing.assert_array_equal(same, decisions, err_msg=backend)
        np.testing.assert_allclose(close, logits, atol=1e-4, err_msg=backend)


def test_a_foreign_gate_is_known_by_name_and_facts(package: Path) -> None:
    with pytest.raises(CompileError, match="unknown gate 'euclidean'; known gates: tas, input_delta"):
        fc.ReplayConfig(gate="euclidean")
    install(package, "gates", "euclidean = euclidean_gate:EuclideanGate")
    GATES.forget()
    assert list(GATES)[-1] == "euclidean"
    assert fc.ReplayConfig(gate="euclidean").threshold == gate_named("euclidean").default_threshold == 0.1


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        (
            "euclidean",
            "euclidean_gate:Euclidean",
            "gate 'euclidean' cannot be loaded: module 'euclidean_gate' has no attribute 'Euclidean'",
        ),
        ("euclidean", "euclidean_gate:dataclass", "gate 'euclidean' is not a gate class"),
        ("summit", "euclidean_gate:EuclideanGate", "gate 'summit' has a name that does not fit"),
    ],
)
def test_a_package_that_registers_no_gate_is_named(package: Path, name: str, value: str, text: str) -> None:
    install(package, "gates", f"{name} = {value}")
    with pytest.raises(CompileError) as caught:
        gate_named(name)
    assert text in str(caught.value)
    assert caught.value.where == f"entry point {value!r} of group 'fastcar_compile.gates'"
