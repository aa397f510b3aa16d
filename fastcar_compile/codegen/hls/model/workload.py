"""What is decoded and how, with what a gate costs: the question that the hardware model answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from fastcar_compile.artifact.engine import MlpSpec
from fastcar_compile.artifact.manifest import Manifest
from fastcar_compile.artifact.reader import StoredArtifact
from fastcar_compile.artifact.sections import DecoderSection
from fastcar_compile.codegen.hls.control_table.builder import GateScore, build_table
from fastcar_compile.codegen.hls.control_table.table import AttentionShape, DrsTable
from fastcar_compile.codegen.hls.design.design import Design
from fastcar_compile.codegen.hls.design.exploration import KernelSpec
from fastcar_compile.codegen.hls.design.memory import Footprint, held
from fastcar_compile.codegen.hls.design.spec import DraftSpec, LinearSpec, StepSpec
from fastcar_compile.codegen.hls.model.shapes import DecoderShape, shape_of_sections
from fastcar_compile.codegen.hls.step_program.program import StepProgram, read_program
from fastcar_compile.config import CompileConfig, ReplayConfig
from fastcar_compile.config.formats import ACCELERATED, KV_TYPES, kv_type
from fastcar_compile.config.targets import Target
from fastcar_compile.errors import InputError
from fastcar_compile.gates import GATES, decided_on_accelerator
from fastcar_compile.gates.draft import DraftSize
from fastcar_compile.gates.registry import GateKind
from fastcar_compile.gates.weights import weight_bytes
from fastcar_compile.ir.types import LayerSite
from fastcar_compile.support.values import whole

CHANGE_FLOPS = 4
"""Per element of the MLP's input: a subtraction, two absolute values, a sum; the relative change and what a network
reads cost about the same."""

DEFAULT_UNITS = 16
"""Hidden units of gate `learned` where the estimate is of no artifact."""


@dataclass(frozen=True)
class GateModel:
    """The gate of every layer.

    Args:
        name: in `fastcar_compile.gates.GATES`. units: hidden units of a network; 0: it has none.
        on_host: whether the host decides; else the accelerator's controller does.
    """

    name: str = "tas"
    units: int = 0
    on_host: bool = False

    @classmethod
    def named(cls, name: str, units: int | None = None) -> GateModel:
        """Return the gate with its usual options.

        Raises:
            InputError: unknown, or units for a gate without a network.
        """
        if name not in GATES:
            raise InputError(f"unknown gate {name!r}", hint=f"known gates: {', '.join(GATES)}")
        if units is not None and not GATES[name].takes_weights:
            raise InputError(f"gate {name!r} has no hidden units", hint="leave them out, or choose gate learned")
        hidden = whole("the gate's units", DEFAULT_UNITS if units is None else units, 1)
        own = hidden if GATES[name].takes_weights else 0
        return cls(name, own, not decided_on_accelerator(name))

    @classmethod
    def of_sections(cls, replay: ReplayConfig | None, layers: Sequence[LayerSite]) -> GateModel:
        """Return the gate of an artifact, with the most units of any layer."""
        gated = [layer.replay for layer in layers if layer.replay is not None]
        if replay is None or not gated:
            return cls()
        units = max(part.gate_units or 0 for part in gated)
        return cls(replay.gate, units, not decided_on_accelerator(replay.gate))

    @property
    def kind(self) -> GateKind:
        """What the accelerator's controller is built for; TAS where the host decides."""
        return GateKind.TAS if self.on_host else GateKind[self.name.upper()]

    @property
    def caches_input(self) -> bool:
        """Whether the MLP's input is kept, so that the norm before the MLP is computed for rows that replay too."""
        return GATES[self.name].caches_input

    def cache_bytes(self, shape: DecoderShape, rows: int) -> int:
        """Return the bytes of all layers' gate caches: the MLP's input of every slot, as large as the MLP cache."""
        return shape.mlp_cache_bytes(rows) if self.caches_input else 0

    def weight_bytes(self, shape: DecoderShape) -> int:
        """Return the bytes of the networks of all layers."""
        return shape.layers * weight_bytes(self.units, shape.hidden) if self.units else 0

    def moved_bytes(self, shape: DecoderShape, rows: int) -> int:
        """Return the bytes of one layer's decision on the host: the network, per row an input read and one written."""
        row = 2 * 4 * shape.hidden if self.caches_input else 0
        return self.weight_bytes(shape) // shape.layers + rows * row

    def flops(self, shape: DecoderShape, rows: int) -> int:
        """Return the operations of one layer's decision on the host."""
        per_row = CHANGE_FLOPS * shape.hidden if self.caches_input else 0
        per_row += 2 * self.units * 2 * shape.hidden
        per_row += GATES[self.name].flops_per_query_element * shape.heads * shape.head_dim
        return rows * per_row

    def to_json(self, shape: DecoderShape, rows: int) -> dict[str, Any]:
        """Return plain values, for a result."""
        return {
            "name": self.name,
            "decided_on": "host" if self.on_host else "accelerator",
            "units": self.units,
            "cache_bytes": self.cache_bytes(shape, rows),
            "weight_bytes": self.weight_bytes(shape),
        }


