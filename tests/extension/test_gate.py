"""A gate that another package registers as an entry point: it compiles, and every backend decides alike."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from agreement import decode
from decoders import llama
from torch import Tensor

import fastcar_compile as fc
from fastcar_compile.errors import CompileError
from fastcar_compile.gates import GATES, gate_named

FRAME, LENGTH, ROWS, THRESHOLD = 8, 33, 2, 0.4


def install(folder: Path, value: str, name: str = "euclidean") -> None:
    """Write what pip would write for a package that registers the gate."""
    metadata = folder / f"{name}_package-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}_package\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(f"[fastcar_compile.gates]\n{name} = {value}\n")


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
    install(package, "euclidean_gate:EuclideanGate")
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
    install(package, "euclidean_gate:EuclideanGate")
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
    install(package, value, name)
    with pytest.raises(CompileError) as caught:
        gate_named(name)
    assert text in str(caught.value)
    assert caught.value.where == f"entry point {value!r} of group 'fastcar_compile.gates'"
