"""What the engine has to compute, and what the board has to give."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fastcar_compile.artifact.engine import WORD_BYTES, DraftProducts, EngineProduct, MlpSpec, float_words
from fastcar_compile.codegen.hls.control_table.table import MAX_ROWS
from fastcar_compile.codegen.hls.step_program.cache_layout import BLOCK, CacheLayout
from fastcar_compile.config.formats import ACCELERATED, quant_format
from fastcar_compile.errors import CompileError

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu", "relu2")
"""In the order of the C++ enumeration; "gelu" is by erf, "relu2" is relu(x) squared."""

MOST_INPUTS = 1 << 16
"""127 * 127 * 65536 < 2^31: the sums stay int32."""

MOST_CHANNELS = 1 << 18
"""MOST_CHANNELS of fastcar_engine_core.hpp: word counts of a call stay int32."""

TABLED = ("silu", "gelu", "gelu_tanh")
"""Activations that read a table of factors."""


def check_mlp(mlp: MlpSpec, *, drafts: bool = False) -> None:
    """Raise CompileError when no kernel exists for this MLP; `drafts` take two rows of the array for each row."""
    if mlp.activation not in ACTIVATIONS or mlp.quant not in ACCELERATED:
        kind = f"{'gated' if mlp.gated else 'plain'} {mlp.quant} MLP with activation {mlp.activation!r}"
        raise CompileError(
            f"there is no HLS kernel for a {kind}",
            hint="compile for a CPU target; the HLS kernels are gated, down(act(gate(x)) * up(x)), or plain, "
            f"down(act(up(x))), with act one of {', '.join(ACTIVATIONS)}, and {' or '.join(ACCELERATED)}",
        )
    sizes = {"hidden": mlp.hidden, "intermediate": mlp.intermediate, "layers": mlp.layers}
    wrong = [f"{name} = {value}" for name, value in sizes.items() if value < 1]
    for name, value in {"batch": mlp.batch, "cores": mlp.cores}.items():
        if not 1 <= value <= MAX_ROWS:
            wrong.append(f"{name} = {value} (1 to {MAX_ROWS}: the Index Register has {MAX_ROWS} bits)")
    if max(mlp.hidden, mlp.intermediate) > MOST_INPUTS:
        wrong.append(f"hidden = {mlp.hidden}, intermediate = {mlp.intermediate} (at most 65536: int32 sums)")
    if mlp.cores > (2 if drafts else 1) * mlp.batch >= 1:
        wrong.append(f"cores = {mlp.cores} for {mlp.batch} row(s): a core without a row is never used")
    if wrong:
        what = f"the MLP cannot be built: {'; '.join(wrong)}"
        raise CompileError(what, hint="change the model or the batch size")


@dataclass(frozen=True)
class LinearSpec:
    """One call: y[B, channels] = linear(x[B, inputs]) of int8 weights.

    Args:
        name: of the call and of its weight stream, such as `layer_0.qkv`.
        inputs: K. channels: N, of all linears of the call together.
        biased: whether there is a bias.
    """

    name: str
    inputs: int
    channels: int
    biased: bool = False

    @property
    def macs(self) -> int:
        """Multiply-accumulates for one row."""
        return self.inputs * self.channels

    def weight_bytes(self, quant: str) -> int:
        """Return the bytes read once per call: weights and scales, padded as in the weight stream."""
        return quant_format(quant).linear_bytes(self.channels, self.inputs)

    def product(self, ports: int, bits: int) -> EngineProduct:
        """Return the product, not cut yet."""
        return EngineProduct(self.inputs, self.channels, ports, bits=bits, bias=self.biased)


@dataclass(frozen=True)
class DraftSpec:
    """A layer's draft on the array: its neurons and rank, and whether a neuron has a bias."""

    layer: int
    neurons: int
    rank: int
    biased: bool = False

    @property
    def name(self) -> str:
        """Name of the weight stream."""
        return f"layer_{self.layer}.draft"

    def products(self, mlp: MlpSpec, ports: int) -> DraftProducts:
        """Return its products, not cut yet."""
        channels = (2 if mlp.gated else 1) * self.neurons + self.rank
        first = EngineProduct(mlp.hidden, channels, ports, bits=mlp.weight_bits, bias=self.biased)
        outer = EngineProduct(self.neurons + self.rank, mlp.hidden, ports, bits=mlp.weight_bits)
        return DraftProducts(first, outer, self.neurons, self.rank)


