"""A fake artifact and fake sessions, so that the commands' own behaviour is tested without compiling anything."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from manifests import sections
from numpy.typing import NDArray
from typer.testing import CliRunner, Result

import fastcar_compile
from fastcar_compile.artifact.digest import FileEntry
from fastcar_compile.artifact.manifest import Manifest
from fastcar_compile.cli import app
from fastcar_compile.config import CompileConfig, ReplayConfig
from fastcar_compile.config.models import Jacobi
from fastcar_compile.errors import BackendError
from fastcar_compile.ir.types import DecoderConfig
from fastcar_compile.runtime.sampling import Sampling

Fastcar = Callable[..., Result]
"""Runs a command line, given word by word."""

ROWS, LAYERS, FRAME, LENGTH, VOCAB = 2, 3, 4, 32, 17


class FakeSession:
    """Logits that depend on the token only, plus `error` at step `at`; from the second frame on, layer 0 replays."""

    def __init__(self, error: float = 0.0, flip: bool = False, at: int = 5) -> None:
        self.error, self.flip, self.at = error, flip, at
        self.thresholds: float | Sequence[float | None] | None = None
        self.stats = SimpleNamespace(
            replay_ratio=0.0, per_layer=[0.0] * LAYERS, forwards=0, tokens_per_step=1.0, decisions=None
        )
        self._trace: list[NDArray[np.bool_]] = []

    def set_threshold(self, threshold: float | Sequence[float | None]) -> None:
        self.thresholds = threshold

    def prefill(self, ids: NDArray[np.int64]) -> NDArray[np.float32]:
        assert ids.shape[0] == ROWS
        return self._logits(ids[:, -1])

    def step(self, ids: NDArray[np.int64]) -> NDArray[np.float32]:
        decision = np.zeros((LAYERS, ROWS), np.bool_)
        step = len(self._trace)
        decision[0] = step >= FRAME
        decision[1, 0] = self.flip and step == 6
        self._trace.append(decision)
        self.stats.decisions = np.stack(self._trace)
        self.stats.forwards = len(self._trace)
        self.stats.per_layer = list(self.stats.decisions.mean((0, 2)))
        self.stats.replay_ratio = float(self.stats.decisions.mean())
        return self._logits(ids) + (self.error if step == self.at else 0.0)

    def generate(
        self,
        prompt: NDArray[np.int64],
        num_tokens: int,
        sample: Sampling,
        on_token: Callable[[Any], object],
        jacobi: Jacobi | None = None,
    ) -> NDArray[np.int64]:
        choose = sample.start(prompt)
        tokens: list[NDArray[np.int64]] = []
        while len(tokens) < num_tokens:
            tokens.append(choose(self.step(tokens[-1]) if tokens else self.prefill(prompt)))
            on_token(tokens[-1])
        return np.stack(tokens, 1)

    @staticmethod
    def _logits(ids: NDArray[np.int64]) -> NDArray[np.float32]:
        return np.eye(VOCAB, dtype=np.float32)[(ids + 1) % VOCAB]


@dataclass
class FakeArtifact:
    """What `fc.load` and `fc.compile` return here; `make` builds the session of a backend."""

    path: Path
    make: dict[str, Callable[[], FakeSession]] = field(default_factory=dict)
    sessions: list[FakeSession] = field(default_factory=list)
    graph: str = "graph after: cond"
    digest: str = f"sha256:{'0' * 64}"
    original_graph: str = "graph before: mlp"
    options: dict[str, Any] = field(default_factory=dict[str, Any])

    @property
    def manifest(self) -> Manifest:
        sizes: dict[str, Any] = {"batch_size": ROWS, "max_seq_len": LENGTH, "tokens_per_frame": FRAME, **self.options}
        config = CompileConfig(target="zcu102", replay=ReplayConfig(threshold=[2, None, math.inf]), **sizes)
        files = {"graph/after.txt": FileEntry(sha256="ab" * 32, size=2_000_000)}
        return Manifest(producer={"torch": "2.13.0"}, files=files, **dict(sections(options=config)))

    @property
    def config(self) -> DecoderConfig:
        return self.manifest.decoder.config

    def explain(self, layer: int | None = None, node: str | None = None) -> str:
        return f"explained layer={layer} node={node}"

    def session(
        self, backend: object = "cpu", record: bool = False, threads: int | None = None, thresholds: object = None
    ) -> FakeSession:
        backend = backend if isinstance(backend, str) else "perturbed"
        if backend not in self.make:
            raise BackendError(f"unknown backend {backend!r}", hint=f"known: {', '.join(sorted(self.make))}")
        self.sessions.append(self.make[backend]())
        return self.sessions[-1]


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeArtifact:
    """The artifact that every command gets from `fc.load` in this test."""
    artifact = FakeArtifact(tmp_path / "artifact", dict.fromkeys(("eager", "cpu", "onnxruntime"), FakeSession))
    monkeypatch.setattr(fastcar_compile, "load", lambda path, **_: artifact)
    return artifact


def refused(result: Result, *texts: str) -> None:
    """Check that a command ended with a user error that says these texts."""
    assert result.exit_code == 2, result.output
    said = " ".join(result.stderr.split())
    assert [text for text in texts if text not in said] == []


@pytest.fixture
def fastcar() -> Fastcar:
    """Runs `fastcar` with the given words, in this process."""
    return lambda *words: CliRunner().invoke(app, [str(word) for word in words])