TAS = GateModel()
"""The paper's gate on the accelerator's unit."""


# What is decoded.


Offload = Literal["mlp", "linears", "all"]


@dataclass(frozen=True)
class Workload:
    """What is decoded and how.

    Args:
        context: positions that attention reads.
        batch: rows B. rows: of each video, with a position each; they share its keys, values and slots.
        offload: what the fabric computes: the MLPs; every linear; or, "all", the whole step.
        kv: what keys and values are cached as, a name of `fastcar_compile.config.formats.KV_TYPES`.
        replay: share of (forward, layer, row) that replays, all forwards counted.
        sink_window: sinks and window of sparse attention, tokens; None: attention over the whole context.
        kv_rows: rows of a key or value cache; None: as many as attention reads.
        gate: what decides, where something replays.
        couple_cfg: rows b and b + batch / 2 are a guidance pair, which replays only together.
        memory: of the compiled decoder; None: that of the shape.
        accepted: tokens of a video that a launch of coupled decoding accepts in the mean; None: it is not known.
        drafts: of each layer, with offload "all"; None: a layer without one. (): no layer has one.
    """

    shape: DecoderShape
    quant: str
    context: int
    batch: int = 1
    offload: Offload = "linears"
    kv: str = "int8"
    replay: float = 0.0
    sink_window: tuple[int, int] | None = None
    kv_rows: int | None = None
    gate: GateModel = TAS
    couple_cfg: bool = False
    memory: Footprint | None = None
    rows: int = 1
    drafts: tuple[DraftSize | None, ...] = ()
    accepted: float | None = None

    def check(self) -> None:
        """Raise InputError when a figure is out of range."""
        whole, gate = self.offload == "all", self.gate
        problems = [
            (not 0 <= self.replay <= 1, f"replay = {self.replay} (0 to 1)"),
            (self.context < 1, f"context = {self.context} (at least 1)"),
            (not 1 <= self.batch <= 32, f"batch = {self.batch} (1 to 32)"),
            (self.quant not in ACCELERATED, f'quant = "{self.quant}" (the engine is int8: {" or ".join(ACCELERATED)})'),
            (self.kv not in KV_TYPES, f'kv = "{self.kv}" ({", ".join(KV_TYPES)})'),
            (whole and self.kv != "int8", f'kv = "{self.kv}" with offload = "all" (int8)'),
            (whole and gate.on_host and self.replay, f'gate {gate.name} with offload = "all" (it decides on the host)'),
            (self.rows < 1 or self.batch % self.rows > 0, f"batch = {self.batch} with rows = {self.rows} (a multiple)"),
            (self.rows > 1 and not whole, f'rows = {self.rows} with offload = "{self.offload}" (all)'),
            (
                self.accepted is not None and not 1 <= self.accepted <= self.rows,
                f"acceptance = {self.accepted} (1 to {self.rows}, the rows of a video)",
            ),
            (self.couple_cfg and self.batch % 2, f"guidance pairs of batch = {self.batch} (an even number of rows)"),
            (self.drafts and not whole, f'drafts with offload = "{self.offload}" (all: else the host computes them)'),
            (
                self.drafts and not gate.kind.reads_input,
                f"drafts with gate {gate.name} (one that keeps the MLP's input)",
            ),
        ]
        wrong = [text for refused, text in problems if refused]
        if wrong:
            raise InputError(f"the estimate cannot be made: {'; '.join(wrong)}", hint="change the values named")

    def with_drafts(self, share: float) -> Workload:
        """Return the same with a draft of about this share of the MLP's weights in each layer; 0: without drafts.

        Raises:
            InputError: the least draft is larger than the MLP.
        """
        return replace(self, drafts=self.shape.drafts(share), memory=None)

    @property
    def attended(self) -> int:
        """Positions that attention reads."""
        return self.context if self.sink_window is None else min(self.context, sum(self.sink_window))

    @property
    def cached_rows(self) -> int:
        """Rows of a key or value cache."""
        return self.kv_rows or self.attended

    @property
    def filled(self) -> int:
        """Rows of the cache that hold a position: a kernel of whole steps reads them all."""
        return min(self.context, self.cached_rows)

    def kernel_spec(self) -> KernelSpec:
        """Return what the kernel has to do."""
        drafts = [DraftSpec(n, own.neurons, own.rank) for n, own in enumerate(self.drafts) if own is not None]
        return KernelSpec(self.mlp_spec(), self.control_table(1).limits, self.linear_specs(), self.step_spec(), drafts)

    def control_table(self, cores: int) -> DrsTable:
        """Return a control table of these sizes, every layer with a gate."""
        shape, kind, layers = self.shape, self.gate.kind, self.shape.layers
        return build_table(
            *(layers, self.batch, cores, shape.tokens_per_frame, [0.0] * layers),
            # One head of one element where the controller reads neither q nor a key.
            attention=AttentionShape(shape.heads, shape.kv_heads, shape.head_dim) if kind.reads_query else None,
            scales=[1.0] * layers,
            gate=GateScore.of(kind, shape.hidden, self.gate.units),
            couple_cfg=self.couple_cfg,
        )

    def mlp_spec(self) -> MlpSpec:
        """Return the MLP that the engine is built for."""
        shape = self.shape
        sizes = (shape.hidden, shape.intermediate, self.batch, shape.layers)
        return MlpSpec(*sizes, cores=1, activation=shape.activation, gated=shape.gated, quant=self.quant)

    def linear_specs(self) -> list[LinearSpec]:
        """Return the other linears that the engine computes; none where only MLPs are offloaded."""
        if self.offload == "mlp":
            return []
        shape, layers = self.shape, range(self.shape.layers)
        specs = [replace(x, name=f"layer_{n}.{x.name}") for n in layers for x in shape.attention_linears]
        return specs + ([shape.head] if shape.head else [])

    def step_spec(self) -> StepSpec | None:
        """Return the rest of a step, where the engine computes it."""
        if self.offload != "all":
            return None
        shape = self.shape
        return StepSpec(shape.heads, shape.kv_heads, shape.head_dim, self.cached_rows, shared=self.rows)

    def kv_bytes(self, positions: int) -> int:
        """Return the bytes of this many cached positions, all layers and rows."""
        kept = KV_TYPES[self.kv]
        return self.shape.kv_bytes(positions, self.batch, kept.bits, kept.block)

    def footprint(self, target: Target) -> Footprint:
        """Return what the weight memories of a board hold of it."""
        return held(self.memory or self._memory_of_shape(), target, attends=self.offload == "all")

    @property
    def draft_bytes(self) -> int:
        """Bytes of the weights of all drafts."""
        linears = (x for own in self.drafts if own is not None for x in self.shape.draft_linears(own))
        return sum(x.weight_bytes(self.quant) for x in linears)

    def _memory_of_shape(self) -> Footprint:
        """Return the memory of the shape, without embeddings and norms."""
        weights = self.shape.weight_bytes(self.quant) + self.gate.weight_bytes(self.shape) + self.draft_bytes
        videos = self.batch // self.rows
        outputs, inputs = self.shape.mlp_cache_bytes(videos), self.gate.cache_bytes(self.shape, videos)
        return Footprint(weights, self.kv_bytes(self.cached_rows) // self.rows, outputs, inputs)


DEFAULT_QUANT = "w8a8"
"""Quantisation that an estimate assumes for an artifact without an engine."""


def workload_of(manifest: Manifest) -> Workload:
    """Return what an artifact decodes; attention reads half of the cache, the mean of a video."""
    return workload_of_sections(manifest.options, manifest.decoder, manifest.layers.layers)


def workload_of_sections(options: CompileConfig, decoder: DecoderSection, layers: Sequence[LayerSite]) -> Workload:
    """Return the same of a decoder that may not have been written.

    Raises:
        UserError: the layers differ in size; the model has one size for all.
    """
    accelerated = options.quant in ACCELERATED
    rows = round(sum(s.attention.cache_rows for s in layers) / len(layers))
    return Workload(
        shape_of_sections(decoder.config, layers),
        options.quant if accelerated else DEFAULT_QUANT,
        max(1, options.max_seq_len // 2),
        batch=decoder.config.decode_rows,
        rows=decoder.config.rows or 1,
        offload=options.offload,
        kv=kv_type(options.kv).dtype,
        sink_window=_sink_window(layers, max(1, options.max_seq_len // 2)),
        kv_rows=None if rows == options.max_seq_len and options.offload != "all" else rows,
        gate=GateModel.of_sections(options.replay, layers),
        couple_cfg=options.replay is not None and options.replay.couple_cfg,
        memory=Footprint.of(decoder.weight_bytes, decoder.state) if accelerated else None,
        drafts=_drafts(layers) if options.offload == "all" else (),
    )


def _drafts(layers: Sequence[LayerSite]) -> tuple[DraftSize | None, ...]:
    """Return the drafts of all layers; () where none has one."""
    found = tuple(None if s.replay is None else s.replay.draft for s in layers)
    return found if any(found) else ()


def _sink_window(layers: Sequence[LayerSite], context: int) -> tuple[int, int] | None:
    """Return sinks and window of the layers; where they differ, one window of their mean. None: no layer has one."""
    own = [(a.sinks, a.window) for a in (s.attention for s in layers) if a.window is not None]
    if not own:
        return None
    if len(set(own)) == 1 and len(own) == len(layers):
        return own[0]
    seen = sum(min(context, sinks + window) for sinks, window in own) + (len(layers) - len(own)) * context
    return 0, round(seen / len(layers))


def program_of(artifact: StoredArtifact) -> StepProgram | None:
    """Return the program of whole steps that was emitted; None: there is none."""
    accelerator = artifact.manifest.accelerator
    if accelerator is None or accelerator.step is None:
        return None
    return read_program(artifact.files.data(accelerator.table))


def design_of(manifest: Manifest, board: Target) -> Design | None:
    """Return the design that was emitted for this board; None: there is none."""
    if manifest.accelerator is None or board != manifest.target:
        return None
    return Design.of(manifest.accelerator.design)
