"""DecoderProgram: the one representation that passes rewrite and every backend is lowered from."""

import copy
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Self

import torch
from torch import Tensor, fx

import fastcar_compile.ir.ops  # noqa: F401  # pyright: ignore[reportUnusedImport]  (it registers the operators)
from fastcar_compile.ir.query import placeholder_names, tensor_attributes
from fastcar_compile.ir.sites import layer_sites
from fastcar_compile.ir.types import CONTEXT_ROLES, DecoderConfig, LayerSite, StateRole
from fastcar_compile.ir.weights import LazyWeights, Parameters


@dataclass(frozen=True)
class StateSpec:
    """One named state tensor: an input and an output of the graph under the same name; starts at zero.

    A state of the context (`reads_only`) is an input only: the context graph makes it, once per video.

    Args:
        sinks: of a ring cache, the first positions, which it keeps for ever; None: it is no ring.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    role: StateRole
    layer: int
    sinks: int | None = None

    @property
    def reads_only(self) -> bool:
        """Whether forwards read the state and never write it."""
        return self.role in CONTEXT_ROLES

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.dtype.itemsize * torch.Size(self.shape).numel()

    def zeros(self) -> Tensor:
        """Return the state at reset."""
        return torch.zeros(self.shape, dtype=self.dtype)


@dataclass
class DecoderProgram:
    """A decode step, its prefill chunk and what is known about both.

    Attributes:
        graph_module: torch.fx decode step; placeholders and outputs as in docs/reference/architecture.md.
        prefill: torch.fx prefill chunk over the same key and value caches, or None. With `config.rows` it is
            that of one video, over its part of each cache.
        context: torch.fx graph from a context to the states that cross-attention reads, or None.
        state: every state tensor of the decode step.
        outputs: names of the decode step's output tuple, in order.
        prefill_outputs: the same of the prefill chunk. context_outputs: of the context graph.
        config: sizes and options.
        log: what every pass did, for `explain`.
        reasons: of every pass that ran and of the capture: why it makes nodes.
        lazy: where the values of parameters come from that the graphs hold on the meta device; None: all are there.
        losses: weight in memory -> share of its values for which its number format has no number.
    """

    graph_module: fx.GraphModule
    prefill: fx.GraphModule | None
    config: DecoderConfig
    state: list[StateSpec] = field(default_factory=list[StateSpec])
    outputs: list[str] = field(default_factory=list[str])
    prefill_outputs: list[str] = field(default_factory=list[str])
    log: list[str] = field(default_factory=list[str])
    reasons: dict[str, str] = field(default_factory=dict[str, str])
    lazy: LazyWeights | None = None
    losses: dict[str, float] = field(default_factory=dict[str, float])
    context: fx.GraphModule | None = None
    context_outputs: list[str] = field(default_factory=list[str])

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
        """Every parameter and constant that the graphs read, by attribute path."""
        found: dict[str, Tensor] = {}
        for module in self.all_graphs():
            found |= tensor_attributes(module)
        return Parameters(found, self.lazy)

    def copied(self) -> Self:
        """Return the program with graphs of its own, which passes may rewrite, over the same tensors."""
        tensors = (tensor for module in self.all_graphs() for tensor in (*module.parameters(), *module.buffers()))
        return copy.deepcopy(self, {id(tensor): tensor for tensor in tensors})

    def graphs(self) -> Iterator[fx.GraphModule]:
        """Yield the decode step and, if there is one, the prefill chunk."""
        yield self.graph_module
        if self.prefill is not None:
            yield self.prefill

    def all_graphs(self) -> Iterator[fx.GraphModule]:
        """Yield the graphs of `graphs` and, if there is one, the context graph."""
        yield from self.graphs()
        if self.context is not None:
            yield self.context
