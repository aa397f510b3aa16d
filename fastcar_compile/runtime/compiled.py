"""An artifact on disk, opened: manifest, graphs, explanation and sessions."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastcar_compile.artifact.digest import Digests, UserDigests
from fastcar_compile.artifact.explain import Described, Description, decoder_fields, explain, gate_text
from fastcar_compile.artifact.layout import GRAPH_AFTER, GRAPH_BEFORE, SIGNATURE
from fastcar_compile.artifact.reader import StoredArtifact
from fastcar_compile.artifact.sections import State
from fastcar_compile.artifact.thresholds import Thresholds
from fastcar_compile.artifact.trust import Requirements
from fastcar_compile.artifact.writer import store_thresholds
from fastcar_compile.errors import SignatureError
from fastcar_compile.ir.types import DecoderConfig
from fastcar_compile.runtime.backends.base import OpenStepper, opened
from fastcar_compile.runtime.depth import DepthHead
from fastcar_compile.runtime.session import Session
from fastcar_compile.support.packages import needs
from fastcar_compile.support.values import check_kind, path_of, whole

if TYPE_CHECKING:
    from torch import Tensor, fx

    from fastcar_compile.ir.program import DecoderProgram
    from fastcar_compile.ir.types import LayerSite


def load(
    path: str | Path,
    *,
    digest: str | None = None,
    require_signature: str | Path | None = None,
    reread: bool = True,
) -> Artifact:
    """Open an artifact. Every file's sha256 is checked before anything is loaded.

    A session loads the bytes that were checked, whatever is in the folder by then: an artifact keeps its files open
    until it is closed or collected. It is a context manager that closes itself, and its sessions outlive it.

    An artifact holds native code, and its manifest has the hashes of its files. So the hashes show damage, and not who
    made the artifact: give `digest` or `require_signature` for that. Every given argument must hold.

    Args:
        digest: the only digest to accept, as `compile` printed it: `sha256:` and 64 hex digits.
        require_signature: the public key (PEM file) of the signer.
        reread: False: a large file that was read before with `reread=False`, and whose device, inode, size and times
            are the same by now, is not read again. The digests are in $FASTCAR_CACHE. It is for big models on a file
            system that only you and root can write.

    Raises:
        ArtifactError: the artifact is missing, damaged, tampered with, or of another schema version.
        SignatureError: an ArtifactError: the digest differs, or the signature is missing, or is of another signer or
            another artifact.
        InputError: the digest or the key cannot be read.
        UserError: with `reread=False`: other users may write the kept digests, or they cannot be kept.
    """
    place = path_of("the artifact", path)
    check_kind("reread", reread, bool, "True or False")
    trust = Requirements.of(digest=digest, require_signature=require_signature)
    if reread:
        return Artifact(place, trust=trust)
    digests = UserDigests()
    artifact = Artifact(place, trust=trust, digests=digests)
    digests.save()
    return artifact


class Artifact(Described, StoredArtifact):
    """A compiled decoder. Sessions need neither torch nor the compiler; graphs and parameters need torch.

    Attributes:
        path: folder of the artifact.
        digest: digest of its manifest, `sha256:` and 64 hex digits, to be pinned with `load(path, digest=…)`.
        manifest: its typed sections, and sha256 and size of every file.
    """

    def __init__(
        self,
        path: Path,
        *,
        trust: Requirements | None = None,
        digests: Digests | None = None,
    ) -> None:
        super().__init__(path_of("the artifact", path), trust, digests)
        self._trusted = bool(trust)

    @property
    def config(self) -> DecoderConfig:
        """Sizes of the decoder."""
        return self.manifest.decoder.config

    @property
    def state(self) -> tuple[State, ...]:
        """The states that a session keeps from decode step to decode step."""
        return self.manifest.decoder.state

    @property
    def sites(self) -> list[LayerSite]:
        """The places of each layer's attention and MLP in the rewritten graph."""
        return self.program.sites

    @cached_property
    def params(self) -> dict[str, Tensor]:
        """Every parameter of the rewritten graph, by name."""
        with needs("compile"):
            from fastcar_compile.artifact.programs import read_params

        return read_params(self)

    @cached_property
    def program(self) -> DecoderProgram:
        """The rewritten program."""
        return self._program(GRAPH_AFTER)

    def _program(self, name: str, *, missing_on_meta: bool = False) -> DecoderProgram:
        with needs("compile"):
            from fastcar_compile.artifact.programs import program_from_json

        return program_from_json(self.json(name), self.params, missing_on_meta=missing_on_meta)

    @property
    def graph(self) -> fx.GraphModule:
        """The rewritten decode step, runnable in eager PyTorch; `graph.print_readable()` prints it."""
        return self.program.graph_module

    @cached_property
    def original_graph(self) -> fx.GraphModule:
        """The decode step before the rewrite.

        An artifact has no float copy of quantised weights: they are tensors on the meta device, so that the graph can
        be read but not run.
        """
        return self._program(GRAPH_BEFORE, missing_on_meta=True).graph_module

    def _description(self) -> Description:
        gate = gate_text(self.manifest.layers.gates, self.manifest.thresholds_in_use)
        return f"Artifact {self.path}", {**decoder_fields(self.manifest), "gate": gate, "digest": self.digest}

    def explain(self, layer: int | None = None, node: str | None = None) -> str:
        """Return what was found, inserted and cached, and why: of every layer, one layer, or one node of the graph.

        Raises:
            InputError: the graph has no such layer or node.
        """
        if node is None:
            return explain(self.manifest, layer)
        with needs("compile"):
            from fastcar_compile.ir.text import explain_node

        return explain_node(self.graph, node, self.manifest.pipeline.reason)

    @property
    def thresholds(self) -> Thresholds | None:
        """The calibrated thresholds that the artifact stores, or None."""
        return self.manifest.thresholds

    def store_thresholds(self, thresholds: Thresholds | None, *, drop_signature: bool = False) -> None:
        """Keep thresholds in the artifact's manifest, where sessions find them; None: back to the compiled thresholds.

        Nothing is compiled again; open sessions keep what they have. The artifact has another digest afterwards. The
        replay that is expected of other videos is not kept.

        Args:
            drop_signature: go on where the artifact is signed, or was opened with a pinned digest. Its signature
                is removed, because it would not hold any more.

        Raises:
            SignatureError: the artifact is signed or pinned, and `drop_signature` is not given.
            ArtifactError: the thresholds belong to another gate or number of layers, or the artifact cannot be written.
        """
        check_kind("thresholds", thresholds, (Thresholds, type(None)), "Thresholds, or None")
        if thresholds is not None:
            thresholds.check(self.manifest.layers.gates, str(self.path))
            # The estimate belongs to the calibration's file: an artifact stores the thresholds alone.
            thresholds = thresholds.model_copy(update={"expected": None})
        if not drop_signature:
            self._refuse_to_break_trust()
        self.manifest, self.digest = store_thresholds(self.path, self.manifest, thresholds)
        self._trusted = False

    def _refuse_to_break_trust(self) -> None:
        signed = (self.path / SIGNATURE).exists()
        if signed or self._trusted:
            kind = "signed" if signed else "trusted by its digest"
            what = f"the artifact is {kind}, and other thresholds in its manifest would end that"
            hint = "keep the thresholds in a file for sessions, or drop the signature and sign again afterwards"
            raise SignatureError(what, where=str(self.path), hint=hint)

    def session(
        self,
        backend: str | OpenStepper = "cpu",
        record: bool = False,
        threads: int | None = None,
        thresholds: Thresholds | str | Path | None = None,
        keep: int = 0,
        depth: Artifact | None = None,
    ) -> Session:
        """Open a session.

        Args:
            backend: cpu (TVM) | onnxruntime | hls-csim | eager | board (docs/tutorial/board.md), or a backend
                that another package registers, or a function that opens a stepper.
            record: keep every replay decision for `session.stats.decisions`.
            threads: CPU threads, 1 up to the cores that the process may run on; default: every usable core.
            thresholds: calibrated thresholds, or their file; default: the stored thresholds, else the compiled ones.
            keep: tokens that `Session.rewind` can take back. What they overwrite is kept: their rows of rings and slots
                of replay (`fastcar inspect` gives the bytes of a token).
            depth: the artifact of a depth head, for a decoder whose positions have several codes. It runs on the same
                backend with as many threads.

        Raises:
            ArtifactError: the thresholds belong to another gate or number of layers.
            BackendError: the backend is unknown, cannot run here, or takes no tokens back.
            InputError: `threads` or `keep` is not a whole number, or is too large; or the depth head does not fit.
        """
        check_kind("thresholds", thresholds, (Thresholds, str, Path, type(None)), "Thresholds, or their file")
        given = Thresholds.load(thresholds) if isinstance(thresholds, str | Path) else thresholds
        keep, stepper = whole("keep", keep, 0), opened(self, backend, threads)
        name = backend if isinstance(backend, str) else "a backend of the caller's"
        place = {"artifact": str(self.path), "digest": self.digest}
        origin = {"backend": name, **place, **decoder_fields(self.manifest)}
        layers, config = self.manifest.layers, self.manifest.decoder.config
        check_kind("depth", depth, (Artifact, type(None)), "the artifact of a depth head, or None")
        head = None if depth is None else DepthHead(opened(depth, backend, threads), depth.config, config)
        options: dict[str, Any] = {"record": record, "keep": keep, "origin": origin, "depth": head}
        options["jacobi"] = self.manifest.options.jacobi
        session = Session(stepper, config, layers.thresholds, gate=layers.gate, **options)
        if (values := given or self.thresholds) is not None:
            session.set_threshold(values)
        return session
