"""A small decoder with random weights: its step program, its memory, and plain floating point to compare with."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from gates.networks import networks
from hls.library import design, linear, random_layer, random_linear, reference

from fastcar_compile.artifact.engine import MlpSpec
from fastcar_compile.codegen.hls.control import network_stream
from fastcar_compile.codegen.hls.control_table.builder import GateScore, build_table
from fastcar_compile.codegen.hls.control_table.table import AttentionShape, DrsTable
from fastcar_compile.codegen.hls.design.design import Design
from fastcar_compile.codegen.hls.design.spec import DraftSpec
from fastcar_compile.codegen.hls.packing import LinearWeights, pack_draft, pack_linear, pack_mlp
from fastcar_compile.codegen.hls.step_golden import activated
from fastcar_compile.codegen.hls.step_program.builder import (
    AttentionForm,
    CacheForm,
    NormForm,
    ReplayForm,
    step_program,
)
from fastcar_compile.codegen.hls.step_program.cache_layout import LANES
from fastcar_compile.codegen.hls.step_program.instructions import Linear, Mlp
from fastcar_compile.codegen.hls.step_program.program import StepProgram
from fastcar_compile.codegen.hls.step_program.replaying import DraftRows
from fastcar_compile.codegen.hls.step_program.simulator import Product, SimulatedMemory
from fastcar_compile.gates.registry import GateKind
from fastcar_compile.gates.scores import float32
from step.values import Array

HIDDEN, VOCAB, LAYERS, ROWS, FRAME = 64, 17, 2, 2, 5


@dataclass(frozen=True)
class Decoder:
    """A decoder on an engine. By their first word: `weights` of a linear, or of gate, up and down; `drafts`."""

    made: Design
    program: StepProgram
    table: DrsTable
    weights: dict[int, list[LinearWeights]]
    constants: Array
    stream: Array
    drafts: dict[int, list[LinearWeights]]

    @property
    def products(self) -> dict[int, Product]:
        """Each product in numpy."""

        def product(parts: list[LinearWeights]) -> Product:
            spec = self.made.mlp
            return (lambda x: linear(x, parts[0], spec)) if len(parts) == 1 else (lambda x: self._mlp(x, parts))

        return {at: product(parts) for at, parts in self.weights.items()}

    def _mlp(self, x: Array, parts: list[LinearWeights]) -> Array:
        return reference(x[:, :HIDDEN], parts, self.made.mlp)

    def _draft(self, parts: list[LinearWeights]) -> tuple[Product, Product]:
        gate, up, inner, outer = parts
        spec = self.made.mlp

        def first(x: Array) -> Array:
            a, b, features = (linear(x[:, :HIDDEN], own, spec) for own in (gate, up, inner))
            return np.concatenate([activated(torch.tensor(a), spec).numpy() * b, features], 1)

        return first, lambda x: linear(x, outer, spec)

    def memory(self) -> SimulatedMemory:
        """Memory with empty caches."""
        sizes = self.program.sizes
        keys, values = (np.zeros((sizes.ports, n, LANES), np.int8) for n in (sizes.key_words, sizes.value_words))
        replay = np.zeros((sizes.replay_words, 4), np.uint32)
        drafts = {at: self._draft(parts) for at, parts in self.drafts.items()}
        return SimulatedMemory(self.constants, self.products, keys, values, replay, self.table.to_bytes(), drafts)


@dataclass(frozen=True)
class Gates:
    """Gates of a decoder, and the limits on replay.

    Args:
        threshold: that of the gate, which replays about half of the rows.
        heads: chosen heads of the first layer. units: of the network in each layer.
    """

    kind: GateKind = GateKind.TAS
    threshold: float = 0.0
    gated: tuple[bool, ...] = (True,) * LAYERS
    max_chain: int | None = None
    couple_cfg: bool = False
    refresh_every: int | None = None
    heads: tuple[tuple[int, float], ...] | None = None
    units: tuple[int, ...] = ()

    @property
    def score(self) -> GateScore:
        """What the control table says of the score."""
        reads = HIDDEN if self.kind.reads_input else 0
        heads = None if self.heads is None else (self.heads, *[None] * (LAYERS - 1))
        return GateScore(self.kind, reads, max(self.units, default=0), heads)

    def table(self, attention: AttentionForm, rows: int, cores: int = 1) -> DrsTable:
        """The control table."""
        shape = AttentionShape(attention.heads, attention.key_heads, attention.head_dim)
        sign = -1 if self.kind.at_most else 1
        return build_table(
            *(LAYERS, rows, cores, FRAME, [sign * self.threshold] * LAYERS),
            attention=shape if self.kind.reads_query else None,
            scales=[0.25 if gate else None for gate in self.gated],
            gate=self.score,
            max_chain=self.max_chain,
            couple_cfg=self.couple_cfg,
            refresh_every=self.refresh_every,
        )

    @property
    def networks(self) -> Array:
        """The networks' words, as constants."""
        layers = networks(HIDDEN, *self.units).layers if self.units else {}
        found = [network_stream(layers[layer]).view(np.float32) for layer in sorted(layers)]
        return np.concatenate([np.zeros(0, np.float32), *found])


