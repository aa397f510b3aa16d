"""DecoderProgram: the one representation that passes rewrite and every backend is lowered from."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum

import torch
from torch import Tensor, fx

from fastcar_compile.ir.modules import placeholder_names, tensor_attributes
from fastcar_compile.ir.query import value_of
from fastcar_compile.ir.sites import LayerSite, layer_sites
from fastcar_compile.ir.weights import LazyWeights, Parameters


class StateRole(StrEnum):
    """What a state tensor is for."""

    KEY_CACHE = "key_cache"
    VALUE_CACHE = "value_cache"
    MLP_CACHE = "mlp_cache"
    GATE_CACHE = "gate_cache"
    CHAIN_COUNT = "chain_count"


@dataclass(frozen=True)
class StateSpec:
    """One named state tensor: an input and an output of the graph under the same name; starts at zero."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    role: StateRole
    layer: int

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.dtype.itemsize * torch.Size(self.shape).numel()

    def zeros(self) -> Tensor:
        """Return the state at reset."""
        return torch.zeros(self.shape, dtype=self.dtype)


@dataclass(frozen=True)
class Ring:
    """Sparse attention over ring caches [B, Hkv, sinks + rows, D] (docs/explanation/sparse_attention.md), in tokens.

    A query at position p sees keys 0 .. sinks - 1 and p - window + 1 .. p. Position p >= sinks is at row
    sinks + (p - sinks) mod rows. `positions`: "absolute", or "cache", where the sinks are met as if the positions
    between them and the window did not exist.
    """

    sinks: int
    window: int
    rows: int
    positions: str = "absolute"

    @property
    def capacity(self) -> int:
        """Rows of a key or value cache."""
        return self.sinks + self.rows

    @property
    def attended(self) -> int:
        """Keys that one query sees at most."""
        return self.sinks + self.window


@dataclass(frozen=True)
class DecoderConfig:
    """Sizes and options that fix the graph.

    batch_size rows B, max_seq_len S and tokens_per_frame F in tokens, hidden_size H, vocab_size V (None: headless),
    prefill_chunk tokens of one prefill call (0: no prefill graph), takes_embeddings: input is float32 [B, T, H].
    ring: sparse attention; None: attention to all positions, whose caches hold S rows.
    """

    batch_size: int
    max_seq_len: int
    tokens_per_frame: int
    num_layers: int
    hidden_size: int
    vocab_size: int | None
    takes_embeddings: bool
    prefill_chunk: int
    ring: Ring | None = None

    @property
    def input_name(self) -> str:
        """Name of the token or embedding placeholder."""
        return "inputs_embeds" if self.takes_embeddings else "tokens"


@dataclass
class DecoderProgram:
    """A decode step, its prefill chunk and what is known about both.

    Attributes:
        graph_module: torch.fx decode step; placeholders and outputs as in docs/reference/architecture.md.
        prefill: torch.fx prefill chunk over the same key and value caches, or None.
        state: every state tensor of the decode step.
        outputs: names of the decode step's output tuple, in order.
        prefill_outputs: the same of the prefill chunk.
        config: sizes and options.
        log: what every pass did, for `explain`.
        lazy: where the values of parameters come from that the graphs hold on the meta device; None: all are there.
    """

    graph_module: fx.GraphModule
    prefill: fx.GraphModule | None
    config: DecoderConfig
    state: list[StateSpec] = field(default_factory=list[StateSpec])
    outputs: list[str] = field(default_factory=list[str])
    prefill_outputs: list[str] = field(default_factory=list[str])
    log: list[str] = field(default_factory=list[str])
    lazy: LazyWeights | None = None

    @property
    def sites(self) -> list[LayerSite]:
        """Where every layer's attention and MLP are, in order, read off the graph; none before find-sites ran."""
        return layer_sites(self.graph_module)

    @property
    def inputs(self) -> list[str]:
        """Placeholder names of the decode step, in order, state included."""
        return placeholder_names(self.graph_module)

    @property
    def params(self) -> Parameters:
        """Every parameter and constant that the two graphs read, by attribute path."""
        found: dict[str, Tensor] = {}
        for module in self.graphs():
            found |= tensor_attributes(module)
        return Parameters(found, self.lazy)

    def graphs(self) -> Iterator[fx.GraphModule]:
        """Yield the decode step and, if there is one, the prefill chunk."""
        yield self.graph_module
        if self.prefill is not None:
            yield self.prefill

    def state_names(self, *roles: StateRole) -> list[str]:
        """Return the names of the states with one of these roles, of all states without an argument."""
        return [s.name for s in self.state if not roles or s.role in roles]

    def example_inputs(self, graph: fx.GraphModule | None = None) -> list[Tensor]:
        """Return zero tensors for every placeholder of a graph, in order."""
        module = graph or self.graph_module
        return [_zeros_like(n) for n in module.graph.nodes if n.op == "placeholder"]


def _zeros_like(node: fx.Node) -> Tensor:
    val = value_of(node)
    return torch.zeros(tuple(val.shape), dtype=val.dtype)
