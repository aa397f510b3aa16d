"""An artifact on disk, opened: manifest, graphs, explanation and sessions."""

from __future__ import annotations

import json
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor, fx

import fastcar_compile.ops  # noqa: F401  (registers the operators)
from fastcar_compile.artifact.explain import explain_node, explain_program
from fastcar_compile.artifact.store import Manifest, load_tensors, read_manifest, verify_files, write_section
from fastcar_compile.artifact.tensor_files import weight_files
from fastcar_compile.artifact.thresholds import Thresholds
from fastcar_compile.errors import ArtifactError
from fastcar_compile.gates import gate_named
from fastcar_compile.ir.program import DecoderConfig, DecoderProgram, StateSpec
from fastcar_compile.ir.program_json import config_from_json, program_from_json, sites_from_json, state_from_json
from fastcar_compile.ir.sites import LayerSite
from fastcar_compile.runtime.session import Session


def load(path: str | Path) -> Artifact:
    """Open an artifact. Every file's sha256 is checked before anything is loaded.

    Raises:
        ArtifactError: missing, damaged, tampered with, or of another schema version.
    """
    return Artifact(Path(path))


class Artifact:
    """A compiled decoder.

    Attributes:
        path: its folder.
        manifest: schema and producer versions, config, target, state, sites, sha256 of every file.
    """

    def __init__(self, path: Path, original: fx.GraphModule | None = None) -> None:
        self.path = Path(path)
        self.manifest: Manifest = read_manifest(self.path)
        verify_files(self.path, self.manifest)
        self._original = original

    @cached_property
    def config(self) -> DecoderConfig:
        """Sizes of the decoder."""
        return config_from_json(self.manifest.sections["decoder"])

    @cached_property
    def sites(self) -> list[LayerSite]:
        """Where each layer's attention and MLP are."""
        return sites_from_json(self.manifest.sections["sites"])

    @cached_property
    def params(self) -> dict[str, Tensor]:
        """Every parameter of the rewritten graph, by name."""
        found: dict[str, Tensor] = {}
        for name in weight_files(self.manifest.files, "weights/model"):
            found |= load_tensors(self.path / name)
        return found

    @cached_property
    def state(self) -> list[StateSpec]:
        """What a session keeps from step to step. (A session that runs a library needs no graph.)"""
        return state_from_json(self.manifest.sections["state"])

    @cached_property
    def program(self) -> DecoderProgram:
        """The rewritten program."""
        return program_from_json(self._json("graph/after.json"), self.params)

    @property
    def graph(self) -> fx.GraphModule:
        """The rewritten decode step, runnable in eager PyTorch."""
        return self.program.graph_module

    @cached_property
    def original_graph(self) -> fx.GraphModule:
        """The decode step before the rewrite.

        Straight after `compile` it runs. A loaded artifact keeps no float copy of quantised weights: there they are
        tensors on the meta device, so that the graph can be read but not run.
        """
        if self._original is not None:
            return self._original
        data = self._json("graph/before.json")
        return program_from_json(data, self.params, missing_on_meta=True).graph_module

    def explain(self, layer: int | None = None, node: str | None = None) -> str:
        """What was found, inserted and cached, per layer (or one layer, or one node of the rewritten graph), and why.

        Raises:
            InputError: no such layer or node.
        """
        if node is not None:
            return explain_node(self.graph, node)
        pipeline = self.manifest.sections["pipeline"]
        accelerator = self.manifest.sections["accelerator"]
        return explain_program(self.config, self.sites, self.program.state, pipeline, layer, accelerator)

    @property
    def thresholds(self) -> Thresholds | None:
        """The calibrated thresholds that are stored in the artifact, if there are any."""
        data = self.manifest.sections.get("thresholds")
        return None if data is None else Thresholds.from_json(data, str(self.path))

    def store_thresholds(self, thresholds: Thresholds | None) -> None:
        """Keep thresholds in the artifact's manifest, where sessions find them; None: back to the compiled ones.

        Nothing is compiled again; open sessions keep what they have.

        Raises:
            ArtifactError: they belong to another gate or number of layers, or the artifact cannot be written.
        """
        if thresholds is not None:
            thresholds.check([s.replay and s.replay.gate for s in self.sites], str(self.path))
        self.manifest = write_section(self.path, "thresholds", None if thresholds is None else thresholds.to_json())

    def session(
        self,
        backend: str = "cpu",
        record: bool = False,
        threads: int | None = None,
        thresholds: Thresholds | str | Path | None = None,
    ) -> Session:
        """Open a session.

        Args:
            backend: cpu (TVM) | onnxruntime | hls-csim | eager | board (docs/tutorial/board.md).
            record: keep every replay decision for `session.stats.decisions`.
            threads: CPU threads; default: every core that the process may use.
            thresholds: calibrated ones, or their file; default: those stored in the artifact, else those compiled in.

        Raises:
            ArtifactError: thresholds of another gate or number of layers.
            BackendError: unknown backend, or one that cannot run here.
        """
        from fastcar_compile.runtime.backends import open_backend

        given = Thresholds.load(thresholds) if isinstance(thresholds, str | Path) else thresholds or self.thresholds
        compiled = [s.threshold for s in self.sites]
        gates = {s.replay.gate for s in self.sites if s.replay is not None}
        never = gate_named(gates.pop()).comparison.never if gates else float("inf")
        opened = open_backend(self, backend, threads)
        session = Session(opened, self.config, compiled, record=record, never=never)
        if given is not None:
            given.check([s.replay and s.replay.gate for s in self.sites], str(self.path))
            session.set_threshold(given.values)
        return session

    def _json(self, name: str) -> Any:
        try:
            return json.loads((self.path / name).read_text("utf-8"))
        except (OSError, ValueError) as error:
            raise ArtifactError(f"{name} cannot be read: {error}", where=str(self.path)) from error