def decoder(
    attention: AttentionForm,
    quant: str,
    gates: Gates,
    axi_bits: int = 128,
    rows: int = ROWS,
    cores: int = 1,
    drafts: Sequence[DraftSpec] = (),
    *,
    layer_norms: bool = False,
    headed: bool = True,
) -> Decoder:
    """A decoder of two layers. axi_bits: of an AXI port, which carries one weight port or two."""
    rng = np.random.default_rng(0)
    query, key = attention.heads * attention.head_dim, attention.key_heads * attention.head_dim
    layer = [(f"layer_{n}", place) for n in range(LAYERS) for place in ("qkv", "o")]
    sizes = {"qkv": (HIDDEN, query + 2 * key, False), "o": (query, HIDDEN, True)}
    head = [("head", HIDDEN, VOCAB, False)] if headed else []
    linears = [*((f"{name}.{place}", *sizes[place]) for name, place in layer), *head]
    kind = {"quant": quant, "axi_bits": axi_bits, "drafts": drafts}
    made = design(HIDDEN, 96, rows, cores, ports=4, layers=LAYERS, linears=linears, **kind)
    norm = NormForm(1e-5, layer=layer_norms)
    program = step_program(made, attention, norm, ReplayForm(FRAME, gates.gated, gates.kind, gates.units))
    weights, drafted, sections = {}, {}, []
    for instruction in program.instructions:
        if isinstance(instruction, Mlp):
            parts = [_scaled(part) for part in random_layer(made.mlp, rng)]
            weights[instruction.weights], packed = parts, pack_mlp(parts, made)
        elif isinstance(instruction, Linear):
            size = (instruction.inputs, instruction.channels)
            name = next(n for n, p in made.linears.items() if (p.inputs, p.channels) == size)
            parts = [
                _scaled(random_linear(made.mlp, instruction.channels, instruction.inputs, made.linears[name].bias, rng))
            ]
            weights[instruction.weights], packed = parts, pack_linear(parts, made.linears[name], made.axi_words)
        else:
            continue
        sections.append(packed.reshape(made.axi_weight_ports, -1, made.axi_words * LANES))
    for one in (i for i in program.instructions if isinstance(i, DraftRows)):
        parts = [_scaled(part) for part in random_draft(made.mlp, one, rng)]
        drafted[one.weights], packed = parts, pack_draft(parts, made.drafts[f"layer_{one.layer}.draft"], made.axi_words)
        sections.append(packed.reshape(made.axi_weight_ports, -1, made.axi_words * LANES))
    tables = [_draft_table(rng) for _ in drafts]
    behind = np.concatenate([gates.networks, *tables])
    constants = _constants(program, attention, behind, rng)
    stream, table = np.concatenate(sections, 1), gates.table(attention, rows, cores)
    return Decoder(made, program, table, weights, constants, stream, drafted)


def random_draft(spec: MlpSpec, one: DraftRows, rng: np.random.Generator) -> list[LinearWeights]:
    """Gate and up with biases, if the draft has any; inner; outer."""
    neurons = [random_linear(spec, one.neurons, HIDDEN, bool(one.bias), rng) for _ in range(2)]
    inner = random_linear(spec, one.rank, HIDDEN, False, rng)
    return [*neurons, inner, random_linear(spec, HIDDEN, one.neurons + one.rank, False, rng)]


def _draft_table(rng: np.random.Generator) -> Array:
    """Bias, edges and gains, which fall with the change."""
    edges, gains = np.linspace(0.2, 1.4, 15), np.linspace(1, 0, 16)
    return np.concatenate([rng.normal(size=HIDDEN), edges, [0], gains]).astype(np.float32)


def _scaled(weights: LinearWeights) -> LinearWeights:
    """Weights whose products keep the size of their inputs."""
    size = np.abs(weights.values).astype(np.float32).mean() * np.sqrt(weights.values.shape[1])
    flat = np.full_like(weights.scales, 1 / size)
    return replace(
        weights, scales=flat * np.linspace(0.5, 1.5, len(flat), dtype=flat.dtype).reshape(-1, *[1] * (flat.ndim - 1))
    )


def _constants(program: StepProgram, attention: AttentionForm, networks: Array, rng: np.random.Generator) -> Array:
    """Norm weights near one, then the table of cosines and sines, then the networks."""
    table = attention.table_rows * attention.rotary
    weights = rng.uniform(0.5, 1.5, 4 * program.sizes.constant_words - table - len(networks))
    angles = np.arange(attention.table_rows)[:, None] * 10.0 ** -np.linspace(0, 4, attention.rotary // 2)
    turns = np.concatenate([np.cos(angles), np.sin(angles)], 1).reshape(-1)
    return np.concatenate([np.concatenate([weights, turns]).astype(np.float32), networks])


ROTATED = AttentionForm(
    4, 2, 64, rotary=64, table_rows=48, factor=float32(0.125 * 1.4426950408889634), cache=CacheForm(0, 50)
)
NORMED = AttentionForm(6, 2, 32, 16, table_rows=20, factor=0.25, cache=CacheForm(2, 33, 9), head_norm=True)