def check_drafts(rows: int, drafts: Sequence[DraftSpec]) -> None:
    """Raise CompileError where the array has no rows or inputs for drafts: it takes two rows for each of the batch."""
    if not drafts:
        return
    wide = next((d for d in drafts if d.neurons + d.rank > MOST_INPUTS), None)
    if 2 * rows > MAX_ROWS:
        what = f"drafts on the accelerator take two rows of its array each: {rows} rows are more than {MAX_ROWS // 2}"
        raise CompileError(what, hint=f"compile with at most {MAX_ROWS // 2} rows, or with offload='linears'")
    if wide is not None:
        what = f"the draft of layer {wide.layer} has {wide.neurons + wide.rank} features (at most {MOST_INPUTS})"
        raise CompileError(what, hint="fit a smaller draft, or compile with offload='linears'")


LAYER_INSTRUCTIONS, OTHER_INSTRUCTIONS = 14, 4
"""Instructions of a layer with norms of its heads, RoPE and replay (`step_program`), and those before and behind the layers."""

DRAFT_INSTRUCTIONS = 2
"""Further ones of a layer with a draft."""


@dataclass(frozen=True)
class StepSpec:
    """What a kernel of whole decode steps has beside the MLPs and linears.

    Args:
        heads, key_heads, head_dim: of attention. positions: rows of a key/value cache.
        layer_norms: the norms are layer norms. shared: rows of a video, which share its cache.
    """

    heads: int
    key_heads: int
    head_dim: int
    positions: int
    layer_norms: bool = False
    shared: int = 1

    @property
    def queries(self) -> int:
        """Query heads of a key head."""
        return max(1, self.heads // max(1, self.key_heads))

    def sides(self) -> list[tuple[int, int]]:
        """Return what may run side by side: query heads of a key head, and rows of a video, both in runs of equal length."""
        # Equal runs waste no multiplier: every run fills its side.
        groups, shares = ([n for n in range(1, most + 1) if most % n == 0] for most in (self.queries, self.shared))
        return [(group, share) for group in groups for share in shares]

    @property
    def blocks(self) -> int:
        """Blocks of a head."""
        return -(-self.head_dim // BLOCK)

    def cache_bytes(self, mlp: MlpSpec, ports: int) -> int:
        """Return the bytes of all keys and values on so many weight ports."""
        layout = CacheLayout(ports, self.blocks * BLOCK, self.positions)
        heads = mlp.layers * -(-mlp.batch // self.shared) * self.key_heads
        return heads * ports * (layout.key_words + layout.value_words) * WORD_BYTES

    def buffers(self, mlp: MlpSpec, group: int, share: int = 1) -> StepBuffers:
        """Return what the kernel keeps on chip, with so many query heads of so many rows side by side."""
        row = max(mlp.hidden, (self.heads + 2 * self.key_heads) * self.head_dim)
        return StepBuffers(
            rows=mlp.batch,
            qkv_words=float_words(row),
            lanes=group * share,
            share=share,
            blocks=self.blocks,
            positions=-(-self.positions // BLOCK) * BLOCK,
            norm_words=float_words(mlp.hidden),
            instructions=LAYER_INSTRUCTIONS * mlp.layers + OTHER_INSTRUCTIONS,
            query_words=float_words(max(self.heads * self.head_dim, mlp.hidden)),
            key_words=float_words(max(self.key_heads * self.head_dim, mlp.hidden)),
            layer_norms=self.layer_norms,
        )


@dataclass(frozen=True)
class StepBuffers:
    """What a kernel of whole steps keeps on chip.

    Args:
        rows: of the batch. lanes: query heads side by side, of `share` rows.
        blocks: of 32 elements in a head. positions: of a head's logits. instructions: of the step program.
        norm_words: 128-bit words of x, and of a norm's weight. qkv_words: of q, k and v, or of x if that is longer. query_words, key_words: of a row of q, and of the cached key, or of the
            MLP's input, for the gate.
        layer_norms: the norms are layer norms.
    """

    rows: int
    qkv_words: int
    lanes: int
    share: int
    blocks: int
    positions: int
    norm_words: int
    instructions: int
    query_words: int
    key_words: int
    layer_norms: bool = False


def check_linears(linears: Sequence[LinearSpec]) -> None:
    """Raise CompileError naming every linear that the engine cannot compute."""
    wrong = [
        f"{linear.name} is {linear.inputs} -> {linear.channels}"
        for linear in linears
        if not (1 <= linear.inputs <= MOST_INPUTS and 1 <= linear.channels <= MOST_CHANNELS)
    ]
    if wrong:
        what = f"the engine has at most {MOST_INPUTS} inputs and {MOST_CHANNELS} channels: {'; '.join(wrong)}"
        raise CompileError(what, hint="compile with offload='mlp'")
