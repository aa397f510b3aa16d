"""The step program of a decoder, made of its sizes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import accumulate

from fastcar_compile.codegen.hls.control_table.gate import network_words
from fastcar_compile.codegen.hls.control_table.table import MAX_INSTRUCTIONS
from fastcar_compile.codegen.hls.step_program import instructions as step
from fastcar_compile.codegen.hls.step_program.cache_layout import BLOCK, CacheLayout, Sizes
from fastcar_compile.codegen.hls.step_program.instructions import LANES, Place
from fastcar_compile.codegen.hls.step_program.program import StepProgram
from fastcar_compile.errors import UserError
from fastcar_compile.gates.registry import GateKind
from fastcar_compile.gates.scores import float32

NO_WINDOW = 0xFFFFFFFF
"""A window that no position is outside of."""


@dataclass(frozen=True)
class LinearForm:
    """A linear as the array computes it.

    Args:
        inputs, channels: its size. tile: rows of a tile on one port. tiles: of it. words: of its weights on one port.
    """

    inputs: int
    channels: int
    tile: int
    tiles: int
    words: int
    bias: bool = False


@dataclass(frozen=True)
class CacheForm:
    """Rows of a cache: `sinks` first positions, then a ring of `ring` rows; a token sees `window` positions of it."""

    sinks: int
    ring: int
    window: int = NO_WINDOW

    @property
    def positions(self) -> int:
        """Rows."""
        return self.sinks + self.ring


@dataclass(frozen=True)
class AttentionForm:
    """Heads of a layer.

    Args:
        rotary: elements of a head that rotate; 0: none. table_rows: positions of the RoPE table.
        factor: of the logits (`fastcar_compile.ir.exact.logit_factor`). head_norm: q and k have a norm per head.
    """

    heads: int
    key_heads: int
    head_dim: int
    rotary: int
    table_rows: int
    factor: float
    cache: CacheForm
    head_norm: bool = False

    def problems(self) -> list[str]:
        """Return what the engine cannot compute, as texts."""
        found = []
        if self.head_dim % BLOCK:
            found.append(f"heads of {self.head_dim} elements (a multiple of {BLOCK})")
        if self.key_heads < 1 or self.heads % max(self.key_heads, 1):
            found.append(f"{self.heads} heads on {self.key_heads} key heads")
        if self.rotary % (2 * LANES) or self.rotary > self.head_dim:
            found.append(f"{self.rotary} rotating elements (a multiple of {2 * LANES}, at most the head)")
        return found


@dataclass(frozen=True)
class ReplayForm:
    """Replay of MLP outputs.

    Args:
        stride: forwards from one frame to the next. gated: per layer, whether its gate is in the control table.
        gate: of the table. units: per layer the hidden units of its network, for gate `learned`; else ().
    """

    stride: int
    gated: tuple[bool, ...]
    gate: GateKind = GateKind.TAS
    units: tuple[int, ...] = ()

    def problems(self, layers: int, attention: AttentionForm) -> list[str]:
        """Return what no step program has, as texts."""
        found = []
        if len(self.gated) != layers:
            found.append(f"gates of {len(self.gated)} layers for {layers} layers")
        if len(self.units) != (layers if self.gate is GateKind.LEARNED else 0):
            found.append(f"networks of {len(self.units)} layers for gate {self.gate.name.lower()} of {layers} layers")
        if self.gate is GateKind.BOUND and not (attention.rotary or attention.head_norm):
            found.append("gate bound of heads without RoPE and norms: their q is gone when the MLP's input is there")
        return found


@dataclass(frozen=True)
class StepForm:
    """A decoder whose layers are alike: norm, q/k/v, RoPE, attention, o, norm, MLP; then a norm and the head.

    Args:
        mlp_words: of an MLP's weights on one port. epsilon: of the norms. replay: of MLPs; None: there is none.
    """

    layers: int
    rows: int
    ports: int
    hidden: int
    epsilon: float
    attention: AttentionForm
    qkv: LinearForm
    o: LinearForm
    mlp_words: int
    head: LinearForm
    replay: ReplayForm | None = None

    def replay_of(self, layer: int) -> ReplayForm | None:
        """Return the replay of a layer; None: it always computes."""
        return self.replay if self.replay is not None and self.replay.gated[layer] else None


def build_step(form: StepForm) -> StepProgram:
    """Return the step program of a decoder.

    In `constants`, layer by layer: the weights of both norms, then those of q and k per head, if any; then the weight
    of the last norm, then the RoPE table, then the networks of the layers with gate `learned`. In a section of
    `weights`, layer by layer: q/k/v, o, the MLP; then the head. In a section of the caches: layer, row, key head. In
    the replay buffer: chain counts by layer and slot, then MLP outputs by layer, slot and row, then MLP inputs alike,
    if the gate reads them.

    Raises:
        UserError: sizes that the engine cannot compute, all of them.
    """
    wrong = form.attention.problems()
    wrong += [] if form.replay is None else form.replay.problems(form.layers, form.attention)
    if form.hidden % LANES:
        wrong.append(f"a hidden size of {form.hidden} (a multiple of {LANES})")
    if not wrong:
        program = _Builder(form).program()
        wrong += [f"{i.opcode.name} of layer {i.layer}" for i in program.instructions if not i.fits(program.sizes)]
        if len(program.instructions) <= MAX_INSTRUCTIONS and program.sizes.is_valid() and not wrong:
            return program
    raise UserError(
        f"no step program can be built: {'; '.join(wrong) or 'its sizes'}", hint="change the model or batch"
    )


class _Builder:
    def __init__(self, form: StepForm) -> None:
        heads = form.attention
        self.form, self.heads = form, heads
        self.words = form.hidden // LANES
        self.head_words = heads.head_dim // LANES
        self.norm_words = 2 * self.words + (2 * self.head_words if heads.head_norm else 0)
        self.layer_weights = form.qkv.words + form.o.words + form.mlp_words
        layout = CacheLayout(form.ports, heads.head_dim, heads.cache.positions)
        cached = form.rows * heads.key_heads
        self.layer_keys, self.layer_values = cached * layout.key_words, cached * layout.value_words
        self.last_norm = form.layers * self.norm_words
        self.table = self.last_norm + self.words
        # Element n is the first word of layer n's network; the last element is the end of the constants.
        self.networks = _networks(form, self.table + heads.table_rows * heads.rotary // LANES)
        self.slots = 0 if form.replay is None else form.replay.stride
        self.layer_chains, self.layer_outputs = self.slots * step.CHAIN_WORDS, self.slots * form.rows * self.words
        # The replay buffer has the chain counts of all layers, then the MLP outputs, then the MLP inputs.
        self.outputs = form.layers * self.layer_chains
        self.inputs = self.outputs + form.layers * self.layer_outputs
        self.layer_inputs = self.layer_outputs if form.replay is not None and form.replay.gate.reads_input else 0

    def program(self) -> StepProgram:
        """Return the program; it is not checked yet."""
        form, heads = self.form, self.heads
        query_words = heads.heads * self.head_words
        # A row of logits fills whole memory words, so the output may be up to three values wider than the vocabulary.
        output = -(-form.head.channels // LANES)
        sizes = Sizes(
            rows=form.rows,
            ports=form.ports,
            positions=heads.cache.positions,
            # A row on chip holds either the residual stream or q, k and v side by side.
            row_words=max(self.words, query_words + 2 * heads.key_heads * self.head_words),
            constant_words=self.networks[-1],
            weight_words=form.layers * self.layer_weights + form.head.words,
            key_words=form.layers * self.layer_keys,
            value_words=form.layers * self.layer_values,
            input_words=form.rows * self.words,
            output_words=form.rows * output,
            replay_words=self.inputs + form.layers * self.layer_inputs,
        )
        layers = (i for layer in range(form.layers) for i in self._layer(layer))
        return StepProgram(sizes, (step.Load(0, Place.X, self.words), *layers, *self._last()))

    def _layer(self, layer: int) -> Iterator[step.Instruction]:
        form, norms = self.form, layer * self.norm_words
        weights = layer * self.layer_weights
        yield self._norm(layer, norms)
        yield _linear(layer, Place.A, Place.Y, form.qkv, weights)
        yield from self._attention(layer, norms + 2 * self.words)
        yield _linear(layer, Place.A, Place.Y, form.o, weights + form.qkv.words)
        yield step.Add(layer, Place.Y, Place.X, self.words)
        yield self._norm(layer, norms + self.words)
        replay = form.replay_of(layer)
        # The norm has just put the MLP's input into A, and Decide needs it there before the MLP runs.
        if replay is not None and replay.gate.reads_input:
            yield self._decision(layer, replay)
        yield step.Mlp(layer, Place.A, Place.Y, weights + form.qkv.words + form.o.words)
        if replay is None:
            yield step.Add(layer, Place.Y, Place.X, self.words)
        else:
            cache = self.outputs + layer * self.layer_outputs
            # A row that replays has no new output in Y: Replay adds what its slot holds.
            yield step.Replay(layer, Place.Y, Place.X, self.words, self.slots, cache)

    def _attention(self, layer: int, norms: int) -> Iterator[step.Instruction]:
        heads, head_words = self.heads, self.head_words
        query, key, blocks = heads.heads * head_words, heads.key_heads * head_words, heads.head_dim // BLOCK
        ring = heads.cache.sinks, heads.cache.ring
        keys, values = layer * self.layer_keys, layer * self.layer_values
        # Values are neither normed nor rotated, so they leave for the cache straight from Y.
        yield step.AppendValues(layer, Place.Y, query + key, heads.key_heads, blocks, values, *ring)
        q, k = self._places
        # An instruction never writes the place that it reads. A is free here, because q/k/v is its last reader.
        normed = (Place.A, Place.A) if heads.rotary else (q, k)
        if heads.head_norm:
            sizes = (float32(1 / heads.head_dim), float32(self.form.epsilon))
            yield step.Norm(layer, Place.Y, normed[0], 0, head_words, heads.heads, norms, *sizes)
            yield step.Norm(layer, Place.Y, normed[1], query, head_words, heads.key_heads, norms + head_words, *sizes)
        if heads.rotary:
            given = Place.A if heads.head_norm else Place.Y
            yield self._rotation(layer, (given, q), 0, heads.heads)
            yield self._rotation(layer, (given, k), query, heads.key_heads)
        yield step.AppendKeys(layer, k, query, heads.key_heads, blocks, keys, *ring)
        replay = self.form.replay_of(layer)
        # Gate `tas` reads q and an earlier key alone. It decides now, while q is still in its place.
        if replay is not None and not replay.gate.reads_input:
            yield self._decision(layer, replay)
        cached = (keys, values, *ring, heads.cache.window)
        yield step.Attend(layer, q, Place.A, heads.heads, heads.key_heads, blocks, *cached, float32(heads.factor))

    @property
    def _places(self) -> tuple[Place, Place]:
        """Where q and k are when attention reads them."""
        return (Place.Q, Place.K) if self.heads.rotary or self.heads.head_norm else (Place.Y, Place.Y)

    def _decision(self, layer: int, form: ReplayForm) -> step.Decide:
        decide = step.Decide(layer, form.gate, self.slots, layer * self.layer_chains)
        heads, cache = self.heads, self.heads.cache
        if form.gate.reads_query:
            decide = replace(decide, source=self._places[0], heads=heads.heads, key_heads=heads.key_heads)
            decide = replace(decide, blocks=heads.head_dim // BLOCK, keys=layer * self.layer_keys)
            decide = replace(decide, sinks=cache.sinks, ring=cache.ring)
        if form.gate.reads_input:
            inputs = self.inputs + layer * self.layer_inputs
            decide = replace(decide, input=Place.A, count=self.words, inputs=inputs)
        if form.gate is GateKind.LEARNED:
            decide = replace(decide, network=self.networks[layer], units=form.units[layer])
        return decide

    def _rotation(self, layer: int, places: tuple[Place, Place], first: int, heads: int) -> step.Rotate:
        half = self.heads.rotary // LANES // 2
        return step.Rotate(layer, *places, first, heads, self.head_words, half, self.table, self.heads.table_rows)

    def _norm(self, layer: int, weight: int) -> step.Norm:
        size, epsilon = float32(1 / self.form.hidden), float32(self.form.epsilon)
        return step.Norm(layer, Place.X, Place.A, 0, self.words, 1, weight, size, epsilon)

    def _last(self) -> Iterator[step.Instruction]:
        form = self.form
        yield self._norm(form.layers, self.last_norm)
        yield _linear(form.layers, Place.A, Place.OUTPUT, form.head, form.layers * self.layer_weights)
        yield step.End(form.layers)


@dataclass(frozen=True)
class ShortForm:
    """A decoder whose MLPs, gates and linears the host calls one by one.

    Args:
        mlp_words: of an MLP's weights on one port. linears: in call order.
        gated: layers that the control table decides. query_words, key_words: of what the gate reads, all rows.
        units: per gated layer the hidden units of its network, for gate `learned`; else ().
    """

    layers: int
    rows: int
    ports: int
    hidden: int
    mlp_words: int
    linears: tuple[LinearForm, ...] = ()
    gated: tuple[int, ...] = ()
    query_words: int = 0
    key_words: int = 0
    units: tuple[int, ...] = ()


def build_short(form: ShortForm) -> StepProgram:
    """Return the short programs of a decoder: the decisions of the gated layers, the MLPs, the linears, each with its END.

    In a section of the weights, MLPs come before linears. The constants are the networks of the gated layers.
    """
    words = -(-form.hidden // LANES)
    networks = tuple(accumulate((network_words(n, form.hidden) for n in form.units), initial=0))
    weights = tuple(accumulate((own.words for own in form.linears), initial=form.layers * form.mlp_words))
    learned = [(at, units, words) for at, units in zip(networks, form.units, strict=False)] or [()] * len(form.gated)
    decide = (
        step.DecideRows(n, form.query_words, form.key_words, *own) for n, own in zip(form.gated, learned, strict=True)
    )
    mlps = (step.Mlp(n, Place.INPUT, Place.OUTPUT, n * form.mlp_words) for n in range(form.layers))
    places = zip(form.linears, weights, strict=False)
    linears = (_linear(0, Place.INPUT, Place.OUTPUT, own, at) for own, at in places)
    decided = step.CHAIN_WORDS + form.query_words + form.key_words if form.gated else 0
    return StepProgram(
        Sizes(
            rows=form.rows,
            ports=form.ports,
            positions=1,
            row_words=1,
            constant_words=networks[-1],
            weight_words=weights[-1],
            key_words=0,
            value_words=0,
            input_words=max(decided, form.rows * max([words, *(-(-own.inputs // LANES) for own in form.linears)])),
            output_words=form.rows * max([words, *(-(-own.channels // LANES) for own in form.linears)]),
        ),
        tuple(i for own in (*decide, *mlps, *linears) for i in (own, step.End(0))),
    )


def _linear(layer: int, source: Place, target: Place, form: LinearForm, weights: int) -> step.Linear:
    sizes = (form.inputs, form.channels, form.tile, form.tiles, int(form.bias))
    return step.Linear(layer, source, target, *sizes, weights)


def _networks(form: StepForm, first: int) -> tuple[int, ...]:
    """Return the word of each layer's network, from word `first` of the constants on, and the word behind the last."""
    units = (0,) * form.layers if form.replay is None or not form.replay.units else form.replay.units
    return tuple(accumulate((network_words(n, form.hidden) if n else 0 for n in units), initial=first))
