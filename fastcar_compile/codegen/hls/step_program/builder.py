"""The step program of a decoder, or its short programs, made of its sizes and its design."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TypeVar

from fastcar_compile.artifact.engine import EngineProduct, float_words
from fastcar_compile.codegen.hls.control_table.table import MAX_INSTRUCTIONS, DrsTable, network_words
from fastcar_compile.codegen.hls.design.design import Design
from fastcar_compile.codegen.hls.step_program import instructions as step
from fastcar_compile.codegen.hls.step_program import replaying
from fastcar_compile.codegen.hls.step_program.cache_layout import BLOCK, CacheLayout, Sizes
from fastcar_compile.codegen.hls.step_program.instruction import GAIN_WORDS, LANES, Instruction, Place
from fastcar_compile.codegen.hls.step_program.program import StepProgram
from fastcar_compile.errors import CompileError
from fastcar_compile.gates.base import Rotary
from fastcar_compile.gates.registry import GateKind
from fastcar_compile.gates.scores import float32

T = TypeVar("T")

HEAD = "head"
"""Name of the linear call behind the layers."""

NO_WINDOW = 0xFFFFFFFF
"""A window that no position is outside of."""


@dataclass(frozen=True)
class CacheForm:
    """Rows of a cache: `sinks` first positions, then a ring of `ring` rows; a token sees `window` positions of it.

    Args:
        shared: rows of a launch that share the cache of a video.
    """

    sinks: int
    ring: int
    window: int = NO_WINDOW
    shared: int = 1

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
class NormForm:
    """The norms of a decoder: root-mean-square norms, or layer norms with weight and bias."""

    epsilon: float
    layer: bool = False


@dataclass(frozen=True)
class ReplayForm:
    """Replay of MLP outputs.

    Args:
        stride: forwards from one frame to the next. gated: per layer, whether its gate is in the control table.
        gate: of the table. units: per layer the hidden units of its network, for gate `learned`; else ().
        rotary: "key": the gate compares the query from before its rotation.
    """

    stride: int
    gated: tuple[bool, ...]
    gate: GateKind = GateKind.TAS
    units: tuple[int, ...] = ()
    rotary: Rotary = "both"

    def problems(self, layers: int) -> list[str]:
        """Return what no step program has, as texts."""
        found = []
        if len(self.gated) != layers:
            found.append(f"gates of {len(self.gated)} layers for {layers} layers")
        if len(self.units) != (layers if self.gate is GateKind.LEARNED else 0):
            found.append(f"networks of {len(self.units)} layers for gate {self.gate.name.lower()} of {layers} layers")
        return found


def step_program(design: Design, attention: AttentionForm, norm: NormForm, replay: ReplayForm | None) -> StepProgram:
    """Return the step program of a decoder whose layers are alike, on a design that has its linears.

    A layer is norm, q/k/v, RoPE, attention, o, norm, MLP; behind the layers are a norm and the head. Without a head the
    output has the hidden states.

    In `constants`, layer by layer: the weights of both norms, then those of q and k per head, if any; then the weight
    of the last norm; a layer norm's bias is behind its weight. Then the RoPE table, then the networks of the layers with gate `learned`, then of each draft its
    bias, edges and gains. In a section of `weights`, layer by layer: q/k/v, o, the MLP; then the head, then the drafts.
    In a section of the caches: layer, video, key head. In the replay buffer: chain counts by layer, slot and video,
    then MLP outputs alike, then MLP inputs alike, if the gate reads them.

    Args:
        replay: of MLPs; None: there is none.

    Raises:
        CompileError: what a step program cannot express.
    """
    wrong = attention.problems() + ([] if replay is None else replay.problems(design.mlp.layers))
    if design.mlp.hidden % LANES:
        wrong.append(f"a hidden size of {design.mlp.hidden} (a multiple of {LANES})")
    if not wrong:
        program = _ProgramBuilder(design, attention, norm, replay).program()
        wrong += [f"{i.name} of layer {i.layer}" for i in program.instructions if not i.fits(program.sizes)]
        if len(program.instructions) <= MAX_INSTRUCTIONS and program.sizes.is_valid() and not wrong:
            return program
    raise refusal(f"no step program can be built: {'; '.join(wrong) or 'its sizes'}")


def refusal(reason: str, hint: str = 'use offload="linears"') -> CompileError:
    """Return that a decoder has no step program."""
    return CompileError(reason, hint=hint)


def only(found: set[T], what: str) -> T:
    """Return the one element.

    Raises:
        CompileError: there are several, which a step program cannot express.
    """
    if len(found) != 1:
        raise refusal(f"no step program: {what} differ: {', '.join(sorted(map(str, found)))}")
    return next(iter(found))


class _ProgramBuilder:
    def __init__(self, design: Design, heads: AttentionForm, norm: NormForm, replay: ReplayForm | None) -> None:
        self.design, self.heads, self.norm, self.replay = design, heads, norm, replay
        self.layers, self.rows = design.mlp.layers, design.mlp.batch
        self.qkv, self.o = map(self._of_layers, ("qkv", "o"))
        self.head = design.linears.get(HEAD)
        self.words = design.mlp.hidden // LANES
        self.head_words = heads.head_dim // LANES
        self.vectors = 2 if norm.layer else 1  # of a norm: its weight, and its bias
        self.norm_words = self.vectors * (2 * self.words + (2 * self.head_words if heads.head_norm else 0))
        self.mlp_at = self.qkv.section_words + self.o.section_words
        self.layer_weights = self.mlp_at + design.section_words
        layout = CacheLayout(design.ports, heads.head_dim, heads.cache.positions)
        self.videos = self.rows // heads.cache.shared
        cached = self.videos * heads.key_heads
        self.layer_keys, self.layer_values = cached * layout.key_words, cached * layout.value_words
        self.last_norm = self.layers * self.norm_words
        self.table = self.last_norm + self.vectors * self.words
        # Element n is the first word of layer n's network; the last element is their end.
        units = (0,) * self.layers if replay is None or not replay.units else replay.units
        networks = (network_words(n, design.mlp.hidden) for n in units)
        self.networks = tuple(accumulate(networks, initial=self.table + heads.table_rows * heads.rotary // LANES))
        # A draft has a bias like a row, and its table. Their last elements are the ends of constants and of weights.
        drafts = design.drafts.values()
        own = (self.words + GAIN_WORDS for _ in drafts)
        self.draft_constants = tuple(accumulate(own, initial=self.networks[-1]))
        behind = self.layers * self.layer_weights + (0 if self.head is None else self.head.section_words)
        self.draft_weights = tuple(accumulate((p.section_words for p in drafts), initial=behind))
        self.slots = 0 if replay is None else replay.stride
        # Behind the slots is room for what each row of a launch stages, where a video has several.
        self.layer_chains = self.slots * self.videos + (self.rows if self.rows > self.videos and self.slots else 0)
        self.layer_outputs = self.layer_chains * self.words
        # The replay buffer has the chain counts of all layers, then the MLP outputs, then the MLP inputs.
        self.outputs = self.layers * self.layer_chains
        self.inputs = self.outputs + self.layers * self.layer_outputs
        self.layer_inputs = self.layer_outputs if replay is not None and replay.gate.reads_input else 0

    def _of_layers(self, place: str) -> EngineProduct:
        return only({self.design.linears[f"layer_{n}.{place}"] for n in range(self.layers)}, f"the linears {place}")

    def program(self) -> StepProgram:
        """Return the program; it is not checked yet."""
        heads, layers = self.heads, self.layers
        query_words = heads.heads * self.head_words
        sizes = Sizes(
            rows=self.rows,
            ports=self.design.ports,
            positions=heads.cache.positions,
            x_words=self.words,
            # What attention gives, or the x of a draft and the recalled x.
            a_words=max((2 if self.design.drafts else 1) * self.words, query_words),
            y_words=max(self.words, query_words + 2 * heads.key_heads * self.head_words),
            constant_words=self.draft_constants[-1],
            weight_words=self.draft_weights[-1],
            key_words=layers * self.layer_keys,
            value_words=layers * self.layer_values,
            input_words=self.rows * self.words,  # behind the list of rows
            # A row of logits fills whole memory words: it may be up to three values wider than the vocabulary.
            output_words=self.rows * (self.words if self.head is None else float_words(self.head.channels)),
            replay_words=self.inputs + layers * self.layer_inputs,
            videos=self.videos,
        )
        sizes = replace(sizes, input_words=sizes.rows + sizes.input_words)
        body = (i for layer in range(layers) for i in self._layer(layer))
        return StepProgram(sizes, (step.Load(0, self.words), *body, *self._last()))

    def _replay_of(self, layer: int) -> ReplayForm | None:
        """Return the replay of a layer; None: it always computes."""
        return self.replay if self.replay is not None and self.replay.gated[layer] else None

    def _layer(self, layer: int) -> Iterator[Instruction]:
        norms, weights = layer * self.norm_words, layer * self.layer_weights
        second = norms + self.vectors * self.words
        yield self._norm(layer, norms)
        yield _linear(layer, Place.A, Place.Y, self.qkv, weights)
        yield from self._attention(layer, second + self.vectors * self.words)
        yield _linear(layer, Place.A, Place.Y, self.o, weights + self.qkv.section_words)
        yield step.Add(layer, self.words)
        yield self._norm(layer, second)
        replay = self._replay_of(layer)
        # The norm has just put the MLP's input into A, and Decide needs it there before the MLP runs.
        if replay is not None and replay.gate.reads_input:
            yield self._decision(layer, replay)
        yield step.Mlp(layer, Place.A, Place.Y, weights + self.mlp_at)
        if replay is None:
            yield step.Add(layer, self.words)
        else:
            cache = self.outputs + layer * self.layer_outputs
            yield from self._replayed(layer, (self.words, self.slots, cache))

    def _replayed(self, layer: int, kept: tuple[int, int, int]) -> Iterator[Instruction]:
        """Yield what adds the MLP's output. `kept`: words of a row, slots, and where they begin."""
        name = f"layer_{layer}.draft"
        if name not in self.design.drafts:
            # A row that replays has no new output in Y: Replay adds what its slot holds.
            yield replaying.Replay(layer, *kept)
            return
        number, draft = list(self.design.drafts).index(name), self.design.drafts[name]
        first, outer, bias = draft.first, draft.outer, self.draft_constants[number]
        inputs = self.inputs + layer * self.layer_inputs
        yield replaying.Recall(layer, *kept[:2], inputs, bias + self.words)
        sizes = (draft.neurons, draft.rank, first.tile, first.tiles, int(first.bias), outer.tile, outer.tiles)
        yield replaying.DraftRows(layer, *sizes, self.draft_weights[number])
        yield replaying.ReplayDraft(layer, *kept, bias)

    def _attention(self, layer: int, norms: int) -> Iterator[Instruction]:
        heads, head_words = self.heads, self.head_words
        query, key, blocks = heads.heads * head_words, heads.key_heads * head_words, heads.head_dim // BLOCK
        ring = heads.cache.sinks, heads.cache.ring
        keys, values = layer * self.layer_keys, layer * self.layer_values
        yield step.AppendValues(layer, query + key, heads.key_heads, blocks, values, *ring)
        # Norms and rotations leave q and k where the product put them.
        if heads.head_norm:
            key_norm = norms + self.vectors * head_words
            yield self._normed(layer, Place.Y, (0, head_words, heads.heads), norms)
            yield self._normed(layer, Place.Y, (query, head_words, heads.key_heads), key_norm)
        replay = self._replay_of(layer)
        rotation = [self._rotation(layer, 0, heads.heads)] if heads.rotary else []
        late = replay is not None and replay.gate.reads_query and replay.rotary == "key"
        yield from () if late else rotation
        if heads.rotary:
            yield self._rotation(layer, query, heads.key_heads)
        yield step.AppendKeys(layer, query, heads.key_heads, blocks, keys, *ring)
        # Gate `tas` reads q, which has not rotated yet where it compares that, and an earlier key.
        if replay is not None and replay.gate.reads_query:
            yield self._decision(layer, replay)
        yield from rotation if late else ()
        cached = (keys, values, *ring, heads.cache.window)
        yield step.Attend(layer, heads.heads, heads.key_heads, blocks, *cached, float32(heads.factor))

    def _decision(self, layer: int, form: ReplayForm) -> replaying.Decide:
        decide = replaying.Decide(layer, form.gate, self.slots, layer * self.layer_chains)
        heads, cache = self.heads, self.heads.cache
        if form.gate.reads_query:
            decide = replace(decide, heads=heads.heads, key_heads=heads.key_heads, blocks=heads.head_dim // BLOCK)
            decide = replace(decide, keys=layer * self.layer_keys, sinks=cache.sinks, ring=cache.ring)
        if form.gate.reads_input:
            inputs = self.inputs + layer * self.layer_inputs
            decide = replace(decide, count=self.words, inputs=inputs)
        if form.gate is GateKind.LEARNED:
            decide = replace(decide, network=self.networks[layer], units=form.units[layer])
        return decide

    def _rotation(self, layer: int, first: int, heads: int) -> step.Rotate:
        half = self.heads.rotary // LANES // 2
        return step.Rotate(layer, first, heads, self.head_words, half, self.table, self.heads.table_rows)

    def _norm(self, layer: int, weight: int) -> step.Norm:
        return self._normed(layer, Place.X, (0, self.words, 1), weight)

    def _normed(self, layer: int, source: Place, pieces: tuple[int, int, int], weight: int) -> step.Norm:
        """Return a norm; `pieces`: the first word, the words of a piece and how many there are."""
        kind = step.LayerNorm if self.norm.layer else step.Norm
        return kind(layer, source, *pieces, weight, float32(1 / (LANES * pieces[1])), float32(self.norm.epsilon))

    def _last(self) -> Iterator[Instruction]:
        yield self._norm(self.layers, self.last_norm)
        if self.head is None:
            yield step.Store(self.layers, self.words)
        else:
            yield _linear(self.layers, Place.A, Place.OUTPUT, self.head, self.layers * self.layer_weights)
        yield step.End(self.layers)


def short_program(design: Design, table: DrsTable | None = None, units: Sequence[int] = ()) -> StepProgram:
    """Return the short programs of a design: the decisions of the layers that the table gates, the MLPs, the linears.

    Each has its END. In a section of the weights, MLPs come before linears. The constants are the networks of the
    gated layers.

    Args:
        table: of the decisions; None: there are none.
        units: of the gated layers' networks; (): as many as the table's for each, if it has any.
    """
    mlp, linears = design.mlp, tuple(design.linears.values())
    gated = () if table is None else table.gated
    read = (0, 0) if table is None else (table.query_words, table.key_words)
    units = units or ((table.units,) * len(gated) if table is not None and table.units else ())
    networks = tuple(accumulate((network_words(n, mlp.hidden) for n in units), initial=0))
    weights = tuple(accumulate((p.section_words for p in linears), initial=mlp.layers * design.section_words))
    words = float_words(mlp.hidden)
    learned = [(at, own, words) for at, own in zip(networks, units, strict=False)] or [()] * len(gated)
    decide = (replaying.DecideRows(n, *read, *own) for n, own in zip(gated, learned, strict=True))
    mlps = (step.Mlp(n, Place.INPUT, Place.OUTPUT, n * design.section_words) for n in range(mlp.layers))
    called = (_linear(0, Place.INPUT, Place.OUTPUT, p, at) for p, at in zip(linears, weights, strict=False))
    return StepProgram(
        Sizes(
            rows=mlp.batch,
            ports=design.ports,
            positions=1,
            x_words=1,
            a_words=1,
            y_words=1,
            constant_words=networks[-1],
            weight_words=weights[-1],
            key_words=0,
            value_words=0,
            input_words=mlp.batch
            + max(sum(read) if gated else 0, mlp.batch * max([words, *(float_words(p.inputs) for p in linears)])),
            output_words=mlp.batch * max([words, *(float_words(p.channels) for p in linears)]),
            replay_words=0,
            videos=mlp.batch,
        ),
        tuple(i for own in (*decide, *mlps, *called) for i in (own, step.End(0))),
    )


def _linear(layer: int, source: Place, target: Place, product: EngineProduct, weights: int) -> step.Linear:
    sizes = (product.inputs, product.channels, product.tile, product.tiles, int(product.bias))
    return step.Linear(layer, source, target, *sizes, weights)
